"""A running supervisor with two servers of another maker as engines, and a gateway before them."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from chaos.client import EngineView, StatusView, wait_until
from chaos.system import RunningSystem, SystemOptions, free_ports
from engines.command.processes import ServerTree
from supervisor.process import ProcessId, read_process_id, signal_process

__all__ = ["CommandSystem", "command_topology"]

NAMES = ("chat-a", "chat-b")


@dataclass(frozen=True)
class CommandOptions:
    """The shape of the topology."""

    where: str = '--port, "{port}"'
    more: str = ""  # arguments
    hang_after: str = "1s"
    drain_timeout: str = "20s"
    intensity: int = 50


def command_topology(
    directory: Path, state_dir: Path, ports: tuple[int, int], options: CommandOptions
) -> str:
    """A topology whose servers look for orders in `directory/<engine>.orders`."""
    engines = "\n".join(
        f"      - {{name: {name}, kind: command, role: {role}, command: [{sys.executable}, -m, "
        f"tests.harness.http_engine, {options.where}, --orders, {directory / name}.orders"
        f"{options.more}]}}"
        for name, role in zip(NAMES, ("primary", "standby"), strict=True)
    )
    return f"""\
version: 1
name: servers
state_dir: {state_dir}
gateway: {{listen: "127.0.0.1:{ports[0]}"}}
admin: {{listen: "127.0.0.1:{ports[1]}"}}
groups:
  - name: chat
    engines:
{engines}
    health: {{interval: 100ms, hang_after: {options.hang_after}, canary: 500ms}}
    failover:
      {{intensity: {options.intensity}, stable_after: 1s, drain_timeout: {options.drain_timeout}}}
"""


class CommandSystem:
    """`RunningSystem` with words for servers. A context manager through `system`."""

    def __init__(self, directory: Path, options: CommandOptions | None = None) -> None:
        self._directory = directory
        gateway, admin = free_ports(2)
        state_dir, ports = directory / "state", (gateway, admin)
        topology = directory / "topology.yaml"
        topology.write_text(
            command_topology(directory, state_dir, ports, options or CommandOptions()), "utf-8"
        )
        environment: Mapping[str, str] = {"PYTHONPATH": str(Path(__file__).parents[2])}
        self.system = RunningSystem(
            directory, SystemOptions(extra_environment=environment),
            topology=topology, state_dir=state_dir, ports=ports,
        )  # fmt: skip

    def engine(self, name: str) -> EngineView:
        """What the status says of an engine."""
        status = self.system.admin.status()
        return next(e for e in status.group.engines if e.name == name)

    def primary(self) -> str:
        """The name of the primary, once the group is whole."""
        name = self.system.wait_whole().group.primary
        assert name is not None
        return name

    def server(self, name: str) -> ProcessId:
        """The server below an engine."""
        pid = self.engine(name).pid
        assert pid is not None
        (server, *_) = ServerTree(pid).scan()
        return read_process_id(server)

    def cpu_s(self, name: str) -> float:
        """CPU time of a server since its start."""
        fields = Path(f"/proc/{self.server(name).pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def order(self, name: str, word: str) -> None:
        """Tell a server how to be; its successor is well again."""
        path = self._directory / f"{name}.orders"
        temporary = path.with_suffix(".new")
        temporary.write_text(f"{self.server(name).pid} {word}\n")
        temporary.rename(path)

    def signal_server(self, name: str, sig: Signals) -> ProcessId:
        """Signal the server itself; the adapter is not told."""
        server = self.server(name)
        assert signal_process(server, sig)
        return server

    def wait_epoch(self, above: int, *, timeout_s: float = 30.0) -> StatusView:
        """Wait until somebody else has become primary, and the group is whole again."""

        def is_over() -> StatusView | None:
            status = self.system.status()
            is_new = status is not None and status.group.epoch > above
            return status if is_new else None

        wait_until(is_over, f"an epoch above {above}", timeout_s=timeout_s)
        return self.system.wait_whole()

    def events(self, kind: str) -> int:
        """How many events of a kind there are."""
        with suppress(FileNotFoundError):
            text = (self.system.state_dir / "events.jsonl").read_text("utf-8")
            return sum(f'"{kind}"' in line for line in text.splitlines())
        return 0
