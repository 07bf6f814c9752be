"""Device memory in status and metrics, from a real process named nvidia-smi."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from cache import gpumemory
from cache.gpumemory import CardUnknownError
from cache.protocol import CacheStatus
from supervisor.cli.render import status_view
from supervisor.observe import cardasker
from supervisor.observe.cardasker import CardAsker
from supervisor.observe.devicememory import STALE_S, DeviceMemoryCollector, DeviceMemoryReport
from supervisor.observe.metrics import Metrics
from supervisor.runtime import devicememory
from supervisor.runtime.devicememory import DeviceMemoryWatch
from supervisor.runtime.keyedtasks import KeyedTasks
from supervisor.runtime.machine import LocalMachine
from supervisor.runtime.operations import OperationLog
from supervisor.topology.schema import Topology

UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
MIB = 1 << 20
TOTALS = "40000, 143771"


@dataclass
class Smi:
    """The executable that is found first on PATH."""

    folder: Path

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def pids(self) -> list[int]:
        return [int(call.split()[0]) for call in self.calls]

    def does(self, script: str) -> None:
        path = self.folder / "nvidia-smi"
        path.unlink(missing_ok=True)
        path.write_text(f'#!/bin/sh\necho "$$ $@" >> {self.folder}/calls\n{script}\n')
        path.chmod(0o755)

    def says(self, processes: str, *, totals: str = TOTALS) -> None:
        self.does(f"case $2 in --query-gpu=*) echo '{totals}';; *) printf '{processes}';; esac")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpumemory, "_TIMEOUT_S", 0.5)
    return Smi(tmp_path)


@dataclass
class Unit:
    name: str
    pid: int | None


class FakeGroup:
    """As much of a group as the watch looks at."""

    def __init__(self, name: str, device: str, engines: list[Unit], uuid: str = UUID) -> None:
        self.name = name
        self.epoch = 1
        self.load = SimpleNamespace(device=device)
        self.engines = engines
        self.zygote = Unit("zygote", None)
        status = CacheStatus(
            state="serving", instance="cache-1", pid=10, device=device, weights_bytes=60 * MIB,
            kv_bytes=30 * MIB, device_uuid=uuid,
        )  # fmt: skip
        self.cache: Any = SimpleNamespace(pid=None, status=status, held=None)
        self.lock = asyncio.Lock()
        self.tasks = KeyedTasks(name, on_end=lambda: None)
        self.operations = OperationLog(time)


@dataclass
class Events:
    told: list[tuple[str, str]] = field(default_factory=list)

    def append(self, kind: str, text: str, **_fields: object) -> None:
        self.told.append((kind, text))


class Site:
    """A watch over groups, with what it reports to."""

    def __init__(self, *groups: FakeGroup) -> None:
        topology = {
            "version": 1, "name": "demo", "state_dir": "run",
            "groups": [
                {
                    "name": g.name, "model": {"path": "model"}, "devices": [g.load.device],
                    "engines": [{"name": e.name, "role": "primary" if not i else "standby"}
                                for i, e in enumerate(g.engines)],
                }
                for g in groups
            ],
        }  # fmt: skip
        self.groups = groups
        self.events = Events()
        self.metrics = Metrics(Topology.model_validate(topology))
        self.clock = SimpleNamespace(monotonic=time.monotonic, monotonic_ns=time.monotonic_ns)
        services = SimpleNamespace(
            machine=LocalMachine(cast("Any", None)), events=self.events, metrics=self.metrics,
            clock=self.clock,
        )  # fmt: skip
        self.watch = DeviceMemoryWatch(cast("Any", services), cast("Any", groups))

    def status(self, group: int = 0) -> dict[str, Any]:
        (report,) = self.watch.reports(cast("Any", self.groups[group]))
        found: dict[str, Any] = json.loads(json.dumps(report.as_status()))
        return found

    def later(self) -> None:
        """Another question is due."""
        before = self.clock.monotonic
        self.clock.monotonic = lambda: before() + devicememory.ASK_EVERY_S

    def metric(self, name: str, **labels: str) -> float | None:
        key = {"group": "chat", "device": "cuda:0", **labels}
        return self.metrics.registry.get_sample_value(f"understudy_device_{name}", key)


@pytest.fixture
def engine() -> Iterator[tuple[int, int]]:
    """The pid of a session leader, and that of a process it has started."""
    leader = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; wait"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    worker = int(leader.stdout.readline())
    yield leader.pid, worker
    os.kill(worker, 9)
    leader.wait(10)
    leader.stdout.close()


def chat(*pids: int | None) -> FakeGroup:
    names = ("chat-a", "chat-b", "chat-c")
    engines = [Unit(name, pid) for name, pid in zip(names, pids, strict=False)]
    return FakeGroup("chat", "cuda:0", engines)


# ------------------------------------------------------------------ what is said


async def test_status_and_metrics_say_who_holds_what(smi: Smi, engine: tuple[int, int]) -> None:
    leader, worker = engine
    smi.says(f"{leader}, 1000\\n{worker}, 420\\n1, 7000\\n")
    site = Site(chat(leader, 999_999))
    assert site.metric("memory_up") == 0, "a zero from the first scrape"
    await site.watch.look()
    found = site.status()
    assert found.pop("age_s") < 5
    assert found == {
        "device": "cuda:0", "uuid": UUID, "total_bytes": 143771 * MIB, "free_bytes": 40000 * MIB,
        "weights_bytes": 60 * MIB, "kv_bytes": 30 * MIB, "others_bytes": 7000 * MIB, "error": None,
        "engines": [
            {"name": "chat-a", "pid": leader, "used_bytes": 1420 * MIB},
            {"name": "chat-b", "pid": 999_999, "used_bytes": None},
        ],
    }  # fmt: skip
    parts = ("total", "free", "weights", "kv", "others")
    values = [site.metric("memory_bytes", part=part) for part in parts]
    assert values == [n * MIB for n in (143771, 40000, 60, 30, 7000)]
    assert site.metric("engine_memory_bytes", engine="chat-a") == 1420 * MIB
    assert site.metric("engine_memory_bytes", engine="chat-b") is None
    assert site.metric("memory_up") == 1
    assert [call.split()[1:3] for call in smi.calls] == [
        [f"--id={UUID}", "--query-gpu=memory.free,memory.total"],
        [f"--id={UUID}", "--query-compute-apps=pid,used_memory"],
    ]
    assert not site.events.told


async def test_it_is_asked_every_ten_seconds_and_once_for_groups_that_share_a_card(
    smi: Smi, engine: tuple[int, int]
) -> None:
    smi.says(f"{engine[0]}, 10\\n{engine[1]}, 5\\n")
    other = FakeGroup("other", "cuda:0", [Unit("other-a", engine[1])])
    site = Site(chat(engine[0]), other)
    await site.watch.look()
    await site.watch.look()
    assert len(smi.calls) == 2, "two queries make one question"
    assert site.status(0)["engines"][0]["used_bytes"] == 10 * MIB
    assert site.status(1)["engines"][0]["used_bytes"] == 5 * MIB
    site.later()
    await site.watch.look()
    assert len(smi.calls) == 4


async def test_pids_of_another_namespace_are_not_called_others(smi: Smi) -> None:
    smi.says("31, 1000\\n32, 500\\n")
    site = Site(chat(999_998))
    await site.watch.look()
    assert site.status()["others_bytes"] is None
    assert site.metric("memory_bytes", part="others") is None
    assert site.metric("memory_bytes", part="free") == 40000 * MIB


async def test_a_process_without_a_figure_is_not_nothing(smi: Smi, engine: tuple[int, int]) -> None:
    smi.says(f"{engine[0]}, 10\\n1, [N/A]\\n")
    site = Site(chat(engine[0]))
    await site.watch.look()
    assert site.status()["others_bytes"] is None


async def test_a_dead_daemon_s_memory_is_what_we_hold(smi: Smi, engine: tuple[int, int]) -> None:
    smi.says(f"{engine[0]}, 10\\n")
    group = chat(engine[0])
    site = Site(group)
    await site.watch.look()
    extents = SimpleNamespace(extent_bytes=[40 * MIB, 2 * MIB])
    group.cache = SimpleNamespace(
        pid=None, status=None, held=SimpleNamespace(manifest=extents, kv=extents)
    )
    site.later()
    await site.watch.look()
    found = site.status()
    assert (found["weights_bytes"], found["kv_bytes"]) == (42 * MIB, 42 * MIB)
    assert found["error"] is None, "the card is still known"


def test_a_group_on_the_cpu_is_not_looked_at(smi: Smi) -> None:
    smi.says("")
    site = Site(FakeGroup("chat", "cpu", [Unit("chat-a", 5)], uuid=""))
    site.watch.start()  # would need a running loop
    asyncio.run(site.watch.look())
    assert site.watch.reports(cast("Any", site.groups[0])) == []
    assert not smi.calls
    assert site.metric("memory_up", device="cpu") is None


async def test_a_group_without_a_cache_says_why_nothing_is_known(smi: Smi) -> None:
    smi.says("")
    group = chat(5)
    group.cache = None
    site = Site(group)
    await site.watch.look()
    found = site.status()
    assert found["error"] == "no cache daemon has said which card it is"
    assert (found["total_bytes"], found["weights_bytes"], found["engines"]) == (None, None, [])
    assert site.metric("memory_up") == 0
    assert not smi.calls


# ------------------------------------------------------------------ a sick nvidia-smi


def absent(smi: Smi) -> None:
    path = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = path[0]  # the fixture's monkeypatch puts it back
    (smi.folder / "nvidia-smi").unlink(missing_ok=True)


SICK: dict[str, tuple[Callable[[Smi], None], str]] = {
    "absent": (absent, "No such file"),
    "hanging": (lambda smi: smi.does("exec sleep 60"), "no answer within 0.5 s"),
    "rubbish": (lambda smi: smi.does(r"printf '\377\376 sick,, \0 1'"), "no figures"),
    "failing": (lambda smi: smi.does("echo Unable to determine; exit 9"), "exit status 9: Unable"),
    "endless": (lambda smi: smi.does("exec yes 1"), "more than 1048576 bytes"),
}


@pytest.mark.parametrize("how", SICK)
async def test_what_was_known_stays_with_its_age_and_is_told_once(
    how: str, smi: Smi, engine: tuple[int, int]
) -> None:
    make_sick, reason = SICK[how]
    healthy_path = os.environ["PATH"]
    smi.says(f"{engine[0]}, 10\\n")
    site = Site(chat(engine[0]))
    await site.watch.look()
    make_sick(smi)
    for _ in range(2):
        site.later()
        await site.watch.look()
    found = site.status()
    assert reason in found["error"]
    assert found["age_s"] >= 2 * devicememory.ASK_EVERY_S
    assert (found["free_bytes"], found["engines"][0]["used_bytes"]) == (40000 * MIB, 10 * MIB)
    assert site.metric("memory_up") == 0
    assert site.metric("memory_bytes", part="free") is None
    assert site.metric("memory_bytes", part="weights") == 60 * MIB
    assert site.metric("engine_memory_bytes", engine="chat-a") is None
    os.environ["PATH"] = healthy_path
    smi.says(f"{engine[0]}, 10\\n")
    site.later()
    await site.watch.look()
    assert site.status()["error"] is None
    assert site.metric("memory_up") == 1
    told = [kind for kind, _ in site.events.told]
    assert told == ["device_memory_unknown", "device_memory_known"]


@pytest.mark.parametrize("how", SICK)
async def test_without_any_answer_the_figures_are_null(how: str, smi: Smi) -> None:
    SICK[how][0](smi)
    site = Site(chat(5))
    await site.watch.look()
    found = site.status()
    assert [found[key] for key in ("total_bytes", "free_bytes", "others_bytes", "age_s")] == (
        [None] * 4
    )
    assert found["weights_bytes"] == 60 * MIB
    assert SICK[how][1] in found["error"]


async def test_the_loop_runs_on_while_nvidia_smi_hangs(smi: Smi) -> None:
    smi.does("exec sleep 60")
    site = Site(chat(5))
    looking = asyncio.create_task(site.watch.look())
    longest_s, last_s = 0.0, time.monotonic()
    while not looking.done():
        await asyncio.sleep(0.005)
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    assert longest_s < 0.3
    assert not is_alive(smi.pids[0])


async def test_a_thread_that_does_not_come_back_delays_nobody_and_stays_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the kernel holds the thread itself, in the start of the process."""
    release, asked = threading.Event(), []

    def hang(uuid: str, **_options: object) -> None:
        asked.append(uuid)
        release.wait(30)

    monkeypatch.setattr(cardasker, "ask_card", hang)
    monkeypatch.setattr(cardasker, "ANSWER_S", 0.1)
    asker = CardAsker()
    with pytest.raises(CardUnknownError, match="cannot be ended"):
        await asker.ask(UUID, stop=threading.Event())
    with pytest.raises(CardUnknownError, match="has not come back"):
        await asker.ask(UUID, stop=threading.Event())
    assert asked == [UUID]
    assert asker._under_way is not None
    release.set()
    async with asyncio.timeout(10):
        await asyncio.wait({asker._under_way})
    assert await asker.ask(UUID, stop=threading.Event()) is None


