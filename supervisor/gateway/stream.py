"""One request on its way through routes and engines until its answer is complete.

The record of what the client has got is `Delivery`, which is pure; here are the connections, the
waits and their deadlines.

    route? -> connect -> generate -> accepted -> delta ... -> end
      ^                                                |
      +---- cut, end of file, wrong frame, "not now" --+

Invariants
    1. At most one connection is open, and it is closed before the next route is asked for.
    2. Every emitted text was complete in one frame of an engine whose route was in force.
    3. A client that is gone is told to the engine (`Cancel`); a lost engine never is.
    4. A request that was present when engines crashed ends as poison, or proves itself first.
    5. The engine is read only when the client has taken what came before, so a slow client costs
       a bounded number of bytes here and stops its own row there.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engines.contract import (
    GENERATE_VERSION,
    End,
    EngineFrame,
    Generate,
    GenerateBody,
    GenerateError,
)
from supervisor.gateway.counters import ModelCounters
from supervisor.gateway.delivery import Delivery, Emit, Started
from supervisor.gateway.errors import (
    ApiError,
    AttemptFailedError,
    EngineLostError,
    PromptNeededError,
    RefusedForNowError,
    RouteCutError,
    StreamViolationError,
)
from supervisor.gateway.limits import (
    ENGINE_SILENCE_S,
    EXPLANATION_S,
    MAX_FRUITLESS_ATTEMPTS,
    MAX_VIOLATIONS,
    SAME_ROUTE_FIRST_S,
    SAME_ROUTE_LONGEST_S,
    Parking,
)
from supervisor.gateway.poison import Courtroom, Opinion, Suspicion, Trial
from supervisor.gateway.protocol import GatewayLimits, RouteTarget
from supervisor.gateway.routes import RouteTable, ServedModel
from supervisor.gateway.upstream import EngineConnection

__all__ = ["EngineStream", "LiveConnections", "Sink", "StreamContext"]

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the text of an answer goes."""

    async def text(self, text: str) -> None:
        """Hand over the next piece, never empty; returns when the client can take more.

        Raises:
            ConnectionError: the client is gone.
        """

    def restart(self) -> bool:
        """Forget all text, if the client has not got any of it; whether that is so."""


class LiveConnections:
    """All open engine connections, so that a new table can cut those that it no longer names."""

    def __init__(self) -> None:
        self._live: dict[EngineConnection, tuple[str, RouteTarget]] = {}
        self._closing: set[EngineConnection] = set()

    def add(self, connection: EngineConnection, model_id: str, target: RouteTarget) -> None:
        """The connection is open."""
        self._live[connection] = (model_id, target)

    def remove(self, connection: EngineConnection) -> None:
        """The stream is done with the connection; it may still be saying goodbye."""
        self._live.pop(connection, None)
        self._closing = {old for old in self._closing if not old.is_closed.is_set()}
        self._closing.add(connection)

    async def wait_closed(self, *, timeout_s: float) -> None:
        """Let engines hear what was said last, before the process ends."""
        try:
            async with asyncio.timeout(timeout_s):
                for connection in list(self._closing):
                    await connection.is_closed.wait()
        except TimeoutError:
            log.warning("some engines did not hang up in time")

    def cut_stale(self, table: RouteTable) -> int:
        """Cut what the table does not name; returns how many. Synchronous: it holds on return."""
        stale = [
            connection
            for connection, (model_id, target) in self._live.items()
            if not table.is_in_force(model_id, target)
        ]
        for connection in stale:
            connection.cut()
            del self._live[connection]
        return len(stale)


@dataclass(frozen=True, slots=True)
class StreamContext:
    """What all requests of a worker share."""

    instance: str
    limits: GatewayLimits
    table: RouteTable
    parking: Parking
    live: LiveConnections
    on_first_token: Callable[[str, int, str], None]  # group, epoch, source
    courtroom: Courtroom = field(default_factory=Courtroom)


