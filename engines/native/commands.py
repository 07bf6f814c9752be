"""What the event loop may ask of the model thread."""

from concurrent.futures import Future  # noqa: TC003 - dataclasses resolve it
from dataclasses import dataclass

from engines.contract import Assume, Assumed, CanaryResult
from engines.native.device import DeviceFault
from engines.native.request import PreparedRequest
from engines.native.streams import StreamPort

__all__ = [
    "AssumeRole",
    "BreakDevice",
    "Command",
    "Detach",
    "Flushed",
    "Pause",
    "ReleaseGateway",
    "RunCanary",
    "Stop",
    "Submit",
    "Wake",
]


@dataclass(frozen=True, slots=True)
class Submit:
    """A request that was prepared, and where its frames go."""

    request: PreparedRequest
    port: StreamPort


@dataclass(frozen=True, slots=True)
class Detach:
    """The connection is gone; with `is_cancelled` because the client is."""

    port: StreamPort
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class Flushed:
    """The last frame of this stream has left the process."""

    port: StreamPort


@dataclass(frozen=True, slots=True)
class Wake:
    """A slow gateway has read: look at paused rows again."""


@dataclass(frozen=True, slots=True)
class AssumeRole:
    """Take a role, between two steps."""

    assume: Assume
    future: "Future[Assumed]"


@dataclass(frozen=True, slots=True)
class RunCanary:
    """Compute the known answer, between two steps."""

    future: "Future[CanaryResult]"


@dataclass(frozen=True, slots=True)
class ReleaseGateway:
    """This gateway worker is dead: free what it had."""

    gateway: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while: a fault on order, see `engines.native.faults`."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class BreakDevice:
    """Only for chaos tests: see `faults`."""

    action: DeviceFault


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop at the next step boundary."""


Command = (
    Submit
    | Detach
    | Flushed
    | Wake
    | AssumeRole
    | RunCanary
    | ReleaseGateway
    | Pause
    | BreakDevice
    | Stop
)
