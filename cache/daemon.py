"""The cache daemon's process: arguments, event loop, signals. `python -m cache.daemon --help`.

Torch-free on purpose: it must be small, start in a blink and never die of a library. It starts
empty and keeps no file: a supervisor tells it what to load, or donates what its predecessor held.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cache.descriptors import reserve_descriptors
from cache.errors import UnderstudyError
from cache.service import CacheService

__all__ = ["main"]

log = logging.getLogger("cache.daemon")

LOADER_ARGV: Final = (sys.executable, "-m", "cache.loader")


async def serve(service: CacheService, *, until: asyncio.Event) -> None:
    """Serve until `until` is set, then stop in order."""
    await service.start()
    try:
        await until.wait()
    finally:
        await service.stop()


async def _run(arguments: argparse.Namespace) -> None:
    until, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, until.set)
    service = CacheService(
        arguments.socket,
        instance=arguments.instance,
        device=arguments.device,
        loader_argv=LOADER_ARGV,
        load_timeout_s=arguments.load_timeout,
        scrub_rate_bytes_per_s=arguments.scrub_rate * (1 << 20),
    )
    log.info(
        "cache daemon %s serves %s at %s", arguments.instance, arguments.device, arguments.socket
    )
    await serve(service, until=until)
    log.info("cache daemon %s stopped", arguments.instance)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # asyncio's own loop serves as well, a little slower
        return None
    return uvloop.new_event_loop


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 after SIGTERM or SIGINT, 2 when it cannot start."""
    parser = argparse.ArgumentParser(prog="cache.daemon", description="Owns a device's memory.")
    parser.add_argument("--socket", type=Path, required=True, help="stable path to listen at")
    parser.add_argument("--instance", required=True, help="name of this process")
    parser.add_argument("--device", default="cpu", help="cpu, or a device such as cuda:0")
    parser.add_argument("--load-timeout", type=float, default=1800.0, metavar="S")
    parser.add_argument("--scrub-rate", type=float, default=512.0, metavar="MIB_PER_S")
    arguments = parser.parse_args(argv)
    reserve_descriptors()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_run(arguments))
    except (UnderstudyError, OSError) as error:
        log.error("the cache daemon cannot start: %s", error)  # noqa: TRY400
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
