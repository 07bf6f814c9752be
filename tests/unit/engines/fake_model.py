"""A model whose next token is arithmetic, and a scheduler in a thread around it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer, decoders, models

from cache.protocol import KvGeometry
from engines.contract import (
    Accepted,
    Assume,
    Assumed,
    Delta,
    End,
    GenerateError,
    ProgressPage,
    Role,
)
from engines.native.commands import AssumeRole, Flushed, Stop, Submit
from engines.native.device import HOST
from engines.native.graphs import StepAbandonedError
from engines.native.logits import HostLogits
from engines.native.memory import PrivateMemory
from engines.native.meter import Meter
from engines.native.request import PreparedRequest, RowParams
from engines.native.scheduler import Scheduler, SchedulerLimits
from engines.native.streams import Outbox, Outgoing, StreamPort
from engines.native.text import StreamDecoding

if TYPE_CHECKING:
    from engines.native.model import SlotModel

VOCABULARY = 97
EOS = 96


def next_token(token_id: int, position: int) -> int:
    return (token_id * 7 + position * 3 + 1) % (VOCABULARY - 1)


def expected(prompt: list[int], count: int) -> list[int]:
    """What a greedy stream of the fake model says."""
    tokens = [next_token(prompt[-1], len(prompt) - 1)]
    while len(tokens) < count:
        tokens.append(next_token(tokens[-1], len(prompt) + len(tokens) - 1))
    return tokens


class FakeModel:
    """Fits where `SlotModel` goes. Records the order of its steps."""

    def __init__(self, *, slots: int = 3, max_length: int = 64) -> None:
        self.geometry = KvGeometry(
            layers=1, slots=slots, kv_heads=1, max_length=max_length, head_dim=4, dtype="float32"
        )
        self.device = HOST
        self.chunk_tokens = HOST.chunk_tokens
        self.vocabulary_size = VOCABULARY
        self.steps: list[str] = []
        self.broken_slots: set[int] = set()
        self.step_s = 0.0
        self.before_layer: Callable[[], None] | None = None  # what a test does there
        self._must_give_way: Callable[[], bool] = lambda: False

    @contextmanager
    def giving_way(self, *, once: Callable[[], bool]) -> Iterator[None]:
        self._must_give_way = once
        try:
            with suppress(StepAbandonedError):
                yield
        finally:
            self._must_give_way = lambda: False

    def prefill(self, _kv: Any, slot: int, ids: list[int], *, start: int) -> Any:
        if self.before_layer is not None:
            self.before_layer()
        if self._must_give_way():
            raise StepAbandonedError
        self.steps.append(f"prefill {slot}")
        return HostLogits(self._row(slot, ids[-1], start + len(ids) - 1)[None])

    def decode(self, _kv: Any, tokens: list[tuple[int, int, int]], **_: Any) -> Any:
        time.sleep(self.step_s)
        self.steps.append("decode " + " ".join(str(slot) for slot, _, _ in tokens))
        logits = np.zeros((self.geometry.slots, VOCABULARY), np.float32)
        for slot, token_id, position in tokens:
            logits[slot] = self._row(slot, token_id, position)
        return HostLogits(logits)

    def _row(self, slot: int, token_id: int, position: int) -> Any:
        row = np.zeros(VOCABULARY, np.float32)
        row[next_token(token_id, position)] = 1.0
        if slot in self.broken_slots:
            row[0] = np.nan
        return row


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    made.decoder = decoders.Fuse()
    return made


def params(**changes: Any) -> RowParams:
    options = {
        "gateway": "g", "seed": 1, "max_tokens": 10, "temperature": 0.0, "top_p": 1.0,
        "top_k": 0, "stop": [], "ignore_eos": False,
    }  # fmt: skip
    return RowParams(**{**options, **changes})


def request(
    prompt: list[int],
    *,
    request_id: bytes | None = None,
    delivered: list[int] | None = None,
    epoch: int = 1,
    without_prompt: bool = False,
    **changes: Any,
) -> PreparedRequest:
    return PreparedRequest(
        request_id=request_id or os.urandom(16),
        epoch=epoch,
        prompt_ids=[] if without_prompt else prompt,
        params=params(**changes),
        delivered=delivered or [],
        delivered_chars=0,
        is_resume=delivered is not None,
        left_out_tokens=len(prompt) if without_prompt else 0,
    )


class Bench:
    """A running scheduler, and what its streams have received."""

    def __init__(self, model: FakeModel, memory: Any, limits: SchedulerLimits) -> None:
        self.model = model
        self.memory = memory
        self.frames: dict[StreamPort, list[Any]] = {}
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.page = ProgressPage(memoryview(bytearray(ProgressPage.SIZE_BYTES)))
        self.meter = Meter(self.page)
        self.auto_flush = True
        self.scheduler = Scheduler(
            model=cast("SlotModel", model),
            memory=memory,
            decoding=StreamDecoding(tokenizer()),
            eos_ids=frozenset({EOS}),
            limits=limits,
            meter=self.meter,
            outbox=Outbox(self._deliver),
            exact=True,
        )

    def _deliver(self, batch: list[Outgoing]) -> None:
        for outgoing in batch:
            self.frames.setdefault(outgoing.port, []).append(outgoing.frame)
            if outgoing.port.wants_wake:
                continue
            if outgoing.is_last and self.auto_flush:
                self.scheduler.post(Flushed(outgoing.port))

    def assume(self, role: Role, epoch: int = 1) -> Assumed:
        future: Future[Assumed] = Future()
        self.scheduler.post(AssumeRole(Assume(cast("Any", role), epoch), future))
        return future.result(10)

    def submit(self, wanted: PreparedRequest, port: StreamPort | None = None) -> StreamPort:
        used = port or StreamPort()
        self.scheduler.post(Submit(wanted, used))
        return used

    def until(self, condition: Any, *, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.frames, self.model.steps[-5:])
            time.sleep(0.001)

    def ended(self, port: StreamPort) -> Any:
        self.until(lambda: any(isinstance(f, End | GenerateError) for f in self.got(port)))
        return self.got(port)[-1]

    def got(self, port: StreamPort) -> list[Any]:
        return self.frames.get(port, [])

    def tokens(self, port: StreamPort) -> list[int]:
        return [t for f in self.got(port) if isinstance(f, Delta) for t in f.token_ids]

    def accepted(self, port: StreamPort) -> Accepted:
        self.until(lambda: self.got(port))
        found = self.got(port)[0]
        assert isinstance(found, Accepted), found
        return found

    def idle(self) -> None:
        """Nothing runs and every command is carried out, those that free slots included."""

        def is_idle() -> bool:
            has_rows = self.meter.active or self.meter.parked or self.meter.queued
            return not has_rows and self.page.get("posted") == self.page.get("handled")

        self.until(is_idle)


@contextmanager
def running(
    model: FakeModel | None = None, *, memory: Any = None, role: Role = "primary", **limits: Any
) -> Iterator[Bench]:
    used = model or FakeModel()
    options = {"max_queue": 2, "adopt_grace_s": 30.0, "max_unsent_tokens": 1000, **limits}
    bench = Bench(
        used,
        memory or PrivateMemory(used.geometry),
        SchedulerLimits(**options),
    )
    thread = threading.Thread(target=bench.scheduler.run)
    thread.start()
    try:
        if role != "none":
            bench.assume(role)
        yield bench
    finally:
        bench.scheduler.post(Stop())
        thread.join(10)
        assert not thread.is_alive()
