"""`supervisor history`: past operations."""

from typing import Any

from supervisor.cli.options import FileOption, Output, OutputOption
from supervisor.cli.render import describe_operation, print_json, when
from supervisor.cli.target import connect


def command(file: FileOption = None, output: OutputOption = Output.TEXT) -> None:
    """Show past operations, oldest first.

    Failovers, switchovers, evictions and restarts, with the time of each phase.
    """
    answer = connect(file).get("/v1/history")
    operations = _operations(answer)
    if output is Output.JSON:
        print_json(operations)
        return
    for operation in operations:
        print(f"{when(operation.get('started'))}  {describe_operation(operation)}")
    if not operations:
        print("nothing has happened yet")


def _operations(answer: dict[str, Any]) -> list[dict[str, Any]]:
    for key in ("history", "operations", "items"):
        if isinstance(value := answer.get(key), list):
            return [item for item in value if isinstance(item, dict)]
    return []
