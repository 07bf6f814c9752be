"""Who holds the card's memory: asked only once something has failed for lack of it.

The question goes to `nvidia-smi` as a process with a deadline. NVML in our own process could hang
on a sick driver, and the daemon must not hang with it.
"""

import subprocess
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["MemoryUse", "describe_use", "parse_use"]

_TIMEOUT_S: Final = 5.0
_MIB: Final = 1 << 20
_MAX_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A phrase for people and the same as fields."""

    text: str
    details: dict[str, Any] = field(default_factory=dict)


def describe_use(uuid: str) -> MemoryUse:
    """Free and total memory of the card and its largest holders, or why that is not known."""
    try:
        totals = _ask(uuid, "--query-gpu=memory.free,memory.total")
        processes = _ask(uuid, "--query-compute-apps=pid,used_memory")
    except (OSError, subprocess.SubprocessError) as error:
        return MemoryUse(f"who holds it is unknown: nvidia-smi: {error}")
    return parse_use(totals, processes)


def _ask(uuid: str, query: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"],  # noqa: S607
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return done.stdout


def parse_use(totals: str, processes: str) -> MemoryUse:
    """From nvidia-smi's two answers, in MiB. Processes of other containers have no figures."""
    numbers = [int(value) for value in totals.replace(",", " ").split() if value.isdecimal()]
    if len(numbers) != 2:
        return MemoryUse("who holds it is unknown: nvidia-smi gives no figures")
    free, total = numbers
    held: dict[int, int] = {}
    for line in processes.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdecimal() and used.strip().isdecimal():
            held[int(pid)] = int(used) * _MIB
    text = f"{free} of {total} MiB are free"
    if held:
        largest = sorted(held.items(), key=lambda item: -item[1])[:_MAX_NAMED]
        text += "; held by " + ", ".join(f"pid {pid}: {used // _MIB} MiB" for pid, used in largest)
    details = {"free_bytes": free * _MIB, "total_bytes": total * _MIB, "held_bytes": held}
    return MemoryUse(text, details)
