"""How much memory a process shares, as the kernel accounts it (`/proc/PID/smaps`)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["WEIGHTS", "MappedMemory", "mapped_memory"]

WEIGHTS: Final = "understudy-weights"
_RANGE = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Mappings of one memory file in one process."""

    rss_bytes: int  # resident pages, each counted fully
    pss_bytes: int  # the same pages, each divided by the number of processes that map it
    private_dirty_bytes: int  # written by this process alone: must be zero for weights


def mapped_memory(pid: int, name: str = WEIGHTS) -> MappedMemory:
    """What `pid` maps of memfds called `name`; zeros when it maps none or is gone."""
    totals = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}
    is_inside = False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # gone, or not ours to read
    for line in lines:
        if _RANGE.match(line):
            is_inside = f"memfd:{name}" in line
        elif is_inside:
            field, _, value = line.partition(":")
            if field in totals:
                totals[field] += int(value.split()[0]) * 1024
    return MappedMemory(totals["Rss"], totals["Pss"], totals["Private_Dirty"])
