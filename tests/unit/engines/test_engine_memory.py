"""Memory of an engine: who may write to it, and what of it stays out of core dumps."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from cache.mapping import Mapping
from cache.protocol import KvGeometry, KvOpened
from cache.slots import SlotTable
from engines.native.memory import PrivateMemory, SharedMemory
from engines.native.predecessor import own_identity

if TYPE_CHECKING:
    from engines.native.device import Device

GEOMETRY = KvGeometry(
    layers=2, slots=4, kv_heads=2, max_length=4096, head_dim=64, dtype="float32"
)  # fmt: skip


def dumped_bytes(address: int, size_bytes: int) -> int:
    """Bytes of that range in areas that a core dump would hold."""
    found, inside = 0, 0
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(number, 16) for number in head.split("-"))
            inside = min(end, address + size_bytes) - max(start, address)
        elif line.startswith("VmFlags:") and inside > 0 and "dd" not in line.split():
            found += inside
    return found


def test_private_kv_and_its_slot_table_are_not_dumped() -> None:
    memory = PrivateMemory(GEOMETRY)
    flat = memory.kv.flat
    assert flat.nbytes > 10 << 20
    assert dumped_bytes(flat.data_ptr(), flat.nbytes) <= 2 * 4096  # the pages at both ends


SMALL = KvGeometry(layers=2, slots=2, kv_heads=2, max_length=64, head_dim=32, dtype="float32")
WORKS_IN_BACKGROUND = cast("Device", SimpleNamespace(is_cuda=True, synchronize=lambda: None))
"""Of a GPU, what decides who is waited for."""


def test_on_a_gpu_a_promotion_waits_for_dead_writers_with_new_slots_alone() -> None:
    table_bytes = -(-SlotTable.size_bytes(2, 64) // 4096) * 4096
    kv, table = os.memfd_create("kv"), os.memfd_create("table")
    os.ftruncate(kv, SMALL.total_bytes)
    os.ftruncate(table, table_bytes)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        stat = Path(f"/proc/{writer.pid}/stat").read_text("utf-8")
        ticks = int(stat.rpartition(")")[2].split()[19])
        with Mapping([table], [table_bytes], writable=True) as memory:
            SlotTable.format(memory.view(), 2, 64)
            SlotTable(memory.view()).claim(1, (writer.pid, ticks))
        shared = SharedMemory(KvOpened(SMALL, [SMALL.total_bytes], table_bytes), [kv], table)
        shared._device = WORKS_IN_BACKGROUND
        held = len(list(Path("/proc/self/fd").iterdir()))
        for epoch in (2, 3, 4):
            shared.raise_to_writer(epoch)
            assert shared.is_writer
            assert not shared.is_settled()
            assert shared.table.writers == [own_identity(), (writer.pid, ticks)]
            shared.drop_to_reader()
            assert shared.table.writers == [(writer.pid, ticks)]
        assert len(list(Path("/proc/self/fd").iterdir())) == held
        shared.raise_to_writer(5)
        writer.kill()
        writer.wait()
        assert shared.is_settled()
        assert shared.table.writers == [own_identity()]
        assert len(list(Path("/proc/self/fd").iterdir())) == held
    os.close(kv)
    os.close(table)