# ------------------------------------------------------------------ giving way


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it looks at files of other processes
            await asyncio.sleep(0.005)


async def test_nothing_is_asked_during_a_takeover_nor_before_the_first_token(smi: Smi) -> None:
    smi.says("")
    group = chat(5)
    site = Site(group)
    async with group.lock:
        await site.watch.look()
    operation = group.operations.open("failover", group="chat", engine="b", cause="dead")
    operation.epoch = group.epoch
    await site.watch.look()
    assert not smi.calls
    operation.first_token(time.monotonic_ns())
    await site.watch.look()
    assert smi.calls


async def test_a_question_under_way_is_given_up_for_a_takeover(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpumemory, "_TIMEOUT_S", 30.0)
    smi.does("exec sleep 60")
    group = chat(5)
    site = Site(group)
    looking = asyncio.create_task(site.watch.look())
    await until(lambda: bool(smi.calls))
    assert os.getpriority(os.PRIO_PROCESS, smi.pids[0]) == 19
    async with group.lock:
        started_s = time.monotonic()
        await until(lambda: not is_alive(smi.pids[0]))
        assert time.monotonic() - started_s < 1
        await looking
    assert not site.events.told
    assert site.status()["error"] == "it was not asked about yet"


async def test_the_end_of_the_watch_ends_the_question(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpumemory, "_TIMEOUT_S", 30.0)
    smi.does("exec sleep 60")
    site = Site(chat(5))
    site.watch.start()
    await until(lambda: bool(smi.calls))
    await site.watch.stop()
    await until(lambda: not is_alive(smi.pids[0]))


