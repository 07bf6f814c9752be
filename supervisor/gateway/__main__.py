"""Start a gateway worker: `python -m supervisor.gateway SPECFILE`.

SPECFILE holds a `protocol.GatewaySpec` as JSON; the listening socket is inherited under the number
it names. Exit status: 0 drained, 2 the specification is unusable.
"""

import logging
import sys
from pathlib import Path

import msgspec
import uvloop

from supervisor.gateway.app import serve
from supervisor.gateway.protocol import GatewaySpec


def main(arguments: list[str]) -> int:
    """Read the specification and serve."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m supervisor.gateway SPECFILE\n")
        return 2
    try:
        spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=GatewaySpec)
    except (OSError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"error: {arguments[0]}: {error}\n")
        return 2
    uvloop.run(serve(spec))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
