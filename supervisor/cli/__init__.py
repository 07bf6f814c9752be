"""The command line, one verb per module.

`main` is the console script. It turns every error into one line on stderr and an exit code
(0 ok, 1 failed, 2 bad configuration, 3 not reachable, 4 precondition); nobody sees a traceback.
Verbs import what they need when they run, so that `supervisor version` answers at once.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit."""
    from supervisor.cli.app import run_command_line

    sys.exit(run_command_line(sys.argv[1:]))
