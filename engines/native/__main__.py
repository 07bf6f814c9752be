"""A cold start: `python -m engines.native SPECFILE`, the spec as JSON."""

import os
import sys
from pathlib import Path

import msgspec

from engines.contract import EngineSpec
from engines.native.threads import SINGLE_THREAD_ENVIRONMENT


def main() -> None:
    """Read the spec, pin the threads, be the engine."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m engines.native SPECFILE")
    try:
        spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineSpec)
    except (OSError, msgspec.MsgspecError) as error:
        sys.exit(f"error: bad_spec: {sys.argv[1]}: {error}")
    # Before torch is imported for the first time: later it would change nothing.
    os.environ.update(SINGLE_THREAD_ENVIRONMENT)
    from engines.native.main import run

    run(spec)


if __name__ == "__main__":
    main()
