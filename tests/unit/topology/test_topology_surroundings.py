"""What the machine says against a topology: folders, checkpoints, devices, ports, memory."""

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from supervisor.topology import Finding, Severity
from supervisor.topology.machine import PortState
from tests.unit.topology.site import CONFIG, FakeMachine, Site, safetensors

TAKEN = PortState("another process listens there", is_taken=True)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, "\n".join(map(str, findings))
    return findings[0]


# --- ports -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("port", "line", "path"), [(9400, 4, "admin"), (8000, 5, "gateway")])
def test_a_taken_port(site: Site, port: int, line: int, path: str) -> None:
    finding = only(site.check(machine=FakeMachine(taken={port: TAKEN})))
    assert (finding.line, finding.path) == (line, f"{path}.listen")
    assert finding.what == f"port {port} is taken: another process listens there"
    assert finding.instead == "write another port, or stop that process"


def test_a_port_of_our_own_supervisor_is_not_taken(site: Site) -> None:
    machine = FakeMachine(taken={8000: TAKEN, 9400: TAKEN}, ours=frozenset({8000, 9400}))
    assert site.check(machine=machine) == []


def test_an_address_that_cannot_be_bound(site: Site) -> None:
    machine = FakeMachine(taken={80: PortState("Permission denied")})
    finding = only(site.check({"127.0.0.1:8000": "127.0.0.1:80"}, machine=machine))
    assert (finding.line, finding.what) == (
        5,
        "127.0.0.1:80 cannot be listened on: Permission denied",
    )


# --- state directory ---------------------------------------------------------------------------


def test_a_state_dir_that_is_a_file(site: Site) -> None:
    site.state_dir.write_text("x")
    finding = only(site.check())
    assert (finding.line, finding.path) == (3, "state_dir")
    assert finding.what == f"{site.state_dir} is not a folder"


def test_a_state_dir_below_a_file(site: Site) -> None:
    (site.folder / "file").write_text("x")
    finding = only(site.check({str(site.state_dir): str(site.folder / "file" / "state")}))
    assert (finding.line, finding.what) == (3, f"{site.folder / 'file'} is not a folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_dir_that_is_not_writable(site: Site) -> None:
    site.state_dir.mkdir(mode=0o500)
    assert only(site.check()).what == f"{site.state_dir} is not writable"


def test_a_state_dir_below_a_folder_that_everybody_may_change(site: Site) -> None:
    parent = site.folder / "open"
    parent.mkdir()
    parent.chmod(0o777)
    finding = only(site.check({str(site.state_dir): str(parent / "state")}))
    assert finding.line == 3
    assert finding.what.startswith(f"{parent} is writable for everybody")
    parent.chmod(0o777 | stat.S_ISVTX)
    assert site.check({str(site.state_dir): str(parent / "state")}) == []


def test_a_state_dir_that_others_may_write(site: Site) -> None:
    site.state_dir.mkdir()
    site.state_dir.chmod(0o770)
    finding = only(site.check())
    assert finding.instead == f"run chmod 700 {site.state_dir}"


# --- checkpoint --------------------------------------------------------------------------------


def test_a_model_path_that_is_missing(site: Site) -> None:
    finding = only(site.check({str(site.model): "/no/such/model"}))
    assert (finding.line, finding.path) == (8, "groups[0].model.path")
    assert finding.what == "/no/such/model does not exist"


def test_a_model_path_that_is_a_file(site: Site) -> None:
    path = site.model / "config.json"
    assert only(site.check({f"path: {site.model}": f"path: {path}"})).what.endswith("not a folder")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("model.safetensors", "*.safetensors"),
    ],
)
def test_a_folder_without_one_of_its_files(site: Site, name: str, missing: str) -> None:
    (site.model / name).unlink()
    finding = only(site.check())
    assert (finding.line, finding.what) == (8, f"{site.model} has no {missing}")


@pytest.mark.parametrize(
    ("content", "what"), [("{", "is not JSON"), ("[]", "is not a JSON object")]
)
def test_a_tokenizer_that_was_copied_in_part(site: Site, content: str, what: str) -> None:
    path = site.model / "tokenizer.json"
    path.write_text(content)
    finding = only(site.check())
    assert (finding.line, finding.what) == (8, f"{path} {what}")


def test_each_missing_file_has_its_own_finding(site: Site) -> None:
    for path in site.model.iterdir():
        path.unlink()
    whats = [finding.what for finding in site.check()]
    assert whats == sorted(
        f"{site.model} has no {name}" for name in ("config.json", "*.safetensors", "tokenizer.json")
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"abc", "is truncated: 3 bytes are no safetensors file"),
        (b"\xff" * 20, "has a corrupt header: 18446744073709551615 bytes are announced for it"),
        (b"\x05" + b"\0" * 7 + b"{oops", "has a corrupt header: it is not JSON"),
        (b"\x02" + b"\0" * 7 + b"[]", "has a corrupt header: it is not a JSON object"),
        (
            safetensors({"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}, b"x"),
            "is truncated: 1 of 64 data bytes are there",
        ),
        (
            safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"xxxxyy"),
            "has 2 bytes behind its last tensor",
        ),
        (
            safetensors({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"xxxx"),
            "has a corrupt header: tensor 'w' has another size than its shape",
        ),
        (
            safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"x" * 8),
            "has a corrupt header: a gap or overlap at data byte 4",
        ),
        (
            safetensors({"w": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}, b"xxxx"),
            "holds tensor 'w' of the unknown type 'Q4'",
        ),
        (
            safetensors({"w": [1]}, b""),
            "has a corrupt header: tensor 'w' is not described",
        ),
    ],
)
def test_a_broken_safetensors_file(site: Site, content: bytes, what: str) -> None:
    path = site.model / "model.safetensors"
    path.write_bytes(content)
    finding = only(site.check())
    assert (finding.line, finding.path) == (8, "groups[0].model.path")
    assert finding.what == f"{path} {what}"


