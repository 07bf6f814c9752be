"""A scenario: which system, which load, which steps. Read from `chaos/scenarios/NAME.yaml`.

Steps are performed in order by `chaos.runner`. Each is a mapping with exactly one key:

load      streams arrive at a rate (or stop arriving)
wait      for a time, or until streams flow
fault     one fault of the catalogue, with the bounds of its recovery
command   an operator's order through the admin API, with the wanted answer
expect    a condition that must come within a time; one that stays away breaks a guarantee
submit    one long request beside the load
storm     faults drawn from the seed, one after the other, without waiting for recovery
calm      drain the load, wait until everything is whole, take stock of descriptors
repeat    steps, several times
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cache.errors import UnderstudyError
from chaos.disk import DiskKind
from chaos.faultmodel import Role
from chaos.faults import CATALOGUE
from supervisor.topology.schema import Seconds

__all__ = [
    "SCENARIOS",
    "Bounds",
    "CommandStep",
    "Expect",
    "FaultStep",
    "LoadStep",
    "Scenario",
    "ScenarioError",
    "Step",
    "Storm",
    "SubmitStep",
    "SystemShape",
    "Wait",
    "load_scenario",
    "names",
]

SCENARIOS: Final = Path(__file__).resolve().parent / "scenarios"


class ScenarioError(UnderstudyError):
    """A scenario that does not exist, or whose file is wrong."""

    code = "chaos_scenario"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SystemShape(_Model):
    """What differs from the usual topology of a chaos run."""

    standby: bool = True
    batch: bool = True
    ballast: str = "512MiB"
    slots: int = 16
    workers: int = 1
    hang_after: str = "400ms"
    stable_after: str = "1s"
    freeze_when: str | None = None
    resume_after: str | None = None
    intensity: int = 50
    max_young_deaths: int | None = None
    core_dumps: bool = False
    state_disk: str | None = None
    """Size of a file system of its own for the state directory, such as `8m`."""
    state_disk_kind: DiskKind = "tmpfs"


class LoadStep(_Model):
    """Arrivals from now on; 0 ends them."""

    streams_per_s: float


class Wait(_Model):
    """For `seconds`, or until `flowing` streams have got text."""

    seconds: Seconds | None = None
    flowing: int | None = None
    within: Seconds = 30.0


class Bounds(_Model):
    """How soon a fault must be healed. Generous: two busy cores; figures are made elsewhere."""

    next_token: Seconds | None = None
    """From the fault to the next token, for each stream that was open."""
    whole: Seconds | None = None
    """From the fault until nothing is missing any more."""


class FaultStep(_Model):
    """One fault and its bounds."""

    do: CATALOGUE
    bounds: Bounds = Bounds()
    label: str = ""


class CommandStep(_Model):
    """An order of the operator."""

    do: Literal["promote", "failover", "evict", "resume", "freeze", "thaw", "restart", "pause",
                "unpause", "ack", "fence", "stop", "start_supervisor"]  # fmt: skip
    engine: str = ""
    """For evict, resume, freeze, thaw, restart, fence."""
    body: dict[str, object] = {}
    status: int = 200
    """The wanted HTTP status."""
    within: Seconds = 30.0


class Expect(_Model):
    """Everything named here at once, within a time; then for `hold` without a break."""

    whole: bool | None = None
    """Nothing is missing that the topology names."""
    group: Literal["redundant", "single", "down"] | None = None
    primary: Literal["same", "other"] | None = None
    """Compared with before the last fault or command."""
    epochs: int | Literal["rises"] | None = None
    """By how much the epoch has risen since then."""
    engines: dict[str, str] = {}
    """States by engine name."""
    same: list[Role] = []
    """Whose process is the one of before."""
    other: list[Role] = []
    """Whose process is another one than before, and lives."""
    flowing: bool | None = None
    """No open stream has been silent for two seconds."""
    event: str | None = None
    """An event of this kind since then."""
    degraded: str | None = None
    """What the supervisor says that it lacks: disk, descriptors, start, address; `none`."""
    answers_within: Seconds | None = None
    """How soon the admin API must have answered, each time that it was asked."""
    streams_end_with: str | None = None
    """The last submitted request has ended with an error of this code."""
    hold: Seconds = 0.0
    within: Seconds = 60.0


class SubmitStep(_Model):
    """A request beside the load, of this many tokens."""

    tokens: int = 1500


class Storm(_Model):
    """Faults drawn from the seed. A killed supervisor is followed by a new one a moment later."""

    times: Annotated[int, Field(ge=1)]
    faults: list[CATALOGUE]
    pause: tuple[Seconds, Seconds] = (0.05, 3.0)
    """Shortest and longest time between two faults."""


class Step(_Model):
    """Exactly one of these."""

    load: LoadStep | None = None
    wait: Wait | None = None
    fault: FaultStep | None = None
    command: CommandStep | None = None
    expect: Expect | None = None
    submit: SubmitStep | None = None
    storm: Storm | None = None
    calm: str | None = None
    repeat: "Repeat | None" = None

    @model_validator(mode="after")
    def _is_one(self) -> "Step":
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise ValueError(f"a step has exactly one key, not {sorted(given) or 'none'}")
        return self


class Repeat(_Model):
    """The same steps, several times."""

    times: Annotated[int, Field(ge=1)]
    steps: list[Step]


class Scenario(_Model):
    """One file."""

    title: str
    about: str = ""
    system: SystemShape = SystemShape()
    pool: int = 24
    """How many different requests there are."""
    tokens: tuple[int, int] = (40, 160)
    """Shortest and longest answer."""
    max_duration: Seconds = 600.0
    """No step begins later than this; the run ends there, not judged."""
    gaps_are_judged: bool = True
    """False where this scenario starves the machine, and with it the recorder."""
    in_long_set: bool = True
    """Whether `make chaos` runs it."""
    steps: list[Step]

    def all_steps(self) -> Iterator[Step]:
        """Every step, those of `repeat` once."""
        yield from _flat(self.steps)

    def kinds_of_faults(self) -> set[str]:
        """Kinds of all faults that may happen."""
        steps = list(self.all_steps())
        drawn = {fault.kind for step in steps if step.storm for fault in step.storm.faults}
        return drawn | {step.fault.do.kind for step in steps if step.fault}


def _flat(steps: list[Step]) -> Iterator[Step]:
    for step in steps:
        yield from _flat(step.repeat.steps) if step.repeat is not None else (step,)


def names() -> list[str]:
    """Every scenario, sorted."""
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


def load_scenario(name: str) -> Scenario:
    """Read one.

    Raises:
        ScenarioError: no such scenario, or its file is wrong.
    """
    path = SCENARIOS / f"{name}.yaml"
    if name not in names():
        raise ScenarioError(f"there is no scenario {name!r}", hint=f"see {', '.join(names())}")
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path.name} is no YAML: {error}") from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ScenarioError(f"{path.name}: {'; '.join(lines)}") from error
