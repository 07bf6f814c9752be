"""A start: `python -m engines.command SPECFILE`, the spec as JSON."""

import sys
from pathlib import Path

import msgspec

from engines.command.main import run
from engines.contract import CommandSpec


def main() -> None:
    """Read the spec, be the engine."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m engines.command SPECFILE")
    try:
        spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=CommandSpec)
    except (OSError, msgspec.MsgspecError) as error:
        sys.exit(f"error: bad_spec: {sys.argv[1]}: {error}")
    run(spec)


if __name__ == "__main__":
    main()
