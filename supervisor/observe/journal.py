"""The journal `state.json`: what a supervisor that starts again must know about its processes.

Invariants
    1. `save` never blocks and never raises; a thread writes the newest state (older ones that
       wait are skipped), temporary file, fsync, rename: after a crash the old or the new is there.
    2. A file that cannot be understood is renamed and never written over; the supervisor starts
       with an empty state and recomputes it from the processes.
    3. `saved` is what is certainly on disk. Epochs are reserved ahead: nobody waits for it on the
       way of a failover.
"""

import logging
import threading
from pathlib import Path
from typing import Final

import msgspec

from supervisor.observe.diskwriter import DiskWriter
from supervisor.observe.files import replace_file, set_aside

__all__ = ["FILE_NAME", "VERSION", "Journal", "JournalState", "ProcessRecord"]

FILE_NAME: Final = "state.json"
VERSION: Final = 1
_MAX_BYTES: Final = 16 << 20

_log = logging.getLogger(__name__)


class ProcessRecord(msgspec.Struct, frozen=True):
    """One process that was started for this state directory."""

    kind: str  # engine | zygote | cache | gateway
    name: str
    group: str
    instance: str
    pid: int
    start_ticks: int  # with the journal's boot id this identifies the process


class JournalState(msgspec.Struct, frozen=True):
    """Everything that outlives a supervisor. Fields of later versions are kept out by `version`."""

    version: int = VERSION
    boot_id: str = ""
    name: str = ""
    epochs: dict[str, int] = {}  # by group: no epoch above this was ever given out
    processes: list[ProcessRecord] = []
    canaries: dict[str, list[int]] = {}  # by group: known answer to the built-in prompt
    paused: bool = False
    roles: dict[str, str] = {}  # by engine
    held: list[str] = []  # engines that the operator froze or evicted, until he says otherwise
    judged: dict[str, list[float]] = {}  # by group: failovers by judgement, CLOCK_MONOTONIC seconds
    attested: list[ProcessRecord] = []  # unkillable, and declared harmless by the operator


class Journal:
    """Loads and saves the state of one state directory; the caller holds its lock."""

    def __init__(self, state_dir: Path, *, retry_s: float = 1.0) -> None:
        self.path = state_dir / FILE_NAME
        self.note = ""
        self._lock = threading.Lock()
        self._next: JournalState | None = None
        self._saved: JournalState | None = None
        self._unusable = ""  # why the file must be set aside before the first save
        self._writer = DiskWriter(
            "journal", self._write_newest, retry_s=retry_s, on_change=self._disk_changed
        )

    @property
    def degraded(self) -> str:
        """Why the state does not reach the disk; empty while it does."""
        return self._writer.degraded

    @property
    def saved(self) -> JournalState | None:
        """The state that is certainly on disk; None before the first save or load."""
        return self._saved

    def load(self) -> JournalState:
        """The state as the last supervisor left it. Blocks: call it before the loop runs.

        Never raises. When the file is empty, damaged or of a later version it is renamed, `note`
        says so, and the state is empty.
        """
        self.note = ""
        try:
            data = self._read()
        except FileNotFoundError:
            return JournalState()
        except OSError as error:
            return self._give_up("unreadable", f"cannot be read: {error.strerror}")
        if len(data) > _MAX_BYTES:
            return self._give_up("corrupt", f"is longer than {_MAX_BYTES} bytes")
        try:
            found = msgspec.json.decode(data, type=_VersionOnly)
            if found.version != VERSION:
                return self._give_up("future", f"has version {found.version}, this is {VERSION}")
            state = msgspec.json.decode(data, type=JournalState)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self._give_up("corrupt", f"cannot be understood: {error}")
        self._saved = state
        return state

    def save(self, state: JournalState) -> None:
        """Write this state soon; one that still waits is replaced by it."""
        with self._lock:
            self._next = state
        self._writer.poke()

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until the newest state is on disk. Blocks: not for the event loop."""
        return self._writer.flush(timeout_s=timeout_s)

    def close(self, *, timeout_s: float = 2.0) -> bool:
        """Write what is pending and end the thread; False: it is not on disk. Blocks."""
        return self._writer.close(timeout_s=timeout_s)

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)

    def _give_up(self, why: str, sentence: str) -> JournalState:
        """Set the file aside and begin empty."""
        try:
            target = set_aside(self.path, why)
            self.note = f"{self.path.name} {sentence}; it is now {target.name}"
        except OSError as error:
            self._unusable = why
            self.note = f"{self.path.name} {sentence}; it cannot be renamed: {error.strerror}"
        _log.warning("the journal starts empty: %s", self.note)
        return JournalState()

    def _write_newest(self) -> None:
        """Writer thread: replace the file by the newest state."""
        with self._lock:
            state = self._next
        if state is None:
            return
        if self._unusable:
            set_aside(self.path, self._unusable)
            self._unusable = ""
        replace_file(self.path, msgspec.json.encode(state))
        self._saved = state

    def _disk_changed(self, trouble: str) -> None:
        if trouble:
            _log.error("the journal does not reach the disk: %s", trouble)
        else:
            _log.info("the journal reaches the disk again")


class _VersionOnly(msgspec.Struct):
    version: int