@dataclass(slots=True)
class _Retry:
    """Where the last attempt failed, and how patient to be with the same engine."""

    avoid: RouteTarget | None = None
    same_after_s: float = 0.0
    violations: int = 0
    fruitless: int = 0
    failures: list[str] = field(default_factory=list)  # the last few, for the log

    def note(self, target: RouteTarget, error: AttemptFailedError) -> None:
        doubled_s = self.same_after_s * 2 if self.avoid == target else 0.0
        self.same_after_s = min(max(doubled_s, SAME_ROUTE_FIRST_S), SAME_ROUTE_LONGEST_S)
        self.avoid = target
        self.failures = [*self.failures[-2:], f"{target.instance}: {error.message}"]

    def progress(self) -> None:
        self.same_after_s = 0.0
        self.fruitless = 0


class EngineStream:
    """Runs one request. `run` is called once, by the handler of the client's connection."""

    def __init__(
        self,
        context: StreamContext,
        *,
        model: ServedModel,
        body: GenerateBody,
        seed: int,
        counters: ModelCounters,
        sink: Sink,
    ) -> None:
        self._context = context
        self._model = model
        self._body = body
        self._seed = seed
        self._counters = counters
        self._sink = sink
        self._request_id = secrets.token_hex(16)
        self._delivery = Delivery()
        self._retry = _Retry()
        self._suspicion = Suspicion()
        self._was_sent = False  # to the engine of this attempt
        self._source = "fresh"
        self._awaits_first_token = False  # of an attempt behind a loss
        self._deadline: float | None = (
            asyncio.get_running_loop().time() + context.limits.park_timeout_s
        )
        self.waited = False
        self.sent_at: float | None = None  # the first attempt; time.perf_counter()
        self.first_token_at: float | None = None
        self.first_text_s = 0.0  # what handing it to the sink took

    async def run(self) -> End:
        """Serve the request; returns once all text was handed to the sink.

        Raises:
            ApiError: it cannot be served, or cannot be continued.
            ConnectionError: the client is gone; the engine was told.
            CancelledError: likewise.
        """
        while True:
            target = await self._next_target()
            opinion = await self._await_explanation()
            court = self._context.courtroom
            is_suspect = opinion is not Opinion.CLEAR
            async with court.trial(
                self._suspicion, self._model.group, target.instance, is_suspect=is_suspect
            ) as trial:
                if is_suspect and not self._context.table.is_in_force(self._model.id, target):
                    continue  # the route has changed while this request waited for its turn
                try:
                    return await self._attempt(target, trial)
                except AttemptFailedError as error:
                    self._note_suspicion(target, trial, error)
                    self._note_failure(target, error)
                except TimeoutError:
                    raise self._too_late() from None

    async def _await_explanation(self) -> Opinion:
        """What is known against this request, once the last death is explained.

        Raises:
            ApiError: `poison`.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + EXPLANATION_S
        while True:
            opinion = self._suspicion.opinion(self._context.table, self._model.group)
            if opinion is Opinion.POISON:
                raise self._poison()
            if opinion is not Opinion.UNEXPLAINED or loop.time() >= until:
                return opinion
            try:
                await self._context.table.wait_change(until)
            except TimeoutError:
                continue  # looks once more

    def _poison(self) -> ApiError:
        self._counters.poisoned += 1
        log.error(
            "a request is poison model=%s request=%s crashed=%s tokens=%d",
            self._model.id, self._request_id, self._suspicion.instances,
            len(self._delivery.token_ids),
        )  # fmt: skip
        return ApiError(
            500, "poison", "engines crashed again and again while they worked on this request"
        )

    async def _next_target(self) -> RouteTarget:
        target = self._context.table.other_target(self._model.id, avoid=self._retry.avoid)
        if target is not None:
            return target
        self.waited = True
        try:
            if self._delivery.was_accepted:
                return await self._wait_target()
            with self._context.parking.place():
                self._counters.parked += 1
                try:
                    return await self._wait_target()
                finally:
                    self._counters.parked -= 1
        except TimeoutError:
            raise self._too_late() from None

    async def _wait_target(self) -> RouteTarget:
        assert self._deadline is not None  # noqa: S101 - set at the start and by every failure
        return await self._context.table.wait_target(
            self._model.id,
            avoid=self._retry.avoid,
            same_after_s=self._retry.same_after_s,
            deadline=self._deadline,
        )

    async def _attempt(self, target: RouteTarget, trial: Trial | None) -> End:
        """Once without the prompt's ids, where the engine may hold them; if it does not, with."""
        if self._delivery.token_ids:
            try:
                return await self._connect_and_read(target, trial, with_prompt=False)
            except PromptNeededError:
                log.debug("no slot holds the stream model=%s engine=%s",
                          self._model.id, target.instance)  # fmt: skip
        return await self._connect_and_read(target, trial, with_prompt=True)

    async def _connect_and_read(
        self, target: RouteTarget, trial: Trial | None, *, with_prompt: bool
    ) -> End:
        self._was_sent = False
        self._delivery.begin(target.epoch)  # before it can fail: nobody has accepted this attempt
        connection = await EngineConnection.open(target, deadline=self._deadline)
        live = self._context.live
        try:
            live.add(connection, self._model.id, target)
            live.cut_stale(self._context.table)  # it may have changed while this one connected
            connection.send(self._generate(target, with_prompt=with_prompt))
            self._was_sent = True
            self.sent_at = self.sent_at or time.perf_counter()
            while True:
                end = await self._take(target, trial, await self._next_frame(connection))
                if end is not None:
                    connection.close()
                    return end
        except AttemptFailedError as error:
            connection.cut(error)
            raise
        except BaseException:  # the client is gone, or gets an error: nobody will resume this
            connection.cancel()
            raise
        finally:
            live.remove(connection)

    def _generate(self, target: RouteTarget, *, with_prompt: bool) -> Generate:
        resume, body = self._delivery.resume(with_prompt=with_prompt), self._body
        if resume is not None:  # it names the prompt's ids; the text would be as long again
            body = msgspec.structs.replace(body, prompt=None, messages=None)
        return Generate(
            version=GENERATE_VERSION,
            request_id=self._request_id,
            epoch=target.epoch,
            gateway=self._context.instance,
            body=body,
            seed=self._seed,
            resume=resume,
        )

    async def _next_frame(self, connection: EngineConnection) -> EngineFrame:
        silence_ends = asyncio.get_running_loop().time() + ENGINE_SILENCE_S
        deadline = self._deadline
        try:
            async with asyncio.timeout_at(min(deadline or silence_ends, silence_ends)):
                return await connection.next_frame()
        except TimeoutError:
            if deadline is not None and deadline <= silence_ends:
                raise
            raise EngineLostError(f"the engine said nothing for {ENGINE_SILENCE_S:g} s") from None

    async def _take(
        self, target: RouteTarget, trial: Trial | None, frame: EngineFrame
    ) -> End | None:
        if isinstance(frame, GenerateError):
            raise self._refusal(frame)
        step = self._delivery.take(frame)
        if isinstance(step, End):
            if not self._delivery.token_ids:  # an engine that knows its tokens by number only
                self._counters.tokens += step.usage.completion_tokens
            return step
        if isinstance(step, Started):
            self._started(step)
        elif step.tokens or step.text:
            if trial is not None:
                trial.saw_tokens()
            await self._emit(target, step)
        return None

    def _started(self, step: Started) -> None:
        self._deadline = None
        self._source = step.source
        if step.resumed and step.source == "slot":
            self._counters.resumed_slot += 1
        elif step.resumed:
            self._counters.resumed_replay += 1

    async def _emit(self, target: RouteTarget, step: Emit) -> None:
        if self._delivery.is_resumable:  # what is begun anew has got nowhere
            self._retry.progress()
        self._counters.tokens += step.tokens
        if self._awaits_first_token:
            self._awaits_first_token = False
            if self._model.tier == "primary":
                self._context.on_first_token(self._model.group, target.epoch, self._source)
        if step.text:
            received_at = time.perf_counter()
            await self._sink.text(step.text)
            if self.first_token_at is None:
                self.first_token_at = time.perf_counter()
                self.first_text_s = self.first_token_at - received_at

    def _refusal(self, frame: GenerateError) -> Exception:
        """Whether this refusal is for the client or only for this attempt."""
        delivery = self._delivery
        is_full = frame.status == 429 and delivery.was_accepted and delivery.is_resumable
        if frame.code == "prompt_needed":
            return PromptNeededError(frame.message)
        if frame.resumable or is_full:
            return RefusedForNowError(f"{frame.code}: {frame.message}")
        param = "messages" if self._body.kind == "chat" else "prompt"
        return ApiError.from_engine(frame, param=param)

    def _note_suspicion(
        self, target: RouteTarget, trial: Trial | None, error: AttemptFailedError
    ) -> None:
        """Remember that this request was there when the engine was lost, if it may be why."""
        if not self._was_sent or not isinstance(error, EngineLostError | RouteCutError):
            return
        court = self._context.courtroom
        if not court.is_excused(self._suspicion, self._model.group, target.instance):
            self._suspicion.lost(target.instance)
        if trial is not None:
            trial.failed()

    def _note_failure(self, target: RouteTarget, error: AttemptFailedError) -> None:
        retry = self._retry
        # A cut was announced, with the number of streams; a line for each would delay them all.
        log.log(
            logging.DEBUG if isinstance(error, RouteCutError) else logging.INFO,
            "an attempt failed model=%s engine=%s epoch=%d code=%s reason=%r tokens=%d",
            self._model.id, target.instance, target.epoch, error.stable_code, error.message,
            len(self._delivery.token_ids),
        )  # fmt: skip
        retry.note(target, error)
        if self._delivery.is_accepted and not isinstance(error, RouteCutError):
            retry.fruitless += 1
        if isinstance(error, StreamViolationError):
            retry.violations += 1
        if retry.violations >= MAX_VIOLATIONS or retry.fruitless >= MAX_FRUITLESS_ATTEMPTS:
            raise ApiError(
                500,
                "stream_broken",
                "the answer could not be continued without repeating or losing text"
                if self._delivery.is_resumable
                else f"the answer broke off {retry.fruitless} times: {error.message}",
            )
        self._awaits_first_token = True
        if self._delivery.was_accepted and not self._delivery.is_resumable:
            self._begin_anew(error)
        if not self._delivery.was_accepted:
            self._counters.retried += 1
        if self._deadline is None:
            now = asyncio.get_running_loop().time()
            self._deadline = now + self._context.limits.resume_deadline_s

    def _begin_anew(self, error: AttemptFailedError) -> None:
        """Nobody can go on with this stream: serve the request from its beginning.

        Raises:
            ApiError: the client has a part of the answer, and another one would not fit to it.
        """
        if not self._sink.restart():
            raise ApiError(
                502,
                "stream_lost",
                f"the engine was lost in the middle of the answer ({error.stable_code}), and this "
                "kind of engine cannot go on with another one's: ask again",
            )
        self._delivery.restart()
        self._deadline = asyncio.get_running_loop().time() + self._context.limits.park_timeout_s

    def _too_late(self) -> ApiError:
        limits = self._context.limits
        log.warning(
            "a request found no engine in time model=%s accepted=%s failures=%s",
            self._model.id, self._delivery.was_accepted, self._retry.failures,
        )  # fmt: skip
        if self._delivery.was_accepted:
            code, waited_s = "resume_deadline_exceeded", limits.resume_deadline_s
        else:
            code, waited_s = "no_engine", limits.park_timeout_s
        return ApiError(
            503,
            code,
            f"no engine could serve model {self._model.id} within {waited_s:g} s",
            retry_after_s=5.0,
        )
