"""What a record says about the machine that made it."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["cpu_wait_ns", "this_machine"]


def this_machine() -> dict[str, Any]:
    """Cores, memory, kernel, versions."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "load_average": os.getloadavg()[0],
    }


def cpu_wait_ns() -> int:
    """How long some process has waited for a CPU since the boot; 0 where the kernel has no PSI."""
    try:
        line = Path("/proc/pressure/cpu").read_text("ascii").splitlines()[0]
    except OSError:
        return 0
    return int(line.rpartition("total=")[2]) * 1000


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
