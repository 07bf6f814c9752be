"""The heap of an engine on a GPU, in a process of its own: the setting is for life."""

import subprocess
import sys

_CODE = """
import ctypes
from pathlib import Path
from engines.native.heap import keep_heap

keep_heap()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
place = library.malloc(32 << 20)
heap = next(l for l in Path("/proc/self/maps").read_text().splitlines() if l.endswith("[heap]"))
first, last = (int(part, 16) for part in heap.split()[0].split("-"))
print(first <= place < last)
"""


def test_large_pieces_lie_in_the_one_heap() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True", done.stderr
