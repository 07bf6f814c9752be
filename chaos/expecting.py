"""What a scenario expects, compared with what the system says and what streams do."""

import time
from typing import Final

from cache.errors import DeadlineExceededError, UnderstudyError
from chaos.client import StatusView, wait_until
from chaos.history import Recorder
from chaos.load import OpenLoad
from chaos.scenario import Expect
from chaos.stock import EventTail
from chaos.system import RunningSystem
from chaos.watching import missing, pids_of, sample_of

__all__ = ["Expecting"]

_SILENCE_S: Final = 2.0
_POLL_S: Final = 0.02


class Expecting:
    """Remembers how things were before the last fault or order, and compares."""

    def __init__(
        self, system: RunningSystem, load: OpenLoad, recorder: Recorder, events: EventTail
    ) -> None:
        self._system = system
        self._load = load
        self._recorder = recorder
        self._events = events
        self.before: StatusView | None = None
        self._before_pids: dict[str, int | None] = {}
        self._before_seq = 0
        self.submitted = ""  # name of the long request

    def remember(self, status: StatusView | None) -> None:
        """Later expectations compare with this."""
        self.before = status
        self._before_pids = pids_of(status)
        self._before_seq = self._events.last_seq()

    def wait(self, expect: Expect) -> str:
        """Empty once everything holds; else what was still wrong when time ran out."""
        deadline = time.monotonic() + expect.within
        held_since: float | None = None
        slowest_s = 0.0
        while True:
            began_ns = time.monotonic_ns()
            status = self._system.status()
            wrong = self._differences(expect, status)
            slowest_s = max(slowest_s, (time.monotonic_ns() - began_ns) / 1e9)
            if expect.answers_within is not None and slowest_s > expect.answers_within:
                return f"the admin API took {slowest_s:.2f} s to answer"
            now_s = time.monotonic()
            if wrong:
                held_since = None
            else:
                held_since = held_since if held_since is not None else now_s
                if now_s - held_since >= expect.hold:
                    took_ms = (time.monotonic_ns() - began_ns) / 1e6
                    self._recorder.add(sample_of(status, began_ns, took_ms, self._system))
                    return ""
            if now_s > deadline + expect.hold:
                return "; ".join(wrong) or "it did not last"
            code = self._system.supervisor.poll()
            if code is not None and code >= 0:
                return f"the supervisor ended with {code}"
            time.sleep(_POLL_S)

    def wait_whole(self, timeout_s: float) -> None:
        """Wait until nothing is missing.

        Raises:
            UnderstudyError: something still is; the text says what.
        """
        seen: list[str] = []

        def look() -> bool:
            status = self._system.status()
            seen[:] = ["no supervisor answers"] if status is None else missing(status, self._system)
            return not seen

        try:
            wait_until(look, "a whole system", timeout_s=timeout_s)
        except DeadlineExceededError:
            raise UnderstudyError(
                f"the system is not whole after {timeout_s:g} s: {'; '.join(seen)}"
            ) from None

    def _differences(self, expect: Expect, status: StatusView | None) -> list[str]:
        if status is None:
            return ["no supervisor answers"]
        wrong = missing(status, self._system) if expect.whole else []
        group = status.group
        if expect.group is not None and group.state != expect.group:
            wrong.append(f"the group is {group.state}")
        degraded = status.supervisor.degraded
        if expect.degraded == "none" and degraded:
            wrong.append(f"the supervisor lacks {', '.join(degraded)}")
        elif expect.degraded not in (None, "none", *degraded):
            wrong.append(f"the supervisor does not say that it lacks {expect.degraded}")
        for name, state in expect.engines.items():
            found = next((e.state for e in group.engines if e.name == name), "unknown")
            if found != state:
                wrong.append(f"{name} is {found}")
        return [*wrong, *self._moves(expect, status), *self._others(expect, status),
                *self._streams(expect)]  # fmt: skip

    def _moves(self, expect: Expect, status: StatusView) -> list[str]:
        """Primary and epoch against those of before."""
        before, group, wrong = self.before, status.group, list[str]()
        if before is None:
            return []
        rise = group.epoch - before.group.epoch
        wants_rise = expect.epochs == "rises"
        if expect.epochs is not None and not (rise > 0 if wants_rise else rise == expect.epochs):
            wrong.append(f"the epoch has risen by {rise}")
        if expect.primary == "same" and group.primary != before.group.primary:
            wrong.append(f"the primary is {group.primary}")
        if expect.primary == "other" and group.primary in (None, before.group.primary):
            wrong.append(f"the primary is {group.primary}")
        return wrong

    def _others(self, expect: Expect, status: StatusView) -> list[str]:
        """Processes against those of before."""
        pids, before = pids_of(status), self._before_pids
        wrong = [f"{r} is another process" for r in expect.same if pids[r] != before.get(r)]
        wrong += [
            f"{role} is still the old process"
            for role in expect.other
            if pids[role] is None or pids[role] == before.get(role)
        ]
        return wrong

    def _streams(self, expect: Expect) -> list[str]:
        """What clients and the event log say."""
        wrong = []
        silence_s = self._load.longest_silence_s()
        if expect.flowing and silence_s > _SILENCE_S:
            wrong.append(f"a stream has been silent for {silence_s:.1f} s")
        if expect.event is not None and not self._events.has(expect.event, self._before_seq):
            wrong.append(f"no event {expect.event}")
        if expect.streams_end_with is not None and self._load.chunks_of(self.submitted) is not None:
            wrong.append(f"{self.submitted} goes on")
        return wrong
