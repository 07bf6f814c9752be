"""Who holds the card's memory, as the driver reports it: asked of `nvidia-smi`, in a process.

NVML in our own process could hang on a sick driver, and whoever asks must not hang with it: every
question has a deadline, and a child that does not even die is left behind (`cache.children`).

WARNING: the figures are the driver's. A process appears once it has a CUDA context; memory that it
maps from somebody else is not in its figure (H200, driver 580); a process of another container
appears without a figure, or not at all.
"""

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cache.children import ChildLeftError, ask_child
from cache.errors import CacheError, DeadlineExceededError, ProtocolError

__all__ = [
    "CardMemory",
    "CardUnknownError",
    "Holder",
    "MemoryUse",
    "ask_card",
    "describe_use",
    "described",
    "name_holders",
    "parse_card",
]

_TIMEOUT_S: Final = 5.0
_MAX_OUTPUT_BYTES: Final = 1 << 20
_MAX_REASON_CHARS: Final = 200
_MIB: Final = 1 << 20
_MAX_NAMED: Final = 8


class CardUnknownError(CacheError):
    """`nvidia-smi` does not say how much of a card's memory is used: absent, sick or in the way."""

    code = "device_memory_unknown"

    def __init__(self, reason: str) -> None:
        super().__init__(f"nvidia-smi: {reason}")


@dataclass(frozen=True, slots=True)
class Holder:
    """One process on the card."""

    pid: int
    used_bytes: int | None  # None: the driver gives no figure
    session: int | None = None  # its session: what an engine has started shares the engine's


@dataclass(frozen=True, slots=True)
class CardMemory:
    """One card, as the driver reports it."""

    total_bytes: int
    free_bytes: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A phrase for people and the same as fields."""

    text: str
    details: dict[str, Any] = field(default_factory=dict)


def describe_use(uuid: str) -> MemoryUse:
    """Free and total memory of the card and its largest holders, or why that is not known."""
    try:
        card = ask_card(uuid)
    except CardUnknownError as error:
        return MemoryUse(f"who holds it is unknown: {error}")
    assert card is not None  # noqa: S101 - nobody stops it
    return described(card)


def ask_card(
    uuid: str, *, niceness: int = 0, stop: threading.Event | None = None
) -> CardMemory | None:
    """Ask about one card; None when `stop` was set meanwhile. Blocking, for some 6 s at most.

    Raises:
        CardUnknownError: no answer, or none that can be understood.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    answers: list[str] = []
    for query in ("--query-gpu=memory.free,memory.total", "--query-compute-apps=pid,used_memory"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise CardUnknownError(f"no answer within {_TIMEOUT_S:g} s")
        answer = _ask(uuid, query, left_s, niceness, stop)
        if answer is None:
            return None
        answers.append(answer)
    return parse_card(*answers)


def _ask(
    uuid: str, query: str, timeout_s: float, niceness: int, stop: threading.Event | None
) -> str | None:
    try:
        ended = ask_child(
            ["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"],
            what="nvidia-smi", timeout_s=timeout_s, max_output_bytes=_MAX_OUTPUT_BYTES,
            stderr=subprocess.DEVNULL, niceness=niceness, stop=stop, alone=True,
        )  # fmt: skip
    except OSError as error:
        raise CardUnknownError(error.strerror or str(error)) from error
    except DeadlineExceededError as error:
        raise CardUnknownError(f"no answer within {_TIMEOUT_S:g} s") from error
    except ChildLeftError as error:
        raise CardUnknownError(error.message.partition(": ")[2]) from error
    except ProtocolError as error:
        raise CardUnknownError(f"more than {_MAX_OUTPUT_BYTES} bytes came") from error
    if ended is None:
        return None
    text = ended.output.decode(errors="replace")
    if ended.returncode != 0:
        said = " ".join(text.split())[:_MAX_REASON_CHARS]
        raise CardUnknownError(f"exit status {ended.returncode}{f': {said}' if said else ''}")
    return text


def parse_card(totals: str, processes: str) -> CardMemory:
    """From nvidia-smi's two answers, in MiB.

    Raises:
        CardUnknownError: there are no figures in the first.
    """
    numbers = [int(value) for value in totals.replace(",", " ").split() if _is_number(value)]
    if len(numbers) != 2:
        raise CardUnknownError("it gives no figures")
    holders: dict[int, Holder] = {}
    for line in processes.splitlines():
        pid, _, used = (part.strip() for part in line.partition(","))
        if _is_number(pid):
            used_bytes = int(used) * _MIB if _is_number(used) else None
            holders[int(pid)] = Holder(int(pid), used_bytes, _session_of(int(pid)))
    free, total = numbers
    return CardMemory(total * _MIB, free * _MIB, tuple(holders.values()))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16  # what comes may be rubbish


def _session_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, OverflowError):  # it is gone, or of another namespace
        return os.getsid(pid) if pid > 0 else None
    return None


def described(card: CardMemory) -> MemoryUse:
    """The phrase that says who holds a card."""
    held = {h.pid: h.used_bytes for h in card.holders if h.used_bytes is not None}
    free, total = card.free_bytes, card.total_bytes
    text = f"{free // _MIB:,} of {total // _MIB:,} MiB are free"
    if held:
        largest = sorted(held.items(), key=lambda item: -item[1])[:_MAX_NAMED]
        text += "; held by " + ", ".join(
            f"pid {pid}: {used // _MIB:,} MiB" for pid, used in largest
        )
    return MemoryUse(text, {"free_bytes": free, "total_bytes": total, "held_bytes": held})


def name_holders(text: str, names: Mapping[int, str]) -> str:
    """The same text with instances where it had their pids: `chat-a-3fd0 (pid 812): 1,420 MiB`."""

    def named(found: re.Match[str]) -> str:
        name = names.get(int(found[1]))
        return f"{name} ({found[0]})" if name else found[0]

    return re.sub(r"\bpid (\d{1,15})\b(?=:)", named, text)