# ------------------------------------------------------------------ for people


def shown(memory: dict[str, Any]) -> str:
    buffer = io.StringIO()
    view = status_view({"groups": [{"name": "chat", "device_memory": [memory]}]})
    Console(file=buffer, width=150, no_color=True).print(view)
    return buffer.getvalue()


async def test_the_command_line_shows_one_line_for_each_card(
    smi: Smi, engine: tuple[int, int]
) -> None:
    smi.says(f"{engine[0]}, 1024\\n1, 7168\\n", totals="40960, 143360")
    site = Site(chat(engine[0], None))
    assert "memory cuda:0: not known (no cache daemon" in shown(site.status())
    await site.watch.look()
    line = "memory cuda:0: 40.0 GiB of 140.0 GiB free; the driver says chat-a 1.0 GiB, others 7.0"
    assert line in shown(site.status())
    smi.does("exit 3")
    site.later()
    await site.watch.look()
    assert "10.0s ago: nvidia-smi: exit status 3" in shown(site.status())


def test_what_is_old_is_not_exported_as_if_it_were_new() -> None:
    collector = DeviceMemoryCollector([("chat", "cuda:0")])
    for age_s, is_up in ((STALE_S - 1, True), (STALE_S + 1, False)):
        report = DeviceMemoryReport(
            "cuda:0", total_bytes=9, free_bytes=3, weights_bytes=4, kv_bytes=1, age_s=age_s
        )
        collector.update("chat", report)
        found = {
            (s.name.removeprefix("understudy_device_"), s.labels.get("part")): s.value
            for family in collector.collect()
            for s in family.samples
        }
        assert found["memory_up", None] == float(is_up)
        assert (("memory_bytes", "free") in found) is is_up
        assert found["memory_bytes", "weights"] == 4
