"""Wrong keys and values: each is found on its line, with what to write instead."""

import os

import pytest

from supervisor.topology import Finding, Severity, TopologyError
from tests.unit.topology.site import FakeMachine, Site


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, "\n".join(map(str, findings))
    return findings[0]


def test_the_correct_file_has_no_findings(site: Site) -> None:
    assert site.check() == []


def test_durations_sizes_and_addresses_arrive_parsed(site: Site) -> None:
    topology = site.load({"role: primary}": "role: primary, ballast: 2GiB}"})
    assert topology.groups[0].engines[0].ballast == 2 << 30
    assert topology.groups[0].health.hang_after == 0.4
    assert str(topology.gateway.listen) == "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "what", "instead"),
    [
        # unknown keys
        ("admin:", "amdin:", 4, "amdin", "unknown key", "write admin"),
        ("{slots: 4,", "{slot: 4,", 10, "groups[0].kv.slot", "unknown key", "write slots"),
        (
            "    devices",
            "    hang_after: 1s\n    devices",
            9,
            "groups[0].hang_after",
            "unknown key",
            "write it under groups[0].health",
        ),
        (
            "role: standby}",
            "role: standby, colour: red}",
            13,
            "groups[0].engines[1].colour",
            "unknown key",
            "write one of name, kind, role, command, kv, ballast",
        ),
        # missing keys
        ("name: demo\n", "", 1, "", "the key 'name' is missing", "write name: demo"),
        (
            ", role: standby}",
            "}",
            13,
            "groups[0].engines[1]",
            "the key 'role' is missing",
            "write role: primary, standby or batch",
        ),
        # enums
        (
            "role: standby",
            "role: stanby",
            13,
            "groups[0].engines[1].role",
            "'stanby' is not one of primary, standby, batch",
            "write standby",
        ),
        (
            "role: standby",
            "kind: vllm, role: standby",
            13,
            "groups[0].engines[1].kind",
            "'vllm' is not one of native, command",
            "write native or command",
        ),
        ("version: 1", "version: 2", 1, "version", "2 is not one of 1", "write 1"),
        # units
        (
            "listen: 127.0.0.1:8000",
            "park_timeout: 30",
            5,
            "gateway.park_timeout",
            "30 is not a duration",
            "write a number with a unit, such as 400ms, 2s, 10m or 1h",
        ),
        (
            "role: standby",
            "role: standby, ballast: 1024",
            13,
            "groups[0].engines[1].ballast",
            "1024 is not a size",
            "write a number with a unit, such as 512MiB or 2GiB",
        ),
        (
            "    devices",
            "    health: {interval: 0ms}\n    devices",
            9,
            "groups[0].health.interval",
            "'0ms' is not positive",
            "write more than zero, such as 100ms",
        ),
        # numbers
        (
            "slots: 4",
            'slots: "4"',
            10,
            "groups[0].kv.slots",
            "'4' is not a whole number",
            "write digits only, such as 8",
        ),
        ("slots: 4", "slots: 0", 10, "groups[0].kv.slots", "0 is too small", "write 1 or more"),
        (
            "slots: 4",
            "slots: 4096",
            10,
            "groups[0].kv.slots",
            "4096 is too large",
            "write 1024 or less",
        ),
        (
            "max_length: 256",
            "max_length: 300",
            10,
            "groups[0].kv.max_length",
            "300 is not a multiple of 128",
            "write 384",
        ),
        # booleans
        (
            "version: 1",
            "version: 1\ncore_dumps: maybe",
            2,
            "core_dumps",
            "'maybe' is not true or false",
            "write true or false",
        ),
        (
            "version: 1",
            "version: 1\ncore_dumps: yes",
            2,
            "core_dumps",
            "'yes' is not true or false",
            "write true",
        ),
        (
            "version: 1",
            "version: 1\ncore_dumps: 0",
            2,
            "core_dumps",
            "0 is not true or false",
            "write false",
        ),
        (
            "version: 1",
            "version: 1\ncore_dumps:",
            2,
            "core_dumps",
            "nothing is not true or false",
            "write true or false",
        ),
        # text and names
        ("name: demo", "name: 7", 2, "name", "7 is not text", 'write it in quotes: "7"'),
        (
            "name: demo",
            "name: Demo!",
            2,
            "name",
            "'Demo!' is not a name",
            "write lower-case letters, digits and inner hyphens, at most 40, such as chat-a",
        ),
        # addresses
        (
            "127.0.0.1:8000",
            "8000",
            5,
            "gateway.listen",
            "8000 is not an address",
            "write IP:port, such as 127.0.0.1:8000 or '[::1]:8000'",
        ),
        (
            "127.0.0.1:8000",
            "127.0.0.1:80000",
            5,
            "gateway.listen",
            "port 80000 does not exist",
            "write one from 1 to 65535, or 0",
        ),
        # shapes
        (
            "{slots: 4, max_length: 256}",
            "4",
            10,
            "groups[0].kv",
            "4 is not a mapping",
            "write {slots: ..., max_length: ...}",
        ),
        (
            "{slots: 4, max_length: 256}",
            "",
            10,
            "groups[0].kv",
            "is empty",
            "write {slots: ..., max_length: ...} or leave the key out",
        ),
        (
            "[cpu]",
            "cpu",
            9,
            "groups[0].devices",
            "'cpu' is not a list",
            "write a list: ['cpu']",
        ),
        (
            "[cpu]",
            "[tpu]",
            9,
            "groups[0].devices[0]",
            "'tpu' is not a device",
            "write cpu or cuda:0",
        ),
        (
            "[cpu]",
            "[]",
            9,
            "groups[0].devices",
            "is an empty list",
            "write at least one entry",
        ),
    ],
)
def test_a_wrong_key_or_value_is_found_on_its_line(  # noqa: PLR0917 -- one row of the table
    site: Site, old: str, new: str, line: int, path: str, what: str, instead: str
) -> None:
    finding = only(site.check({old: new}))
    expected = (line, path, what, instead, Severity.ERROR)
    assert (finding.line, finding.path, finding.what, finding.instead, finding.severity) == expected


