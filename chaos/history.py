"""The record of one chaos run: what was done, what clients saw, what the system said of itself.

One JSON line an entry, in `history.jsonl`. Whoever judges reads nothing else, so an old record can
be judged again by a better checker.

Invariants
    1. Every moment is CLOCK_MONOTONIC of the machine that ran it, in nanoseconds. What others
       stamped with the wall clock (events, engine logs) is converted through `Clock` entries.
    2. An entry is written once and never changed. A run that was cut off has no `End`.
"""

import bisect
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

__all__ = [
    "FILE_NAME",
    "Clock",
    "Command",
    "End",
    "EngineSample",
    "Entry",
    "Event",
    "Expectation",
    "Fault",
    "Held",
    "History",
    "Leftover",
    "Meta",
    "Metrics",
    "Process",
    "Recorder",
    "Reference",
    "Role",
    "Sample",
    "Stream",
    "Target",
    "WallClock",
]

FILE_NAME: Final = "history.jsonl"
_ANCHOR_NS: Final = 150_000_000


class Meta(msgspec.Struct, frozen=True, tag="meta", tag_field="entry"):
    """Head of the record: what was run, where."""

    scenario: str
    title: str
    seed: int
    started_ns: int
    started_unix_s: float
    machine: dict[str, Any]
    system: dict[str, Any]  # options of the topology
    gaps_are_judged: bool = True  # False where the scenario starves this machine on purpose


class Clock(msgspec.Struct, frozen=True, tag="clock", tag_field="entry"):
    """Both clocks at one moment."""

    at_ns: int
    unix_s: float
    offset_s: float = 0.0  # by how much the system's wall clock is off, on purpose
    cpu_wait_ns: int = 0  # so long some process of the machine has waited for a CPU, ever (PSI)

    @property
    def system_s(self) -> float:
        """What the system takes for the time of day."""
        return self.unix_s + self.offset_s


class Reference(msgspec.Struct, frozen=True, tag="reference", tag_field="entry"):
    """Text of a request in an undisturbed run, with other neighbours and in another slot."""

    request: str
    prompt: str
    temperature: float
    tokens: int
    text: str


class Stream(msgspec.Struct, frozen=True, tag="stream", tag_field="entry"):
    """One client's stream, whole or as far as it came."""

    name: str
    request: str  # of a `Reference`
    transport: str
    started_ns: int
    ended_ns: int  # 0: had not ended when the record was closed
    arrivals_ns: list[int]
    texts: list[str]
    finish_reason: str | None = None
    completion_tokens: int | None = None
    has_end_mark: bool = False
    error: str | None = None
    left_ns: int = 0  # when the client went away on purpose; 0: it did not

    @property
    def text(self) -> str:
        """All text that arrived."""
        return "".join(self.texts)

    def was_open_at(self, moment_ns: int) -> bool:
        """Whether the client waited for more of its text then."""
        return self.started_ns <= moment_ns and not 0 < self.ended_ns < moment_ns


class Target(msgspec.Struct, frozen=True):
    """Who was hit."""

    role: str
    pid: int
    start_ticks: int
    instance: str = ""


class Fault(msgspec.Struct, frozen=True, tag="fault", tag_field="entry"):
    """One fault: when it struck, whom, and which bounds its recovery has."""

    label: str
    kind: str
    at_ns: int
    done_ns: int
    targets: list[Target] = []
    params: dict[str, Any] = {}
    bounds_s: dict[str, float] = {}  # next_token, whole
    breaks_streams: bool = False  # client connections end with it: the gateway itself was hit
    is_deadly: bool = True  # the targets end by it (a stop is not)
    note: str = ""
    spared: list[str] = []  # streams that are known not to have been hit
    problem: str = ""  # what the system answered wrongly meanwhile


class Command(msgspec.Struct, frozen=True, tag="command", tag_field="entry"):
    """An operator's order and its answer."""

    label: str
    at_ns: int
    done_ns: int
    status: int  # HTTP; 0: nobody answered
    text: str
    is_as_wanted: bool = True


class Expectation(msgspec.Struct, frozen=True, tag="expectation", tag_field="entry"):
    """A condition that the scenario waited for; `met_ns` 0: it did not come in time."""

    label: str
    from_ns: int
    met_ns: int
    within_s: float
    seen: str = ""


class EngineSample(msgspec.Struct, frozen=True):
    """One engine in a sample."""

    name: str
    state: str
    verdict: str = ""
    pid: int | None = None
    instance: str | None = None
    restarts: int = 0


class Sample(msgspec.Struct, frozen=True, tag="sample", tag_field="entry"):
    """`GET /v1/status`, shortened."""

    at_ns: int
    took_ms: float
    is_up: bool
    is_paused: bool = False
    state: str = ""
    epoch: int = 0
    primary: str | None = None
    is_whole: bool = False
    engines: list[EngineSample] = []
    pids: dict[str, int | None] = {}  # by role, as far as they are named

    def names(self, pids: set[int]) -> bool:
        """Whether one of these processes is still spoken of."""
        return bool(pids & {*self.pids.values(), *(e.pid for e in self.engines)})


