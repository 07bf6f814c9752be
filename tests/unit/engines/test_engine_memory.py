"""Memory of an engine: what is a user's text stays out of core dumps."""

from pathlib import Path

from cache.protocol import KvGeometry
from engines.native.memory import PrivateMemory

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