def test_a_shard_that_the_index_names_and_nobody_copied(site: Site) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (site.model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has no model-2.safetensors" in only(site.check()).what


def write_config(site: Site, **changes: Any) -> None:
    (site.model / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_a_quantisation_outside_the_allow_list(site: Site) -> None:
    write_config(site, quantization_config={"quant_method": "awq"})
    finding = only(site.check())
    assert (finding.line, finding.path) == (8, "groups[0].model.path")
    assert finding.what == ("the checkpoint is quantised with awq, which is not in the allow-list")


BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}


def test_block_fp8_must_be_asked_for(site: Site) -> None:
    write_config(site, quantization_config=BLOCK_FP8)
    machine, on_gpu = FakeMachine(gpus=frozenset({0})), {"[cpu]": "[cuda:0]"}
    finding = only(site.check(on_gpu, machine=machine))
    assert finding.path == "groups[0].model.quantization"
    assert finding.instead == "write fp8_block"
    asked = {**on_gpu, "model: {": "model: {quantization: fp8_block, "}
    assert site.check(asked, machine=machine) == []
    write_config(site)
    assert site.check(asked, machine=machine) == [], "then it is quantised on load"


def test_fp8_in_another_form(site: Site) -> None:
    write_config(site, quantization_config={"quant_method": "fp8"})
    assert "not in blocks of 128 x 128" in only(site.check()).what


def test_a_config_that_is_not_json(site: Site) -> None:
    (site.model / "config.json").write_text("{")
    assert only(site.check()).what == f"{site.model / 'config.json'}: is not JSON"


def test_kv_longer_than_the_model_can_be(site: Site) -> None:
    finding = only(site.check({"max_length: 256": "max_length: 1024"}))
    assert (finding.line, finding.path) == (10, "groups[0].kv.max_length")
    assert finding.what == "1024 tokens are more than the model's max_position_embeddings of 512"
    assert finding.instead == "write 512 or less"


def test_kv_of_the_batch_engine_longer_than_the_model_can_be(site: Site) -> None:
    finding = only(site.check({"kv: {slots: 2}": "kv: {max_length: 640}"}))
    assert (finding.line, finding.path) == (14, "groups[0].engines[2].kv.max_length")


def test_a_cache_client_whose_socket_is_not_there(site: Site) -> None:
    changes = {"    devices": "    cache: {mode: client, socket: /no/cache.sock}\n    devices"}
    finding = only(site.check(changes))
    assert (finding.line, finding.path) == (9, "groups[0].cache.socket")


def test_a_cache_client_whose_socket_is_there(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        changes = {"    devices": f"    cache: {{mode: client, socket: {path}}}\n    devices"}
        assert site.check(changes) == []


# --- devices -----------------------------------------------------------------------------------


def devices_found(site: Site, device: str, gpus: set[int]) -> list[str]:
    findings = site.check({"[cpu]": f"['{device}']"}, machine=FakeMachine(gpus=frozenset(gpus)))
    assert {(f.line, f.path) for f in findings} <= {(9, "groups[0].devices[0]")}
    return [f.what for f in findings]


def test_cuda_on_a_machine_without_a_gpu(site: Site) -> None:
    expected = ["cuda:0: no NVIDIA driver or GPU on this machine"]
    assert devices_found(site, "cuda:0", set()) == expected


def test_a_gpu_that_the_machine_has_not(site: Site) -> None:
    assert devices_found(site, "cuda:3", {0, 1}) == ["this machine has no cuda:3"]


def test_a_gpu_that_the_machine_has(site: Site) -> None:
    assert devices_found(site, "cuda:1", {0, 1}) == []


# --- memory ------------------------------------------------------------------------------------


def test_more_memory_than_is_available_is_an_error(site: Site) -> None:
    finding = only(site.check(machine=FakeMachine(available_bytes=1 << 30, total_bytes=2 << 30)))
    assert (finding.line, finding.severity) == (6, Severity.ERROR)
    assert "of memory are needed and 1.0 GiB of 2.0 GiB are available" in finding.what


def test_nearly_all_memory_is_a_warning(site: Site) -> None:
    """The demo site needs 1050 MiB for its processes."""
    finding = only(site.check(machine=FakeMachine(available_bytes=1100 << 20)))
    assert finding.severity is Severity.WARNING


def test_memory_counts_ballast(site: Site) -> None:
    changes = {"role: standby": "role: standby, ballast: 8GiB"}
    assert only(site.check(changes, machine=FakeMachine(available_bytes=8 << 30))).line == 6


def test_processes_that_run_already_have_their_memory(site: Site) -> None:
    """A supervisor that comes back after a crash must be able to adopt what it left."""
    assert site.check(machine=FakeMachine(available_bytes=0, in_use=True)) == []


def test_processes_that_run_already_need_no_checkpoint(site: Site) -> None:
    (site.model / "model.safetensors").unlink()
    assert only(site.check(machine=FakeMachine(in_use=True))).severity is Severity.WARNING


@pytest.mark.parametrize("port", [9400, 8000])
def test_a_stranger_on_a_port_does_not_keep_a_supervisor_from_its_processes(
    site: Site, port: int
) -> None:
    finding = only(site.check(machine=FakeMachine(taken={port: TAKEN}, in_use=True)))
    assert finding.severity is Severity.WARNING