class Process(msgspec.Struct, frozen=True, tag="process", tag_field="entry"):
    """The life of one process as the kernel showed it, looked at every few milliseconds."""

    instance: str
    pid: int
    start_ticks: int
    seen_ns: int
    last_alive_ns: int
    dead_ns: int  # first look that proved the end; 0: alive when the record was closed


class Role(msgspec.Struct, frozen=True, tag="role", tag_field="entry"):
    """An engine took a role, by its own word (its log, not the supervisor's belief)."""

    at_ns: int
    engine: str
    pid: int
    role: str
    epoch: int


class Event(msgspec.Struct, frozen=True, tag="event", tag_field="entry"):
    """One line of the supervisor's `events.jsonl`."""

    at_ns: int
    event: dict[str, Any]

    @property
    def kind(self) -> str:
        """What happened."""
        return str(self.event.get("kind", ""))

    @property
    def seq(self) -> int:
        """Its number."""
        return int(self.event.get("seq", 0))


class Metrics(msgspec.Struct, frozen=True, tag="metrics", tag_field="entry"):
    """Counters of one life of the supervisor, and the last event that they may contain."""

    at_ns: int
    supervisor_pid: int
    last_seq: int
    values: dict[str, float]


class Held(msgspec.Struct, frozen=True, tag="held", tag_field="entry"):
    """Descriptors by kind and tasks of the living processes; taken in quiet moments."""

    at_ns: int
    label: str
    processes: dict[str, dict[str, int]]  # instance:pid -> kind -> count
    strays: list[str] = []  # processes of the system that its status does not name
    tasks: dict[str, float] = {}  # asyncio tasks: metric -> count


class Leftover(msgspec.Struct, frozen=True, tag="leftover", tag_field="entry"):
    """Something was still there after the stop."""

    text: str


class End(msgspec.Struct, frozen=True, tag="end", tag_field="entry"):
    """The run came to its end; `error` says why it was not the planned one."""

    at_ns: int
    error: str = ""


Entry = (
    Meta | Clock | Reference | Stream | Fault | Command | Expectation | Sample | Process | Role
    | Event | Metrics | Held | Leftover | End
)  # fmt: skip

T = TypeVar("T")


class WallClock:
    """From the time of day, as the system took it, to the monotonic clock.

    Through the last anchor before the moment. "Before" on the system's clock, which jumps where a
    fault made it jump; no two stretches of a run may lie at the same time of day.
    """

    def __init__(self, clocks: Iterable[Clock]) -> None:
        ordered = sorted(clocks, key=lambda c: c.system_s)
        self._system_s = [clock.system_s for clock in ordered]
        self._at_ns = [clock.at_ns for clock in ordered]

    def monotonic_ns(self, system_s: float) -> int:
        """The moment; 0 when there are no anchors."""
        if not self._at_ns:
            return 0
        index = max(0, bisect.bisect_right(self._system_s, system_s) - 1)
        return self._at_ns[index] + round((system_s - self._system_s[index]) * 1e9)


class Recorder:
    """Writes a record; any thread may add. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._file.close()

    def add(self, entry: Entry) -> None:
        """Append one entry."""
        line = self._encoder.encode(entry) + b"\n"
        with self._lock:
            self._file.write(line)


class History:
    """A finished record, by kind and in the order of time."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._clocks = self.all(Clock)
        self._wall_clock = WallClock(self._clocks)

    @classmethod
    def load(cls, directory: Path) -> "History":
        """Read a record.

        Raises:
            FileNotFoundError: there is none.
            msgspec.MsgspecError: a line is not of this format.
        """
        decoder = msgspec.json.Decoder(Entry)
        lines = (directory / FILE_NAME).read_bytes().split(b"\n")
        return cls([decoder.decode(line) for line in lines if line])

    def all(self, kind: type[T]) -> list[T]:
        """All entries of one kind, as they were written."""
        return [entry for entry in self._entries if isinstance(entry, kind)]

    def samples(self) -> list[Sample]:
        """Every status, in the order of time: two threads ask for it."""
        return sorted(self.all(Sample), key=lambda s: s.at_ns)

    @property
    def meta(self) -> Meta:
        """The head."""
        return self.all(Meta)[0]

    @property
    def ended_ns(self) -> int:
        """The last moment of the record."""
        ends = self.all(End)
        return (
            ends[-1].at_ns
            if ends
            else max((c.at_ns for c in self._clocks), default=self.meta.started_ns)
        )

    def monotonic_ns(self, system_s: float) -> int:
        """A moment of the system's wall clock on the monotonic one, through the nearest anchor."""
        return self._wall_clock.monotonic_ns(system_s)

    def cpu_wait_share(self, from_ns: int, until_ns: int) -> float | None:
        """For which share of a time some process waited for a CPU; None where nobody measured."""
        around = [
            c for c in self._clocks if from_ns - _ANCHOR_NS <= c.at_ns <= until_ns + _ANCHOR_NS
        ]
        if len(around) < 2 or not around[-1].cpu_wait_ns:
            return None
        waited_ns = around[-1].cpu_wait_ns - around[0].cpu_wait_ns
        return waited_ns / (around[-1].at_ns - around[0].at_ns)

    def events(self, *kinds: str) -> Iterator[Event]:
        """Events of these kinds, in order of their numbers."""
        found = (e for e in self.all(Event) if e.kind in kinds)
        yield from sorted(found, key=lambda e: e.seq)
