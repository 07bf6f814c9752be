"""Topologies of servers: what is filled in, what is refused, and what `plan` shows."""

import sys
from pathlib import Path

import pytest

from supervisor.topology import Finding, Topology, check, load
from supervisor.topology.plan import plan_topology
from tests.unit.topology.site import FakeMachine

CORRECT = f"""\
version: 1
name: servers
state_dir: STATE
groups:
  - name: chat
    engines:
      - {{name: a, kind: command, role: primary, command: [{sys.executable}, --port, "{{port}}"]}}
      - {{name: b, kind: command, role: standby, command: [{sys.executable}, "--uds={{socket}}"]}}
"""


class Servers:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "servers.yaml"
        self._text = CORRECT.replace("STATE", str(folder / "state"))

    def write(self, change: dict[str, str]) -> None:
        text = self._text
        for old, new in change.items():
            assert old in text
            text = text.replace(old, new, 1)
        self.file.write_text(text)

    def load(self, change: dict[str, str] | None = None) -> Topology:
        self.write(change or {})
        return load(self.file, {})

    def check(self, change: dict[str, str] | None = None) -> list[Finding]:
        self.write(change or {})
        return check(self.file, {}, machine=FakeMachine())


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def test_two_commands_are_a_topology_and_the_rest_is_filled_in(servers: Servers) -> None:
    assert servers.check() == []
    (group,) = servers.load().groups
    assert group.runs_commands
    assert group.model is None
    assert (group.cache.mode, group.health.hang_after, group.kv.slots) == ("off", 10.0, 256)


def test_what_the_file_says_itself_counts(servers: Servers) -> None:
    change = {"    engines:": "    health: {interval: 50ms, hang_after: 2s}\n    engines:"}
    (group,) = servers.load(change).groups
    assert (group.health.interval, group.health.hang_after) == (0.05, 2.0)


@pytest.mark.parametrize(
    ("change", "line", "path", "what", "instead"),
    [
        (
            {'"{port}"': '"{prot}"'},
            7,
            "groups[0].engines[0].command[2]",
            "{prot} is not a placeholder",
            "write {port}",
        ),
        (
            {'"{port}"': '"8000"'},
            7,
            "groups[0].engines[0].command",
            "the command does not say where the server listens",
            'write "{port}" where its port goes, or "{socket}" where its Unix socket goes',
        ),
        (
            {'"{port}"': '"{port}", "{socket}"'},
            7,
            "groups[0].engines[0].command",
            "the command has both {port} and {socket}, and only one of them would be used",
            "write one of the two",
        ),
        (
            {"kind: command, role: standby": "kind: native, role: standby"},
            8,
            "groups[0].engines[1].kind",
            "group 'chat' mixes the kinds command and native",
            "write command, or a group of its own for the other kind",
        ),
        (
            {"role: standby": "role: batch"},
            8,
            "groups[0].engines[1].role",
            "a server cannot be the batch engine: it cannot be frozen as a whole",
            "write primary or standby",
        ),
        (
            {"    engines:": "    cache: {mode: daemon}\n    engines:"},
            6,
            "groups[0].cache.mode",
            "cache mode daemon, but servers keep their own copy of the weights",
            "write mode: off, or leave the cache out",
        ),
        (
            {"role: standby": "ballast: 1MiB, role: standby"},
            8,
            "groups[0].engines[1].ballast",
            "ballast is memory of a native engine; a server has its own",
            "leave it out",
        ),
        (
            {f'[{sys.executable}, "--uds': '[no-such-program, "--uds'},
            8,
            "groups[0].engines[1].command[0]",
            "there is no program 'no-such-program'",
            "write its full path, or put its folder into PATH",
        ),
    ],
)
def test_each_broken_rule_is_told_on_its_line(  # noqa: PLR0917 - one row of the table
    servers: Servers, change: dict[str, str], line: int, path: str, what: str, instead: str
) -> None:
    (finding,) = servers.check(change)
    assert (finding.line, finding.path, finding.what, finding.instead) == (
        line, path, what, instead,
    )  # fmt: skip


def test_a_placeholder_without_quotes_is_explained(servers: Servers) -> None:
    (finding,) = servers.check({'"{port}"': "{port}"})
    assert (finding.line, finding.instead) == (7, 'write it in quotes: "{port}"')


def test_keys_of_native_groups_are_told_from_what_servers_need(servers: Servers) -> None:
    more = (
        "    devices: [cuda:0, cuda:1]\n    tensor_parallel: 2\n"
        "    batch: {freeze_when: queue > 3}\n"
    )
    found = servers.check({"    engines:": more + "    engines:"})
    assert [(finding.line, finding.path) for finding in found] == [
        (6, "groups[0].devices"), (7, "groups[0].tensor_parallel"), (8, "groups[0].batch"),
    ]  # fmt: skip
    assert {finding.instead for finding in found} == {"leave it out"}


def test_a_command_line_in_one_piece_is_taken_apart(servers: Servers) -> None:
    given = f'[{sys.executable}, --port, "{{port}}"]'
    (finding,) = servers.check({given: '"vllm serve m --port {port}"'})
    assert finding.instead == 'write a list: [vllm, serve, m, --port, "{port}"]'
    (finding,) = servers.check({given: '["vllm serve m --port {port}"]'})
    assert finding.instead == "write program and arguments as entries of their own"


def test_a_program_that_cannot_be_run_is_told_from_one_that_is_not_there(
    servers: Servers, tmp_path: Path
) -> None:
    script = tmp_path / "serve.sh"
    script.touch(0o600)
    (finding,) = servers.check({f'[{sys.executable}, "--uds': f'[{script}, "--uds'})
    assert finding.what == f"{script} is not executable"
    assert finding.instead == f"run: chmod +x {script}"
    (finding,) = servers.check({f'[{sys.executable}, "--uds': f'[{tmp_path}, "--uds'})
    assert finding.what == f"{tmp_path} is a folder"


def test_a_nul_is_found_before_the_start(servers: Servers) -> None:
    (finding,) = servers.check({'"{port}"': '"{port}", "a\\0b"'})
    assert (finding.line, finding.what) == (7, "a NUL cannot be handed to a program")


def test_a_server_without_a_command(servers: Servers) -> None:
    (finding,) = servers.check({f', command: [{sys.executable}, --port, "{{port}}"]': ""})
    assert finding.what == "an engine of kind command needs its command"
    assert finding.line == 7


def test_braces_of_json_and_templates_are_left_alone(servers: Servers) -> None:
    more = """'{"temperature": 0}', '{{ messages }}', '{{socket}}', '{"port":{port}}'"""
    assert servers.check({'"{port}"': more}) == []


def test_the_plan_shows_the_commands_and_neither_zygote_nor_cache(servers: Servers) -> None:
    plan = plan_topology(servers.load())
    kinds = [process.kind for process in plan.processes]
    assert kinds == ["supervisor", "gateway worker", "engine (primary)", "server",
                     "engine (standby)", "server"]  # fmt: skip
    assert plan.processes[3].argv == (sys.executable, "--port", "{port}")
    assert plan.processes[5].sockets[0].endswith("b-<8 hex>.srv")
