"""The model thread: continuous batching over slots, one command queue in, frames out.

One loop: hear commands, expire parked rows, fill free slots, compute at most one prefill chunk,
compute one decode step of the full batch, hand the frames over. Everything here runs in one
thread, so nothing is locked; the event loop talks to it through `post` alone.

Invariants
    1. Nothing is written to memory unless the role is primary or batch: standby memory is
       read-only, and a write there is SIGSEGV.
    2. A token is committed to the slot table before any frame with it is handed over.
    3. Tokens that a client has are never recomputed differently: with a slot they are read, else
       they are forced through decode one by one, never prefilled.
    4. Resumes go before new requests, and every queue is bounded.

This file is longer than most because the loop and the commands share all their state.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future  # noqa: TC003 - kept at run time for the reader of types
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import torch

from engines.contract import Accepted, Assumed, CanaryResult, End, GenerateError, Role
from engines.native.canary import Canary, CanaryFailedError
from engines.native.commands import (
    AssumeRole,
    BreakDevice,
    Command,
    Detach,
    Flushed,
    Pause,
    ReleaseGateway,
    RunCanary,
    Stop,
    Submit,
    Wake,
)
from engines.native.keeper import SlotKeeper
from engines.native.logits import Choice
from engines.native.memory import ServingMemory
from engines.native.meter import Meter
from engines.native.model import SlotModel
from engines.native.roles import RoleFacts, check_assume
from engines.native.rows import FinishReason, Row, RowState, finish_reason
from engines.native.streams import Outbox, StreamPort
from engines.native.text import Decoding, StreamText
from engines.native.waiting import WaitingRequests

__all__ = ["Scheduler", "SchedulerLimits"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Source = Literal["fresh", "slot", "replay"]

_NOT_SERVING: Final = GenerateError(
    "not_serving", "this engine stopped serving", status=503, resumable=True
)
_PROMPT_NEEDED: Final = GenerateError(
    "prompt_needed", "no slot holds this stream: name the ids of its prompt", status=409,
    resumable=True,
)  # fmt: skip

_CAPTURE_DELAY_S: Final = 5.0
"""Quiet time behind the start and behind every change of role: a capture keeps this engine and the
card busy for some 100 ms, just when a takeover needs both."""
_MEMORY_INTERVAL_S: Final = 5.0
_SETTLE_POLL_S: Final = 0.005
"""How often requests that wait for the end of a fenced predecessor look for it."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds, from the engine's spec."""

    max_queue: int
    adopt_grace_s: float
    max_unsent_tokens: int


