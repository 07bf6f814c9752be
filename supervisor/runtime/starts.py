"""The starts of one unit, and what came of them: when it may be started again, if at all.

Invariants
    1. What the machine refused counts apart from deaths: it is tried again for ever, with pauses.
    2. A refused start and the end of what was left of it count once, as a refusal.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from supervisor.core.restart import RestartPolicy, RestartRecord
from supervisor.errors import MachineRefusedError, UnderstudyError
from supervisor.process import RESERVE
from supervisor.runtime.lack import refusal_of
from supervisor.runtime.services import Services

__all__ = ["Starts"]

_START_FDS: Final = 12  # pipe, log, pidfd, two probes, control socket, progress page


class Starts:
    """One unit's record, from its first start on."""

    def __init__(
        self,
        services: Services,
        policy: RestartPolicy,
        *,
        name: str,
        on_refused: Callable[[MachineRefusedError, bool], None],
    ) -> None:
        """`on_refused` is told of every refusal, and whether its reason is a new one."""
        self.record = RestartRecord()
        self.trouble = ""  # why the machine refused the last start
        self._services = services
        self._policy = policy
        self._name = name
        self._on_refused = on_refused
        self._was_refused = False  # the start of the current instance
        self._has_come_up = True  # what was there before us has; what we start will say so

    @property
    def may_start(self) -> bool:
        """Whether the back-off is over."""
        return self._services.clock.monotonic() >= self.record.not_before_s

    @property
    def has_given_up(self) -> bool:
        """Whether it died young too often, and only the operator starts it again."""
        return self.record.has_given_up

    def begin(self) -> None:
        """An instance is about to be started."""
        self._was_refused = self._has_come_up = False

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Around a start: what the machine refuses is remembered and becomes one error.

        Raises:
            MachineRefusedError: no descriptor, no process, or a disk that takes nothing.
        """
        if not RESERVE.has_room(_START_FDS):
            raise self._refused("no file descriptor is left")
        try:
            yield
        except (OSError, UnderstudyError) as error:
            why = refusal_of(error)
            if why is None:
                raise
            raise self._refused(why) from error
        self.record = self.record.started()
        self.trouble = ""
        self._has_come_up = True

    def _refused(self, why: str) -> MachineRefusedError:
        """Wait before the next start, but never give up."""
        self._was_refused = True
        now_s = self._services.clock.monotonic()
        self.record = self.record.after_trouble(self._policy, now_s=now_s)
        is_news, self.trouble = why != self.trouble, why
        error = MachineRefusedError(self._name, why)
        self._on_refused(error, is_news)
        return error

    def ended(self, *, age_s: float, was_ours: bool, has_served: bool) -> None:
        """The instance that was started `age_s` ago is dead, or attested to be harmless."""
        # However long it took to fail: a process that never came up has not lived.
        lived_s = age_s if self._has_come_up else 0.0
        is_young = lived_s < self._policy.stable_after_s
        if is_young and not was_ours and (trouble := self._services.disk_trouble):
            self._refused(trouble)  # it could not even make its sockets, perhaps
        if not self._was_refused:
            self.record = self.record.after_death(
                self._policy, lived_s=lived_s, now_s=self._services.clock.monotonic(),
                was_ours=was_ours, has_served=has_served,
            )  # fmt: skip

    def forgive(self) -> None:
        """The operator asks for it: the past does not count."""
        self.record = self.record.forgiven()
