"""A small correct topology with a real folder around it, to be made wrong in one place."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisor.topology import Finding, Topology, check, load
from supervisor.topology.machine import Memory, PortState
from supervisor.topology.schema import ListenAddress

CORRECT = """\
version: 1
name: demo
state_dir: {state_dir}
admin: {{listen: 127.0.0.1:9400}}
gateway: {{listen: 127.0.0.1:8000}}
groups:
  - name: chat
    model: {{path: {model}}}
    devices: [cpu]
    kv: {{slots: 4, max_length: 256}}
    engines:
      - {{name: chat-a, role: primary}}
      - {{name: chat-b, role: standby}}
      - {{name: chat-batch, role: batch, kv: {{slots: 2}}}}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "head_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}


@dataclass
class FakeMachine:
    """Answers as it is told to."""

    available_bytes: int = 64 << 30
    total_bytes: int = 64 << 30
    gpus: frozenset[int] = frozenset()
    taken: Mapping[int, PortState] = field(default_factory=dict)
    ours: frozenset[int] = frozenset()
    in_use: bool = False

    def memory(self) -> Memory:
        return Memory(self.available_bytes, self.total_bytes)

    def gpu_indices(self) -> frozenset[int]:
        return self.gpus

    def port_state(self, address: ListenAddress) -> PortState | None:
        return self.taken.get(address.port)

    def held_by_us(self, state_dir: Path, address: ListenAddress) -> bool:  # noqa: ARG002
        return address.port in self.ours

    def is_in_use(self, state_dir: Path) -> bool:  # noqa: ARG002
        return self.in_use


@dataclass
class Site:
    """A folder with a checkpoint and a topology file."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "topology.yaml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def write(self, text: str | bytes) -> Path:
        self.file.write_bytes(text.encode() if isinstance(text, str) else text)
        return self.file

    def write_correct(self, changes: Mapping[str, str] | None = None) -> Path:
        """The correct file, with each key of `changes` replaced once; it must occur."""
        text = CORRECT.format(state_dir=self.state_dir, model=self.model)
        for old, new in (changes or {}).items():
            assert old in text, f"{old!r} is not in the topology of these tests"
            text = text.replace(old, new, 1)
        return self.write(text)

    def check(
        self,
        changes: Mapping[str, str] | None = None,
        *,
        machine: FakeMachine | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> list[Finding]:
        path = self.write_correct(changes)
        return check(path, environ or {}, machine=machine or FakeMachine())

    def load(
        self, changes: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
    ) -> Topology:
        return load(self.write_correct(changes), environ or {})


def safetensors(header: Mapping[str, Any], data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def build_site(folder: Path) -> Site:
    site = Site(folder)
    site.model.mkdir()
    (site.model / "config.json").write_text(json.dumps(CONFIG))
    (site.model / "tokenizer.json").write_text("{}")
    header = {"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    (site.model / "model.safetensors").write_bytes(safetensors(header, bytes(64)))
    return site