class Scheduler:
    """Rows, queues and the role. Built by start-up, then owned by the model thread."""

    def __init__(
        self,
        *,
        model: SlotModel,
        memory: ServingMemory,
        decoding: Decoding,
        eos_ids: frozenset[int],
        limits: SchedulerLimits,
        meter: Meter,
        outbox: Outbox,
        exact: bool,
    ) -> None:
        self._model = model
        self._memory = memory
        self._decoding = decoding
        self._eos_ids = eos_ids
        self._limits = limits
        self._meter = meter
        self._outbox = outbox
        self._exact = exact
        self._keeper = SlotKeeper(memory, decoding, grace_s=limits.adopt_grace_s)
        self._waiting = WaitingRequests(max_queue=limits.max_queue, slots=model.geometry.slots)
        self._canary = Canary(model)
        self._canaries: deque[tuple[RunCanary, Iterator[CanaryResult | None]]] = deque()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = False
        self._look_at_memory_s = 0.0
        self._may_capture = model.device.is_cuda
        self._capture_from_s = time.monotonic() + _CAPTURE_DELAY_S
        self._promoted_s: float | None = None  # until the first step behind it
        self._assumed: Assumed | None = None
        self.role: Role = "none"  # read by the event loop, written here
        self.epoch = 0

    def prepare(self) -> None:
        """Capture and try what a promotion needs; before `run`, once."""
        self._model.capture_next(self._memory.kv)
        self._model.try_choices()

    def post(self, command: Command) -> None:
        """Give the model thread something to do; from any thread, never blocks.

        The number of commands that can wait is bounded by the number of connections.
        """
        self._meter.command_posted()
        self._inbox.put(command)

    def run(self) -> None:
        """The loop; returns after `Stop`. Exceptions are the caller's to report: they are bugs."""
        with torch.inference_mode():
            while not self._stopping:
                self._receive()
                self._expire()
                self._admit()
                self._prefill_one()
                self._decode_all()
                self._canary_piece()
                self._publish()

    # ----------------------------------------------------------------- commands

    def _receive(self) -> None:
        """All commands that wait; sleeps when there is nothing else to do."""
        try:
            if not self._has_work() and not self._capture_one():
                self._handle(self._inbox.get(timeout=self._idle_timeout_s()))
            while True:
                self._handle(self._inbox.get_nowait())
        except queue.Empty:
            pass
        self._outbox.flush()

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Detach(port=port, is_cancelled=is_cancelled):
                self._detach(port, is_cancelled=is_cancelled)
            case Flushed(port=port):
                self._flushed(port)
            case Wake():
                pass  # the loop looks at every row anyway
            case AssumeRole(assume=assume, future=future):
                _answer(future, lambda: self._assume(assume.role, assume.epoch))
            case RunCanary():
                self._canaries.append((command, self._canary.pieces()))
            case ReleaseGateway(gateway=gateway):
                self._release_gateway(gateway)
            case Pause(duration_s=duration_s):
                time.sleep(duration_s)
            case BreakDevice(action=action):
                self._model.fail_on_purpose(action)
            case Stop():
                self._stop()
        self._meter.command_handled()

    def _capture_one(self) -> bool:
        """Nothing to do: launch the first graph, then capture one more, unless all are.

        Not when an order has just come, soon after a change of role, or while a row waits for its
        gateway to come back.
        """
        if not self._may_capture or not self._inbox.empty():
            return False
        if time.monotonic() < self._capture_from_s or self._keeper.in_state(RowState.PARKED):
            return False
        with self._model.giving_way(once=lambda: not self._inbox.empty()):
            self._may_capture = (
                self._model.launch_once(self._memory.kv)
                or self._canary.capture()
                or self._model.capture_next(self._memory.kv)
            )
        return self._may_capture

    def _has_work(self) -> bool:
        return bool(
            self._canaries
            or (self._waiting and self._keeper.free_slots)
            or self._keeper.in_state(RowState.PREFILL)
            or self._decodable()
        )

    def _idle_timeout_s(self) -> float | None:
        deadline_s = self._keeper.next_deadline_s()
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if self._may_capture and not self._keeper.in_state(RowState.PARKED):
            quiet_s = max(0.0, self._capture_from_s - time.monotonic())
            left_s = quiet_s if left_s is None else min(left_s, quiet_s)
        if self._waiting and not self._keeper.is_settled:
            left_s = min(_SETTLE_POLL_S, _SETTLE_POLL_S if left_s is None else left_s)
        return left_s

    def _stop(self) -> None:
        """Leave in order: slots stay for a successor, streams go on elsewhere."""
        self._leave_streams()
        self._outbox.flush()
        for command, _ in self._canaries:
            command.future.cancel()
        self._stopping = True

    # --------------------------------------------------------------------- role

    def _assume(self, role: Role, epoch: int) -> Assumed:
        check_assume(RoleFacts(self.role, self.epoch, self._memory.is_shared), role, epoch)
        last = self._assumed
        if last is not None and (role, epoch) == (self.role, self.epoch):
            return last  # the answer was lost, or whoever got it is gone
        started = mapped = time.perf_counter()
        adopted: list[str] = []
        if role == self.role:
            if role != "standby":
                self._memory.table.claim(epoch)
        elif role == "standby":
            self._step_down()
        else:
            self._memory.raise_to_writer(epoch)
            mapped = time.perf_counter()
            adopted = [row.request_id.hex() for row in self._keeper.adopt()]
            self._meter.counters.adopted_slots += len(adopted)
        self.role, self.epoch = role, epoch
        self._meter.set_epoch(epoch)
        self._capture_from_s = time.monotonic() + _CAPTURE_DELAY_S
        self._promoted_s = time.monotonic() if adopted else None
        done = time.perf_counter()
        log.info("role %s at epoch %d, %d slots adopted", role, epoch, len(adopted))
        self._assumed = Assumed(
            role, epoch, adopted, (mapped - started) * 1e3, (done - mapped) * 1e3
        )
        return self._assumed

    def _step_down(self) -> None:
        """Become standby at a step boundary: everything is committed, nothing else is freed."""
        if self.role == "primary":
            for row in self._keeper.in_state(RowState.PREFILL):
                self._free(row, tell=_NOT_SERVING)
            self._leave_streams()
            self._keeper.forget()
        self._memory.drop_to_reader()

    def _leave_streams(self) -> None:
        """Tell every stream to go on elsewhere; slots are not touched."""
        for row in self._keeper.rows:
            if row.port is not None and row.state is not RowState.FINISHED:
                self._outbox.put(row.port, _NOT_SERVING, is_last=True)
                row.port = None
        for submit in self._waiting.remove_all():
            self._outbox.put(submit.port, _NOT_SERVING, is_last=True)

    # ----------------------------------------------------------------- requests

    def _submit(self, submit: Submit) -> None:
        request, port = submit.request, submit.port
        refusal = self._refusal(request.epoch)
        if refusal is not None:
            self._outbox.put(port, refusal, is_last=True)
            return
        for old in self._waiting.remove_request(request.request_id):
            self._outbox.put(old.port, _superseded(), is_last=True)
        row = self._keeper.of_request(request.request_id)
        if row is not None and self._continue_row(row, submit):
            return
        if request.left_out_tokens:
            self._outbox.put(port, _PROMPT_NEEDED, is_last=True)
            return
        if request.delivered and self._answer_complete(submit):
            return
        if not self._waiting.try_add(submit, free_slots=self._keeper.free_slots):
            self._meter.counters.refused_requests += 1
            self._outbox.put(port, _queue_full(len(self._waiting)), is_last=True)
            return
        self._meter.counters.requests += 1
        self._accept(submit, source="replay" if request.delivered else "fresh")

    def _refusal(self, epoch: int) -> GenerateError | None:
        if self.role not in ("primary", "batch"):
            return GenerateError(
                "not_serving", f"this engine has role {self.role}", status=503, resumable=True
            )
        if epoch != self.epoch:
            return GenerateError(
                "stale_epoch",
                f"the request names epoch {epoch}, this engine serves epoch {self.epoch}",
                status=503,
                resumable=True,
            )
        return None

    def _continue_row(self, row: Row, submit: Submit) -> bool:
        """Give a slot's stream to this connection; False if the slot holds something else."""
        request = submit.request
        if row.port is not None and row.state is not RowState.FINISHED:
            self._outbox.put(row.port, _superseded(), is_last=True)
        if not row.fits(request):
            log.warning(
                "slot %d does not hold what request %s has received: replaying it",
                row.slot,
                request.request_id.hex(),
            )
            self._free(row)
            return False
        row.attach(request, submit.port, self._decoding)
        if not row.tokens:
            self._accept(submit, source="replay" if request.delivered else "fresh")
            return True
        self._meter.counters.resumes_from_slot += 1
        self._accept(submit, source="slot")
        self._send(row)
        return True

    def _answer_complete(self, submit: Submit) -> bool:
        """A client that lacks nothing but the end gets it without a slot."""
        request, port = submit.request, submit.port
        text = StreamText(self._decoding, request.params.stop, skip_chars=request.delivered_chars)
        text.feed(request.delivered)
        reason = finish_reason(request.delivered, text, request.params, self._eos_ids)
        if reason is None:
            return False
        self._accept(submit, source="replay")
        row = Row.of_request(-1, request, port, self._decoding)
        row.tokens, row.text = request.delivered, text
        self._send_end(row, reason)
        return True

    def _accept(self, submit: Submit, *, source: Source) -> None:
        if source == "replay":
            self._meter.counters.resumes_by_replay += 1
        request = submit.request
        prompt_ids = [] if request.is_resume else request.prompt_ids
        frame = Accepted(prompt_ids, self.epoch, source, self._exact)
        self._outbox.put(submit.port, frame)

    def _admit(self) -> None:
        """Move waiting requests into free slots, but zero at most one whole slot per step."""
        while self._waiting and self._keeper.free_slots:
            if not self._keeper.begin(self._waiting.pop()):
                return

    # ---------------------------------------------------------------- computing

    def _prefill_one(self) -> None:
        """One chunk of the oldest row that still has prompt to compute."""
        rows = self._keeper.in_state(RowState.PREFILL)
        if not rows:
            return
        row = rows[0]
        self._meter.step_begins()
        ids = row.prompt_ids[row.prefilled : row.prefilled + self._model.chunk_tokens]
        logits = self._model.prefill(self._memory.kv, row.slot, ids, start=row.prefilled)
        row.prefilled += len(ids)
        if row.prefilled == len(row.prompt_ids):
            (token_id,) = logits.choose((_choice(row, 0),))
            self._advance(row, token_id)
        else:
            self._model.device.synchronize()  # the next chunk's ids go where these are
        self._meter.step_ends(is_prefill=True)
        self._outbox.flush()

    def _decode_all(self) -> None:
        """One token for every row that may go on."""
        rows = self._decodable()
        if not rows:
            return
        self._meter.step_begins()
        logits = self._model.decode(
            self._memory.kv, [(r.slot, r.tokens[-1], r.next_position) for r in rows]
        )
        chosen = logits.choose([_choice(row, row.slot) for row in rows])
        for row, token_id in zip(rows, chosen, strict=True):
            self._advance(row, token_id)
        self._meter.step_ends(is_prefill=False)
        self._outbox.flush()
        if self._promoted_s is not None:
            since_ms = (time.monotonic() - self._promoted_s) * 1e3
            log.info("first step of %d rows %.1f ms behind the promotion", len(rows), since_ms)
            self._promoted_s = None

    def _decodable(self) -> list[Row]:
        return [r for r in self._keeper.in_state(RowState.DECODE) if not self._is_paused(r)]

    def _is_paused(self, row: Row) -> bool:
        """Whether the gateway has too much unread; it then wakes us by reading."""
        port, bound = row.port, self._limits.max_unsent_tokens
        if port is None or port.unsent_tokens <= bound:
            return False
        port.wants_wake = True
        return port.unsent_tokens > bound  # looked at again: it may have drained in between

    def _advance(self, row: Row, token_id: int | None) -> None:
        """Take the chosen token, or repeat a delivered one; commit it, then send it."""
        if token_id is None:
            self._fail(row)
            return
        count = len(row.tokens)
        counters = self._meter.counters
        if row.is_replaying:
            counters.replayed_tokens += 1
            if token_id != row.forced[count]:
                counters.replay_differences += 1
                log.warning("replay of slot %d differs at token %d", row.slot, count)
            token_id = row.forced[count]
        row.commit(token_id, self._memory.table)
        counters.tokens += 1
        self._send(row)

    def _send(self, row: Row) -> None:
        reason = row.finish_reason(self._eos_ids)
        if reason is None:
            self._send_delta(row)
            return
        self._send_end(row, reason)
        row.state = RowState.FINISHED

    def _send_delta(self, row: Row) -> None:
        delta = row.take_delta()
        if delta is not None and row.port is not None:
            self._outbox.put(row.port, delta, tokens=len(delta.token_ids))

    def _send_end(self, row: Row, reason: FinishReason) -> None:
        row.text.finish()
        self._send_delta(row)
        if row.port is not None:
            self._outbox.put(row.port, End(reason, row.usage), is_last=True)

    def _fail(self, row: Row) -> None:
        """Numbers went wrong in this row: end the request, keep the others."""
        log.error("slot %d produced non-finite logits", row.slot)
        self._meter.counters.failed_requests += 1
        self._keeper.zero_whole(row)
        failure = GenerateError(
            "engine_failed", "the model produced non-finite numbers", status=500, resumable=True
        )
        self._free(row, tell=failure)

    def _canary_piece(self) -> None:
        """Half a canary between two steps of serving.

        Its graphs are captured when there is nothing to do; who never has nothing to do pauses
        for them twice, rather than for every canary that is computed without.
        """
        if not self._canaries:
            return
        is_quiet = time.monotonic() >= self._capture_from_s
        if self._may_capture and is_quiet and self._canary.capture():
            return
        command, pieces = self._canaries[0]
        result = None
        is_done = False
        try:
            with self._model.giving_way(once=self._is_ordered_elsewhere):
                result = next(pieces)
                is_done = True
        except CanaryFailedError as error:
            self._canaries.popleft()
            if command.future.set_running_or_notify_cancel():
                command.future.set_exception(error)
            return
        if not is_done:  # begun again behind the order
            self._canaries[0] = (command, self._canary.pieces())
        elif result is not None:
            self._canaries.popleft()
            self._meter.counters.canaries += 1
            if command.future.set_running_or_notify_cancel():
                command.future.set_result(result)

    def _is_ordered_elsewhere(self) -> bool:
        """Whether a standby has an order: it may be the promotion that streams wait for.

        A primary has orders all the time, and would never come to the end of a canary.
        """
        return self.role == "standby" and not self._inbox.empty()

    # ------------------------------------------------------------- ends of rows

    def _detach(self, port: StreamPort, *, is_cancelled: bool) -> None:
        """A connection is gone: with `Cancel` the client is, without it the gateway may return."""
        self._waiting.remove_port(port)
        row = self._keeper.of_port(port)
        if row is None:
            return
        if is_cancelled or row.state is RowState.PREFILL:
            self._free(row)
        else:
            self._keeper.park(row)

    def _flushed(self, port: StreamPort) -> None:
        """The kernel has taken the last frame of a stream: only now the slot may go."""
        row = self._keeper.of_port(port)
        if row is not None and row.state is RowState.FINISHED:
            self._free(row)

    def _release_gateway(self, gateway: str) -> None:
        self._waiting.remove_gateway(gateway)
        for row in self._keeper.rows:
            if row.params.gateway == gateway:
                self._free(row)

    def _expire(self) -> None:
        for row in self._keeper.expired():
            log.info("slot %d was not resumed in time", row.slot)
            self._meter.counters.expired_slots += 1
            self._free(row)

    def _free(self, row: Row, *, tell: GenerateError | None = None) -> None:
        if tell is not None and row.port is not None:
            self._outbox.put(row.port, tell, is_last=True)
        self._keeper.free(row)

    def _publish(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._look_at_memory_s:
            self._look_at_memory_s = now_s + _MEMORY_INTERVAL_S
            self._meter.device_memory = self._model.device.memory()
        decoding = self._keeper.in_state(RowState.DECODE)
        self._meter.publish(
            active=len(decoding) + len(self._keeper.in_state(RowState.PREFILL)),
            parked=len(self._keeper.in_state(RowState.PARKED)),
            queued=len(self._waiting),
            paused=sum(1 for row in decoding if self._is_paused(row)),
            free_slots=self._keeper.free_slots if self._keeper.is_settled else 0,
        )


def _choice(row: Row, index: int) -> Choice:
    """What decides the next token of a row whose logits are at `index`."""
    params = row.params
    return Choice(
        index, params.temperature, params.top_k, params.top_p, params.seed, len(row.tokens)
    )


def _superseded() -> GenerateError:
    return GenerateError("superseded", "the request was resumed on another connection", status=409)


def _queue_full(queued: int) -> GenerateError:
    return GenerateError(
        "queue_full", f"{queued} requests are waiting already", status=429, retry_after_s=1.0
    )


def _answer(future: "Future[T]", work: Callable[[], T]) -> None:
    """Run `work` for a future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - it is the answer to the one who asked
        future.set_exception(error)
