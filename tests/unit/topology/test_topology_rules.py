"""Rules between values: each broken rule is told on the line of the culprit."""

import pytest

from supervisor.topology import Finding, Severity
from tests.unit.topology.site import Site

SECOND_GROUP = """\
  - name: {name}
    model: {{path: {model}}}
    kv: {{max_length: 256}}
    engines: [{{name: {engine}, role: primary}}]
"""


def told(findings: list[Finding]) -> list[tuple[int, str, str, str]]:
    return [(f.line, f.path, f.what, f.instead) for f in findings]


def test_admin_and_gateway_on_one_address(site: Site) -> None:
    assert told(site.check({"127.0.0.1:8000": "127.0.0.1:9400"})) == [
        (
            5,
            "gateway.listen",
            "the admin API and the gateway share the address 127.0.0.1:9400",
            "write another port, such as 127.0.0.1:8000",
        )
    ]


def test_admin_beyond_loopback_is_an_error(site: Site) -> None:
    (finding,) = site.check({"127.0.0.1:9400": "0.0.0.0:9400"})
    assert finding.severity is Severity.ERROR
    assert (finding.line, finding.instead) == (4, "write 127.0.0.1:9400")
    assert "other machines can reach" in finding.what


def test_gateway_beyond_loopback_is_a_warning(site: Site) -> None:
    (finding,) = site.check({"127.0.0.1:8000": "0.0.0.0:8000"})
    assert finding.severity is Severity.WARNING
    assert str(finding).startswith(f"{site.file}:5: warning: gateway.listen: ")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "'[::1]'", "127.9.9.9"])
def test_loopback_has_many_spellings(site: Site, host: str) -> None:
    address = "'[::1]:9400'" if "::" in host else f"{host}:9400"
    assert site.check({"127.0.0.1:9400": address}) == []


def test_two_primaries(site: Site) -> None:
    assert told(site.check({"role: standby": "role: primary"})) == [
        (
            13,
            "groups[0].engines[1].role",
            "group 'chat' has two primaries, the other is engines[0]",
            "write standby",
        )
    ]


def test_a_standby_without_a_primary(site: Site) -> None:
    assert told(site.check({"role: primary": "role: batch"})) == [
        (
            13,
            "groups[0].engines[1].role",
            "a standby without a primary in group 'chat'",
            "write primary",
        )
    ]


def test_no_primary_at_all(site: Site) -> None:
    changes = {"role: primary": "role: batch", "role: standby": "role: batch"}
    assert told(site.check(changes)) == [
        (
            12,
            "groups[0].engines",
            "group 'chat' has no primary",
            "write one more engine: {name: chat-a, role: primary}",
        )
    ]


def test_an_engine_name_twice_in_a_group(site: Site) -> None:
    assert told(site.check({"name: chat-b,": "name: chat-a,"})) == [
        (
            13,
            "groups[0].engines[1].name",
            "engine 'chat-a' exists already, as groups[0].engines[0]",
            "write another name, such as chat-b2",
        )
    ]


def test_an_engine_name_twice_across_groups(site: Site) -> None:
    second = SECOND_GROUP.format(name="other", engine="chat-b", model=site.model)
    changes = {"kv: {slots: 2}}\n": "kv: {slots: 2}}\n" + second}
    (finding,) = site.check(changes)
    assert (finding.line, finding.path) == (18, "groups[1].engines[0].name")
    assert finding.what == "engine 'chat-b' exists already, as groups[0].engines[1]"


def test_a_group_name_twice(site: Site) -> None:
    second = SECOND_GROUP.format(name="chat", engine="other", model=site.model)
    assert told(site.check({"kv: {slots: 2}}\n": "kv: {slots: 2}}\n" + second})) == [
        (
            15,
            "groups[1].name",
            "group 'chat' exists already, as groups[0]",
            "write another name, such as chat-2",
        )
    ]


def test_kv_of_an_engine_that_is_not_batch(site: Site) -> None:
    assert told(site.check({"role: standby": "role: standby, kv: {slots: 2}"})) == [
        (
            13,
            "groups[0].engines[1].kv",
            "standby engines share the group's KV and have none of their own",
            "write it under the group's kv, or leave it out",
        )
    ]


def test_tensor_parallel_against_devices(site: Site) -> None:
    findings = site.check({"[cpu]": "[cpu]\n    tensor_parallel: 2"})
    assert told(findings)[0] == (
        10,
        "groups[0].tensor_parallel",
        "tensor_parallel 2 is not supported yet by this build",
        "write 1",
    )
    assert told(findings)[1] == (
        10,
        "groups[0].tensor_parallel",
        "tensor_parallel is 2 and 1 devices are named",
        "write tensor_parallel: 1, or name as many devices",
    )


def test_a_device_twice(site: Site) -> None:
    findings = site.check({"[cpu]": "[cpu, cpu]"})
    assert (9, "groups[0].devices[1]", "cpu is named twice", "write each device once") in told(
        findings
    )


def test_a_cache_client_without_a_socket(site: Site) -> None:
    assert told(site.check({"    devices": "    cache: {mode: client}\n    devices"})) == [
        (
            9,
            "groups[0].cache.mode",
            "cache mode client needs the socket of a running daemon",
            "write socket: /path/to/cache.sock beside it, or mode: daemon",
        )
    ]


def test_a_socket_without_client_mode(site: Site) -> None:
    (finding,) = site.check({"    devices": "    cache: {socket: x.sock}\n    devices"})
    assert (finding.line, finding.what) == (9, "cache mode daemon takes no socket")


def test_hang_after_shorter_than_two_intervals(site: Site) -> None:
    changes = {"    devices": "    health: {interval: 300ms}\n    devices"}
    assert told(site.check(changes)) == [
        (
            9,
            "groups[0].health.hang_after",
            "hang_after is shorter than two intervals (0.3 s each)",
            "write 600ms or more: two samples make a judgement",
        )
    ]


def test_a_freeze_condition_that_nobody_understands(site: Site) -> None:
    changes = {"    devices": "    batch: {freeze_when: queue is long}\n    devices"}
    (finding,) = site.check(changes)
    assert (finding.line, finding.path) == (9, "groups[0].batch.freeze_when")
    assert finding.what == "'queue is long' is not a condition"
    assert finding.instead.endswith("such as queue > 0")


def test_evict_after_without_freeze_when_is_a_warning(site: Site) -> None:
    (finding,) = site.check({"    devices": "    batch: {evict_after: 2s}\n    devices"})
    assert (finding.line, finding.severity) == (9, Severity.WARNING)


def test_batch_rules_without_a_batch_engine_are_a_warning(site: Site) -> None:
    old = "      - {name: chat-batch, role: batch, kv: {slots: 2}}\n"
    changes = {old: "    batch: {resume_after: 2s}\n"}
    (finding,) = site.check(changes)
    assert (finding.line, finding.severity) == (14, Severity.WARNING)


def test_fp8_on_a_cpu(site: Site) -> None:
    (finding,) = site.check({"model: {": "model: {quantization: fp8_block, "})
    assert finding.path == "groups[0].model.quantization"
    assert finding.what == "quantization fp8_block needs a GPU"


def test_one_gpu_is_supported_and_two_are_not_yet(site: Site) -> None:
    one = site.check({"[cpu]": "['cuda:0']"})
    assert not [f for f in one if "yet" in f.what]
    two = site.check({"[cpu]": "['cuda:0', 'cuda:1']\n    tensor_parallel: 2"})
    assert [f.what for f in two if "yet" in f.what] == [
        "tensor_parallel 2 is not supported yet by this build"
    ]
