"""Room for descriptors: nothing waits for the kernel once there are threads."""

import json
import subprocess
import sys

SCRIPT = """
import json, os, resource, sys, threading
from cache.descriptors import reserve_descriptors

def table_size():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("FDSize:"))

before = sorted(os.listdir("/proc/self/fd"))
reserve_descriptors(int(sys.argv[1]))
size = table_size()
same = sorted(os.listdir("/proc/self/fd")) == before
threading.Thread(target=threading.Event().wait, daemon=True).start()
for _ in range(300 if sys.argv[2] == "few" else size):
    os.dup(0)
print(json.dumps({"size": size, "same": same, "later": table_size()}))
sys.stdout.flush()
os._exit(0)
"""


def _table(count: int, *, limit: int = 4096, then: str = "few") -> dict[str, int]:
    shell = f'ulimit -n {limit} && exec "$0" -c "$1" {count} {then}'
    done = subprocess.run(
        ["/bin/bash", "-c", shell, sys.executable, SCRIPT],
        capture_output=True, text=True, check=True, timeout=30, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_the_table_is_as_long_as_asked_and_nothing_stays_open() -> None:
    found = _table(2048)
    assert found["same"]
    assert found["size"] >= 2048
    assert found["later"] == found["size"]


def test_the_limit_of_the_process_is_respected() -> None:
    found = _table(1_000_000, limit=512)
    assert found["same"]
    assert 512 <= found["size"] < 2048


def test_without_a_reservation_the_table_grows_later() -> None:
    found = _table(4, then="more than fit")  # a child inherits how long its parent's is
    assert found["later"] > found["size"]