def test_a_finding_prints_as_file_line_what_and_instead(site: Site) -> None:
    finding = only(site.check({"role: standby": "role: stanby"}))
    assert str(finding) == (
        f"{site.file}:13: groups[0].engines[1].role: 'stanby' is not one of primary, standby, "
        "batch; write standby"
    )
    assert finding.column == 30


def test_every_error_is_said_at_once_in_file_order(site: Site) -> None:
    changes = {
        "name: demo": "name: 7",
        "8000": "80000",
        "slots: 4": "slot: 4",
        "role: batch": "role: bath",
    }
    found = site.check(changes, machine=FakeMachine(available_bytes=0))
    assert [finding.line for finding in found] == [2, 5, 10, 14]


def test_a_wrong_value_silences_only_what_follows_from_it(site: Site) -> None:
    """A misspelt primary must not also be 'no primary', but the taken name is still told."""
    changes = {"role: primary": "role: primry", "name: chat-b,": "name: chat-a,"}
    assert [f.path for f in site.check(changes)] == [
        "groups[0].engines[0].role",
        "groups[0].engines[1].name",
    ]


def test_load_raises_with_every_finding_and_exit_code_2(site: Site) -> None:
    with pytest.raises(TopologyError) as caught:
        site.load({"slots: 4": "slots: 0", "role: primary": "role: primry"})
    assert caught.value.exit_code == 2
    assert [finding.line for finding in caught.value.findings] == [10, 12]
    assert "2 errors" in str(caught.value)


def test_scalars_follow_yaml_1_2_so_that_off_is_a_word(site: Site) -> None:
    topology = site.load({"    devices": "    cache: {mode: off}\n    devices"})
    assert topology.groups[0].cache.mode == "off"


def test_relative_paths_stay_as_written(site: Site) -> None:
    topology = site.load({str(site.state_dir): "run/demo"})
    assert os.fspath(topology.state_dir) == "run/demo"
