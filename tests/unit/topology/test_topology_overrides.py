"""Environment variables over the file."""

import pytest

from supervisor.topology import Finding, TopologyError
from tests.unit.topology.site import Site


def refused(site: Site, variable: str, value: str) -> Finding:
    with pytest.raises(TopologyError) as caught:
        site.load(environ={variable: value})
    (finding,) = caught.value.findings
    assert finding.file == variable
    assert finding.line == 0
    return finding


def test_a_value_by_its_path(site: Site) -> None:
    topology = site.load(environ={"UNDERSTUDY__GATEWAY__LISTEN": "127.0.0.1:8001"})
    assert topology.gateway.listen.port == 8001


def test_entries_by_index_and_by_name(site: Site) -> None:
    environ = {
        "UNDERSTUDY__GROUPS__0__KV__SLOTS": "8",
        "UNDERSTUDY__GROUPS__CHAT__ENGINES__CHAT_A__BALLAST": "2GiB",
        "UNDERSTUDY__GROUPS__CHAT__MAX_QUEUE": "3",
        "UNDERSTUDY__GROUPS__0__DEVICES": "[cpu]",
    }
    group = site.load(environ=environ).groups[0]
    assert (group.kv.slots, group.engines[0].ballast, group.max_queue) == (8, 2 << 30, 3)


def test_a_section_that_the_file_leaves_out(site: Site) -> None:
    topology = site.load(environ={"UNDERSTUDY__GROUPS__0__HEALTH__CANARY": "9s"})
    assert topology.groups[0].health.canary == 9.0


def test_other_variables_are_none_of_our_business(site: Site) -> None:
    site.load(environ={"UNDERSTUDY_INSTANCE": "x", "PATH": "/bin", "UNDERSTUDY_REGISTRY": "/x"})


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        (
            "UNDERSTUDY__GROUPS__CHAT__KV__SLOT",
            "8",
            "groups[0].kv has no key 'SLOT'; set UNDERSTUDY__GROUPS__CHAT__KV__SLOTS",
        ),
        (
            "UNDERSTUDY__GATEWY__LISTEN",
            "127.0.0.1:1",
            "the topology has no key 'GATEWY'; set UNDERSTUDY__GATEWAY__LISTEN",
        ),
        (
            "UNDERSTUDY__GROUPS__CHAT__ENGINES__CHAT_X__BALLAST",
            "1GiB",
            "groups[0].engines has no entry 'CHAT_X'; "
            "set UNDERSTUDY__GROUPS__CHAT__ENGINES__CHAT_B__BALLAST",
        ),
        (
            "UNDERSTUDY__GROUPS__7__KV__SLOTS",
            "8",
            "groups has no entry '7'; entries are: CHAT",
        ),
        (
            "UNDERSTUDY__GATEWAY",
            "x",
            "gateway is a section; name a key: UNDERSTUDY__GATEWAY__LISTEN",
        ),
        (
            "UNDERSTUDY__GATEWAY__LISTEN__PORT",
            "1",
            "gateway.listen has nothing inside; set UNDERSTUDY__GATEWAY__LISTEN",
        ),
        (
            "UNDERSTUDY__GATEWAY__WORKERS",
            "two",
            "gateway.workers: 'two' is not a whole number; write digits only, such as 8",
        ),
        (
            "UNDERSTUDY__GROUPS__CHAT__ENGINES__CHAT_B__ROLE",
            "stanby",
            "groups[0].engines[1].role: 'stanby' is not one of primary, standby, batch; "
            "write standby",
        ),
    ],
)
def test_an_error_names_the_variable(site: Site, variable: str, value: str, text: str) -> None:
    assert str(refused(site, variable, value)) == f"{variable}: {text}"


def test_a_value_that_is_not_yaml(site: Site) -> None:
    finding = refused(site, "UNDERSTUDY__NAME", "[")
    assert finding.instead == "write one value, quoted as in YAML"


def test_two_variables_for_one_value(site: Site) -> None:
    environ = {"UNDERSTUDY__GROUPS__0__MAX_QUEUE": "1", "UNDERSTUDY__GROUPS__CHAT__MAX_QUEUE": "2"}
    with pytest.raises(TopologyError, match="sets groups"):
        site.load(environ=environ)


def test_a_rule_that_an_override_breaks_names_the_variable(site: Site) -> None:
    (finding,) = site.check(environ={"UNDERSTUDY__GATEWAY__LISTEN": "127.0.0.1:9400"})
    assert finding.file == "UNDERSTUDY__GATEWAY__LISTEN"
