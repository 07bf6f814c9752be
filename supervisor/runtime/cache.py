"""The cache daemon of a group, and the supervisor's own hold on its memory.

The supervisor keeps a duplicate of every descriptor (weights, KV, slot table) and the manifest.
When the daemon dies, its successor is handed the same memory (`donate`): nothing is read from
disk, engines keep what they have mapped, and later failovers still adopt.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cache.errors import RemoteError, UnderstudyError
from cache.protocol import (
    PROTOCOL,
    VERSION,
    Attach,
    Attached,
    CacheStatus,
    Donate,
    HelloReply,
    KvOpen,
    KvOpened,
    Load,
    LoadSpec,
    Manifest,
    Progress,
)
from cache.wire import Event
from engines.contract import Descriptors
from supervisor.core.restart import RestartPolicy
from supervisor.errors import DeadlineExceededError, StartFailedError
from supervisor.process import ProcessId
from supervisor.runtime.launch import python_module
from supervisor.runtime.services import Services
from supervisor.runtime.unit import Unit

__all__ = ["CacheUnit", "Held"]

_START_S: Final = 15.0
_CALL_S: Final = 10.0


@dataclass
class Held:
    """Descriptors of the memory, and what they are. Order as in `cache.protocol.Donate`."""

    manifest: Manifest
    weights: list[int]
    kv: KvOpened | None = None
    kv_fds: list[int] = field(default_factory=list)

    def close_kv(self) -> None:
        """Let go of KV and slot table."""
        fds, self.kv_fds, self.kv = self.kv_fds, [], None
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        """Let go of the memory."""
        self.close_kv()
        fds, self.weights = self.weights, []
        for fd in fds:
            os.close(fd)


class CacheUnit(Unit):
    """Starts the daemon, has it load or donates to it, and holds its memory."""

    kind = "cache"

    def __init__(
        self,
        services: Services,
        *,
        group: str,
        load: LoadSpec,
        load_timeout_s: float,
        policy: RestartPolicy,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(
            services, name=f"cache-{group}", group=group, policy=policy, on_change=on_change
        )
        self.load = load
        self.status: CacheStatus | None = None
        self.held: Held | None = None
        self.is_starting = False
        self.progress: Progress | None = None
        self._load_timeout_s = load_timeout_s
        self._changed = asyncio.Event()
        self._holding = asyncio.Lock()  # a second holder at once would leak the first one's

    @property
    def is_serving(self) -> bool:
        """Whether engines can attach now."""
        return self.is_alive and self.status is not None and self.status.state == "serving"

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do: it serves and we hold all of it, or it is fenced."""
        if self.status is None or not self.is_alive:
            return False
        return self.status.state == "fenced" or (self.is_serving and self.held is not None)

    @property
    def needs_start(self) -> bool:
        """Whether `ensure_serving` has something to do; a daemon that is silent is not asked."""
        is_known = self.is_connected and self.status is not None
        return not self.is_alive or (is_known and not self.is_settled)

    @property
    def is_in_short_step(self) -> bool:
        """Whether it is in a step of its start that has a deadline of seconds; loading has not."""
        is_loading = self.status is not None and self.status.state == "loading"
        return self.is_starting and not is_loading

    async def ensure_serving(self) -> None:
        """Bring the daemon to serve, from wherever it is: spawn, donate what we hold, or load.

        A daemon that was adopted may be empty, or in the middle of loading.

        Raises:
            StartFailedError, DeadlineExceededError: it did not come up, or loading failed.
        """
        self.is_starting = True
        try:
            with self.starts.refusals():
                if not self.is_alive:
                    await self._spawn()
                state = self.status.state if self.status is not None else "empty"
                if state in ("empty", "failed"):
                    await (self._donate(self.held) if self.held is not None else self._load())
                await self._wait_serving()
                await self.hold()
        finally:
            self.is_starting = False
        self._on_change()

    async def _spawn(self) -> None:
        self.begin()
        self.status = None
        socket = self.services.paths.cache(self.group)
        self.spawn_process(
            python_module(
                "cache.daemon", "--socket", str(socket), "--instance", self.instance,
                "--device", self.load.device, "--load-timeout", f"{self._load_timeout_s:g}",
            ),
            with_model=True,
        )  # fmt: skip
        await self.join(timeout_s=_START_S)

    async def join(self, *, timeout_s: float) -> None:
        """Connect to the daemon (just spawned, or adopted)."""
        raw = await self.connect(
            self.services.paths.cache(self.group),
            PROTOCOL,
            VERSION,
            timeout_s=timeout_s,
            on_event=self._event,
        )
        try:
            hello = self.understood(raw, HelloReply)
            if hello.instance != self.instance:
                raise StartFailedError(f"{self.name}: {hello.instance} answers at its socket")
            await self.refresh()
        except UnderstudyError:
            self.disconnect()  # one that is connected is taken for one that can be told to load
            raise

    async def refresh(self) -> CacheStatus:
        """Ask for the newest status."""
        return self._take(await self.ask("status", CacheStatus, timeout_s=_CALL_S))

    async def _load(self) -> None:
        self._take(await self.ask("load", CacheStatus, Load(self.load), timeout_s=_CALL_S))
        await self._wait_serving()
        assert self.status is not None  # noqa: S101 - serving
        self.emit("weights_loaded", f"{self.name} holds {self.status.weights_bytes} bytes",
                  bytes=self.status.weights_bytes, took_s=self.status.load_s)  # fmt: skip

    async def _donate(self, held: Held) -> None:
        begun_ns = self.services.clock.monotonic_ns()
        raw, fds = await self.call_with_fds(
            "donate",
            Donate(held.manifest, self.load, held.kv),
            fds=[*held.weights, *held.kv_fds],
            timeout_s=_CALL_S,
        )
        for fd in fds:
            os.close(fd)
        self._take(self.understood(raw, CacheStatus))
        await self._wait_serving()
        took_ms = (self.services.clock.monotonic_ns() - begun_ns) / 1e6
        self.emit("memory_donated", f"{self.name} serves the same memory again",
                  took_ms=round(took_ms, 3))  # fmt: skip

    async def _wait_serving(self) -> None:
        deadline = self.services.patience.deadline(self._load_timeout_s)
        while self.status is None or self.status.state == "loading":
            if self.died.done():
                raise self.start_failure()
            if deadline.has_passed:
                raise DeadlineExceededError("loading the weights", timeout_s=self._load_timeout_s)
            self._changed.clear()
            await self.change_or_death(self._changed, timeout_s=deadline.wait_s)
        if self.status.error is not None and self.status.state != "serving":
            raise RemoteError(self.status.error)

    async def hold(self) -> None:
        """Take duplicates of everything that the daemon serves and that we do not hold yet."""
        async with self._holding:
            status = await self.refresh()
            if status.state != "serving" or status.fingerprint is None:
                return
            self._let_go_of_the_past(status)
            if self.held is None:
                attach = Attach(self.load, status.fingerprint, timeout_s=_CALL_S)
                attached, fds = await self.given("attach", Attached, attach, timeout_s=_CALL_S)
                self.held = Held(attached.manifest, fds)
            if self.held.kv is None and status.kv is not None:
                opened, fds = await self.given(
                    "kv.open", KvOpened, KvOpen(status.kv), timeout_s=_CALL_S
                )
                self.held.kv, self.held.kv_fds = opened, fds

    def _let_go_of_the_past(self, status: CacheStatus) -> None:
        """The daemon serves other memory now: what we hold would only keep the old copy alive."""
        if self.held is not None and self.held.manifest.fingerprint != status.fingerprint:
            self.held.close()
            self.held = None
        if self.held is not None and self.held.kv and self.held.kv.geometry != status.kv:
            self.held.close_kv()

    def take_donation(self, found: Descriptors, fds: list[int]) -> None:
        """Hold what an engine gave us, because daemon and former supervisor are both gone."""
        count = len(found.manifest.extent_bytes)
        self.held = Held(found.manifest, fds[:count], found.kv, fds[count:])

    def on_death(self, process: ProcessId) -> None:
        """Engines go on; the memory lives as long as anybody holds it."""
        self.status = None
        self._changed.set()
        self.services.metrics.set_cache(self.group, None)
        self.note_death(process)

    def close(self) -> None:
        """Let go of the memory; without engines and daemon it is free now."""
        if self.held is not None:
            self.held.close()
            self.held = None

    def _take(self, status: CacheStatus) -> CacheStatus:
        self.status = status
        self.services.metrics.set_cache(self.group, status)
        self._changed.set()
        return status

    def _event(self, event: Event, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if event.name == "state":
            status = self._take(self.understood(event.params, CacheStatus))
            if status.state == "serving":
                self.in_background(self._hold_quietly())
        elif event.name == "progress":
            self._report(self.understood(event.params, Progress))

    async def _hold_quietly(self) -> None:
        with contextlib.suppress(UnderstudyError):  # the next state event tries again
            await self.hold()

    def _report(self, progress: Progress) -> None:
        self.progress = progress
        self.services.observer.loading(
            self.group,
            progress.bytes_done,
            progress.bytes_total,
            progress.bytes_per_s,
            progress.eta_s,
        )
