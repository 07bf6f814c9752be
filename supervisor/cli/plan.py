"""`supervisor plan FILE`: what would start, and what it would take."""

import dataclasses
import os
import shlex
from typing import TYPE_CHECKING

from supervisor.cli.options import FileArgument, Output, OutputOption
from supervisor.cli.render import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from supervisor.topology.plan import GroupPlan, Plan


def command(file: FileArgument, output: OutputOption = Output.TEXT) -> None:
    """Show what FILE would start.

    Processes in order, sockets and memory. Changes nothing.
    """
    from supervisor.topology import load
    from supervisor.topology.machine import LocalMachine
    from supervisor.topology.plan import plan_topology

    plan = plan_topology(load(file, os.environ))
    available_bytes = LocalMachine().memory().available_bytes
    if output is Output.JSON:
        print_json({**dataclasses.asdict(plan), "available_bytes": available_bytes})
        return
    _show(plan, available_bytes)


def _show(plan: "Plan", available_bytes: int) -> None:
    from supervisor.topology.findings import readable

    out = console()
    out.print(f"{plan.name}: state in {plan.state_dir}")
    out.print(f"  clients  http://{plan.gateway_listen}/v1")
    out.print(f"  admin    http://{plan.admin_listen} and {plan.admin_socket}\n")
    out.print(_process_table(plan))
    out.print("sockets:")
    for process in plan.processes:
        for socket in process.sockets:
            out.print(f"  {process.name}  {socket}", markup=False)
    if servers := [process for process in plan.processes if process.kind == "server"]:
        out.print("commands:")
        for process in servers:
            out.print(f"  {process.name}  {shlex.join(process.argv)}", markup=False)
    out.print()
    for group in plan.groups:
        out.print(_group_line(group))
    out.print(f"total: {readable(plan.total_bytes)}, available now: {readable(available_bytes)}")


def _process_table(plan: "Plan") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from supervisor.topology.findings import readable

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("#", "what", "name", "device", "started by"):
        table.add_column(heading, no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for number, process in enumerate(plan.processes):
        memory = readable(process.memory_bytes) if process.memory_bytes else "not known"
        memory += " (brief)" if process.is_short_lived else ""
        row = (process.kind, process.name, process.device or "-", process.started_by)
        table.add_row(str(number), *row, memory)
    return table


def _group_line(group: "GroupPlan") -> str:
    from supervisor.topology.findings import readable

    estimate = group.memory
    if not group.model:
        return f"group {group.name}: what its servers take is not known here"
    weights = "unknown" if estimate.weights_bytes is None else readable(estimate.weights_bytes)
    kv = "unknown" if estimate.kv_bytes is None else readable(estimate.kv_bytes)
    parts = [f"weights {weights}" + (f" x {estimate.copies}" if estimate.copies > 1 else "")]
    parts.append(f"KV {kv}")
    parts += [f"KV of {n} {readable(size)}" for n, size in estimate.private_kv_bytes.items()]
    if estimate.ballast_bytes:
        parts.append(f"ballast {readable(estimate.ballast_bytes)}")
    return f"group {group.name} on {', '.join(group.devices)}: {', '.join(parts)}"
