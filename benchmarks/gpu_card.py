"""What the card itself says of its memory, without a context of ours.

NVML answers in some 20 us; its Python module `pynvml` is the package `nvidia-ml-py`. Where that is
not installed, `nvidia-smi` is asked: the same account, but tens of milliseconds a question, so that
times until memory is free become as coarse as that.
"""

import importlib
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from cache.errors import UnderstudyError

__all__ = ["Card", "CardMissingError", "MemoryWatch", "NoCard", "open_card", "settled_ms"]

_MIB: Final = 1 << 20
_SETTLED_MIB: Final = 16.0
"""As near to its final value as this, memory counts as free: the rest is others' small change."""


class CardMissingError(UnderstudyError):
    """Nothing here can tell about a GPU."""

    code = "benchmark_card_missing"


class Card(ABC):
    """A GPU's own account of its memory."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As the driver calls it."""

    @property
    @abstractmethod
    def driver(self) -> str:
        """Version of the driver."""

    @abstractmethod
    def used_mib(self) -> float:
        """Memory that anybody uses."""

    @abstractmethod
    def release(self) -> None:
        """Say good-bye to the driver; once, at the end."""

    def settled_mib(self, *, still_s: float = 0.7, timeout_s: float = 15.0) -> float:
        """The memory in use once it has stopped moving, or when time is up."""
        deadline = time.monotonic() + timeout_s
        last, since = self.used_mib(), time.monotonic()
        while time.monotonic() - since < still_s and time.monotonic() < deadline:
            time.sleep(0.02)
            if abs((now := self.used_mib()) - last) > 1.0:
                last, since = now, time.monotonic()
        return last


class _NvmlCard(Card):
    def __init__(self, nvml: Any) -> None:  # noqa: ANN401 - a module without types
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByIndex(0)

    @property
    def name(self) -> str:
        found = self._nvml.nvmlDeviceGetName(self._handle)
        return found.decode() if isinstance(found, bytes) else str(found)

    @property
    def driver(self) -> str:
        found = self._nvml.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)

    def release(self) -> None:
        self._nvml.nvmlShutdown()

    def used_mib(self) -> float:
        return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) / _MIB


class _SmiCard(Card):
    def __init__(self, program: str) -> None:
        self._program = program
        self._name = self._ask("name")

    @property
    def name(self) -> str:
        return self._name

    @property
    def driver(self) -> str:
        return self._ask("driver_version")

    def release(self) -> None:
        pass  # each question was a process of its own

    def used_mib(self) -> float:
        return float(self._ask("memory.used"))

    def _ask(self, field: str) -> str:
        command = [self._program, "--id=0", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr).strip()
            raise CardMissingError(
                f"nvidia-smi ended with {done.returncode}: {said[:200]}",
                hint="see that 'nvidia-smi' alone works, or rehearse without a GPU: '--rehearse'",
            )
        return done.stdout.strip()


class NoCard(Card):
    """For a rehearsal on a machine without a GPU."""

    @property
    def name(self) -> str:
        """There is none."""
        return "no card"

    @property
    def driver(self) -> str:
        """There is none."""
        return "none"

    def used_mib(self) -> float:
        """Nothing is used."""
        return 0.0

    def release(self) -> None:
        """Nobody was asked."""


def open_card() -> Card:
    """The first GPU, by NVML or else by `nvidia-smi`.

    Raises:
        CardMissingError: there is neither, or the driver does not answer.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        program = shutil.which("nvidia-smi")
        if program is None:
            raise CardMissingError(
                "neither nvidia-smi nor the Python module pynvml is here",
                hint="this measures an NVIDIA GPU; without one, rehearse it with '--rehearse'",
            ) from None
        sys.stdout.write(
            "pynvml is not installed: nvidia-smi is asked instead, so the times until memory is "
            "free are coarse; 'pip install nvidia-ml-py' mends that\n"
        )
        return _SmiCard(program)
    try:
        return _NvmlCard(nvml)
    except nvml.NVMLError as error:
        raise CardMissingError(
            f"the driver does not answer: {error}",
            hint="see that 'nvidia-smi' alone works, or rehearse without a GPU: '--rehearse'",
        ) from error


def settled_ms(samples: Sequence[tuple[float, float]], since_s: float) -> float:
    """Milliseconds from `since_s` until the memory in use was what it was in the end.

    Samples are (monotonic seconds, MiB), oldest first, and reach into the quiet behind the change.
    """
    final_mib = samples[-1][1]
    found_s = samples[-1][0]
    for at_s, used_mib in reversed(samples):
        if at_s < since_s or used_mib > final_mib + _SETTLED_MIB:
            break
        found_s = at_s
    return (found_s - since_s) * 1e3


class MemoryWatch:
    """Samples the card's memory in a thread, about once in a millisecond."""

    def __init__(self, card: Card) -> None:
        self.samples: list[tuple[float, float]] = []
        """Monotonic seconds, MiB in use; read it behind the `with` block."""
        self._card = card
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._done.is_set():
            self.samples.append((time.monotonic(), self._card.used_mib()))
            time.sleep(0.001)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join(5)
