"""Faults on order, for chaos tests: what no signal from outside can do to an engine.

The control verb `fault` exists only in a process whose environment has `UNDERSTUDY_FAULTS=1`;
otherwise nothing of this is reachable. Never set it where real users are served.

action          effect
stall           the model thread sleeps for `duration_s`; sockets and `/health` go on answering
exit            the process ends at once with `status`, without a word to anybody
ignore_sigterm  SIGTERM is ignored from now on
wrong_answer    the canary answers wrongly for `duration_s`
unhealthy       `/health` answers 503 for `duration_s`
tear_streams    every stream's connection ends in the middle of a frame, without a last one
device_error    the model thread meets an error; on a GPU one that its context does not survive
device_write    the model thread writes to a weight, which is mapped read-only
device_memory   the model thread asks for more memory than there is
slow_health     `/health` answers `delay_s` late for `duration_s`
write_weights   a byte is stored into a mapped weight, as a bug might do it; host memory only

With `UNDERSTUDY_POISON=TEXT` beside it, a request with TEXT among its stop strings ends the process
with SIGABRT a moment after it has come, fresh or resumed: a poison request.
"""

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final, Literal, assert_never

import msgspec

from engines.contract import CanaryResult, Generate
from engines.native.errors import EngineError

__all__ = ["FAULTS_VARIABLE", "POISON_VARIABLE", "Faults", "InjectFault"]

FAULTS_VARIABLE: Final = "UNDERSTUDY_FAULTS"
POISON_VARIABLE: Final = "UNDERSTUDY_POISON"
_POISON_S: Final = 0.05  # by then it has a slot


class InjectFault(msgspec.Struct, frozen=True):
    """Parameters of the verb `fault`."""

    action: Literal[
        "stall",
        "exit",
        "ignore_sigterm",
        "wrong_answer",
        "unhealthy",
        "slow_health",
        "device_error",
        "device_write",
        "device_memory",
        "tear_streams",
        "write_weights",
    ]
    duration_s: float = 0.0
    delay_s: float = 0.0
    status: int = 0


class Faults:
    """What is wrong with this engine on purpose. Used by the event loop alone."""

    def __init__(self) -> None:
        self.is_enabled = os.environ.get(FAULTS_VARIABLE) == "1"
        self._poison = os.environ.get(POISON_VARIABLE, "") if self.is_enabled else ""
        self._until_s: dict[str, float] = {}
        self._health_delay_s = 0.0

    def inject(self, order: InjectFault) -> float:
        """Begin a fault; returns for how many seconds the model thread must sleep."""
        self._until_s[order.action] = time.monotonic() + order.duration_s
        match order.action:
            case "stall":
                return order.duration_s
            case "exit":
                os._exit(order.status)
            case "ignore_sigterm":
                asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "slow_health":
                self._health_delay_s = order.delay_s
            case "write_weights":
                ctypes.memset(_weights_address(), 0, 1)
            case "wrong_answer" | "unhealthy":
                pass  # looked up when the next question comes
            case "device_error" | "device_write" | "device_memory" | "tear_streams":
                pass  # the model thread's to do, and the generation socket's
            case _:
                assert_never(order.action)
        return 0.0

    def on_request(self, request: Generate) -> None:
        """A request has come: poison acts a moment later."""
        if self._poison and self._poison in request.body.stop:
            asyncio.get_running_loop().call_later(_POISON_S, os.abort)

    def _is_on(self, action: str) -> bool:
        return time.monotonic() < self._until_s.get(action, 0.0)

    def answer(self, result: CanaryResult) -> CanaryResult:
        """The canary's answer as it leaves the engine."""
        if not self._is_on("wrong_answer"):
            return result
        return msgspec.structs.replace(result, token_ids=[t + 1 for t in result.token_ids])

    async def health(self) -> bool:
        """Whether `/health` may say the truth; waits when it is slow."""
        if self._is_on("slow_health"):
            await asyncio.sleep(self._health_delay_s)
        return not self._is_on("unhealthy")


def _weights_address() -> int:
    with Path("/proc/self/maps").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if "memfd:understudy-weights" in line:
                return int(line.partition("-")[0], 16)
    raise EngineError("the weights of this engine are not in host memory")
