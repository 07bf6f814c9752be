"""`supervisor version`."""

import json
import platform

from supervisor import __version__
from supervisor.cli.options import Output, OutputOption


def command(output: OutputOption = Output.TEXT) -> None:
    """Print the version."""
    if output is Output.JSON:
        print(json.dumps({"version": __version__, "python": platform.python_version()}))
    else:
        print(f"understudy {__version__}")
