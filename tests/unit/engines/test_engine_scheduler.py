"""The scheduler's rules, with a model whose answers are known."""

from __future__ import annotations

import time
from concurrent.futures import Future
from itertools import pairwise

import pytest

from cache.errors import StaleEpochError
from cache.slots import SlotState
from engines.contract import Assume, Assumed, CanaryResult, End, GenerateError
from engines.errors import RoleNotPossibleError
from engines.native.commands import (
    AssumeRole,
    Detach,
    Pause,
    ReleaseGateway,
    RunCanary,
    Wake,
)
from engines.native.memory import PrivateMemory
from engines.native.streams import StreamPort
from tests.unit.engines.fake_model import Bench, FakeModel, expected, request, running

PROMPT = [3, 1, 4]


def test_streams_share_steps_and_do_not_mix() -> None:
    with running() as bench:
        prompts = [[n + 1, n + 2] for n in range(3)]
        ports = [bench.submit(request(prompt)) for prompt in prompts]
        for prompt, port in zip(prompts, ports, strict=True):
            end = bench.ended(port)
            assert isinstance(end, End)
            assert (end.finish_reason, end.usage.completion_tokens) == ("length", 10)
            assert bench.tokens(port) == expected(prompt, 10)
        assert max(len(step.split()) - 1 for step in bench.model.steps if step[0] == "d") == 3


def test_a_long_prompt_lets_others_decode_between_its_chunks() -> None:
    with running(FakeModel(max_length=400)) as bench:
        first = bench.submit(request(PROMPT, max_tokens=200))
        bench.until(lambda: bench.tokens(first))
        start = len(bench.model.steps)
        second = bench.submit(request([5] * 300, max_tokens=5))
        bench.ended(second)
        during = bench.model.steps[start:]
        chunks = [i for i, step in enumerate(during) if step.startswith("prefill")]
        assert len(chunks) == 5
        assert all(b - a > 1 for a, b in pairwise(chunks))


def test_slots_are_wiped_when_they_are_freed() -> None:
    with running() as bench:
        bench.memory.kv.slots.fill_(1.0)
        port = bench.submit(request(PROMPT))
        bench.ended(port)
        bench.idle()
        table = bench.memory.table
        assert [table.state(s) for s in range(table.slots)] == [SlotState.FREE] * 3
        assert not any(table.read(0).prompt_ids)
        assert float(bench.memory.kv.slots[:, :, 0, :, :13].sum()) == 0.0


def test_a_finished_slot_stays_until_the_last_frame_has_left() -> None:
    with running() as bench:
        bench.auto_flush = False
        port = bench.submit(request(PROMPT))
        bench.ended(port)
        assert bench.memory.table.state(0) is SlotState.ACTIVE
        bench.scheduler.post(Detach(port, is_cancelled=False))
        bench.until(lambda: bench.meter.parked == 1)

        again = bench.submit(
            request(PROMPT, request_id=_id_of(bench), delivered=expected(PROMPT, 4))
        )
        bench.ended(again)
        assert bench.tokens(again) == expected(PROMPT, 10)[4:]
        bench.auto_flush = True


def test_a_slot_goes_on_although_the_resume_leaves_the_prompt_out() -> None:
    with running() as bench:
        bench.auto_flush = False
        port = bench.submit(request(PROMPT))
        bench.ended(port)
        bench.scheduler.post(Detach(port, is_cancelled=False))
        bench.until(lambda: bench.meter.parked == 1)

        again = bench.submit(
            request(
                PROMPT, request_id=_id_of(bench), delivered=expected(PROMPT, 4), without_prompt=True
            )
        )
        bench.ended(again)
        assert bench.accepted(again).source == "slot"
        assert bench.tokens(again) == expected(PROMPT, 10)[4:]
        bench.auto_flush = True


@pytest.mark.parametrize("same_id", [True, False], ids=["other prompt", "no slot"])
def test_a_resume_without_its_prompt_needs_the_slot(same_id: bool) -> None:
    with running() as bench:
        bench.auto_flush = False
        port = bench.submit(request(PROMPT))
        bench.ended(port)
        asked = bench.submit(
            request(
                [*PROMPT, 1],
                request_id=_id_of(bench) if same_id else None,
                delivered=expected(PROMPT, 4),
                without_prompt=True,
            )
        )
        refusal = bench.ended(asked)
        assert (refusal.code, refusal.resumable) == ("prompt_needed", True)
        bench.auto_flush = True


def _id_of(bench: Bench) -> bytes:
    found: bytes = bench.memory.table.read(0).request_id
    return found


def test_numbers_that_are_not_finite_end_that_stream_and_no_other() -> None:
    with running() as bench:
        bench.model.broken_slots.add(1)
        bench.model.step_s = 0.001
        good = bench.submit(request([9, 9], max_tokens=50))
        bench.until(lambda: bench.tokens(good))  # it sits in the first slot
        bad = bench.submit(request(PROMPT))
        error = bench.ended(bad)
        assert isinstance(error, GenerateError)
        assert (error.code, error.resumable) == ("engine_failed", True)
        bench.ended(good)
        assert bench.tokens(good) == expected([9, 9], 50)
        bench.idle()
        assert float(bench.memory.kv.slots.abs().sum()) == 0.0


def test_resumes_go_before_new_requests() -> None:
    model = FakeModel(slots=1)
    with running(model, max_queue=4) as bench:
        model.step_s = 0.002
        first = bench.submit(request(PROMPT, max_tokens=40))
        bench.accepted(first)
        fresh = bench.submit(request([7], max_tokens=2))
        resumed = bench.submit(request([8], max_tokens=5, delivered=expected([8], 2)))
        order = []
        for port in (first, resumed, fresh):
            bench.ended(port)
            order.append(bench.tokens(port))
        assert bench.tokens(fresh) == expected([7], 2)
        assert bench.tokens(resumed) == expected([8], 5)[2:]
        replayed, newest = model.steps.index("prefill 0", 1), len(model.steps) - 1
        assert replayed < newest
        assert bench.accepted(resumed).source == "replay"
        ends = [list(bench.frames).index(p) for p in (resumed, fresh)]
        assert len(set(ends)) == 2


def test_delivered_tokens_are_forced_even_where_the_model_differs() -> None:
    with running() as bench:
        delivered = [50, 51, 52]
        port = bench.submit(request(PROMPT, max_tokens=5, delivered=delivered))
        bench.ended(port)
        fourth = (52 * 7 + 5 * 3 + 1) % 96
        assert bench.tokens(port)[0] == fourth
        assert bench.meter.counters.replayed_tokens == 3
        assert bench.meter.counters.replay_differences == 3


def test_the_queue_is_bounded_and_says_so() -> None:
    model = FakeModel(slots=1)
    with running(model, max_queue=1) as bench:
        model.step_s = 0.002
        running_port = bench.submit(request(PROMPT, max_tokens=60))
        bench.until(lambda: bench.meter.active == 1)
        waiting = bench.submit(request([1]))
        bench.accepted(waiting)
        refused = bench.submit(request([2]))
        error = bench.ended(refused)
        assert (error.code, error.status) == ("queue_full", 429)
        bench.scheduler.post(Detach(running_port, is_cancelled=True))
        bench.ended(waiting)


def test_nobody_is_served_without_a_role_or_with_another_epoch() -> None:
    with running(role="none") as bench:
        assert bench.ended(bench.submit(request(PROMPT))).code == "not_serving"
        bench.assume("primary", 5)
        assert bench.ended(bench.submit(request(PROMPT, epoch=4))).code == "stale_epoch"
        assert isinstance(bench.ended(bench.submit(request(PROMPT, epoch=5))), End)
        with pytest.raises(StaleEpochError):
            bench.assume("primary", 4)
        with pytest.raises(RoleNotPossibleError):
            bench.assume("batch", 6)


def test_a_successor_adopts_exactly_the_committed_rows() -> None:
    model = FakeModel(max_length=400)
    memory = PrivateMemory(model.geometry)
    model.step_s = 0.001
    with running(model, memory=memory) as old:
        ids = [bytes([n]) * 16 for n in range(2)]
        ports = [old.submit(request([n + 1], request_id=ids[n], max_tokens=300)) for n in range(2)]
        old.until(lambda: all(len(old.tokens(p)) > 5 for p in ports))
    # The old one left in order, as it does on SIGTERM: slots are as a death would leave them.
    assert all(old.ended(p).code == "not_serving" for p in ports)
    memory.table.begin(2, b"u" * 16, [1, 2], b"{}", 64)  # never got to its first token

    with running(FakeModel(max_length=400), memory=memory, role="none") as new:
        assumed = new.assume("primary", 2)
        assert sorted(assumed.adopted) == sorted(i.hex() for i in ids)
        assert memory.table.state(2) is SlotState.FREE
        new.until(lambda: new.meter.parked == 2)
        assert new.assume("primary", 2) == assumed, "asked again, because the answer was lost"
        received = old.tokens(ports[0])
        port = new.submit(
            request([1], request_id=ids[0], max_tokens=300, delivered=received, epoch=2)
        )
        new.ended(port)
        assert new.accepted(port).source == "slot"
        assert received + new.tokens(port) == expected([1], 300)
        new.scheduler.post(ReleaseGateway("g"))
        new.idle()


def test_parked_rows_do_not_decode_and_expire() -> None:
    with running(FakeModel(max_length=400), adopt_grace_s=0.05) as bench:
        port = bench.submit(request(PROMPT, max_tokens=300))
        bench.until(lambda: len(bench.tokens(port)) > 3)
        bench.scheduler.post(Detach(port, is_cancelled=False))
        bench.until(lambda: bench.meter.parked == 1)
        steps = len(bench.model.steps)
        bench.idle()
        assert len(bench.model.steps) == steps
        assert bench.meter.counters.expired_slots == 1
        assert bench.memory.table.state(0) is SlotState.FREE


def test_a_stream_whose_reader_sleeps_is_paused_until_it_reads() -> None:
    with running(FakeModel(max_length=400), max_unsent_tokens=5) as bench:
        port = StreamPort()
        bench.submit(request(PROMPT, max_tokens=30), port)
        bench.until(lambda: bench.meter.paused == 1)
        assert len(bench.tokens(port)) == 6
        assert port.wants_wake
        time.sleep(0.02)
        assert len(bench.tokens(port)) == 6
        port.sent_tokens = 1000
        port.wants_wake = False
        bench.scheduler.post(Wake())
        bench.ended(port)
        assert bench.tokens(port) == expected(PROMPT, 30)


def test_a_waiting_request_is_superseded_and_forgotten() -> None:
    model = FakeModel(slots=1)
    with running(model) as bench:
        model.step_s = 0.002
        blocker = bench.submit(request(PROMPT, max_tokens=60))
        bench.until(lambda: bench.meter.active == 1)
        first = bench.submit(request([1], request_id=b"i" * 16))
        second = bench.submit(request([1], request_id=b"i" * 16))
        assert bench.ended(first).code == "superseded"
        bench.scheduler.post(Detach(second, is_cancelled=False))
        bench.scheduler.post(Detach(blocker, is_cancelled=True))
        bench.idle()
        assert bench.tokens(second) == []


# ----------------------------------------------- what the progress page calls work


def test_requests_behind_parked_slots_are_no_work_that_stands_still() -> None:
    """A gateway that died leaves parked slots: who waits behind them must not look like a hang."""
    with running(FakeModel(slots=1, max_length=400)) as bench:
        first = bench.submit(request(PROMPT, max_tokens=300))
        bench.until(lambda: bench.tokens(first))
        bench.scheduler.post(Detach(first, is_cancelled=False))
        bench.until(lambda: bench.meter.parked == 1)
        bench.accepted(bench.submit(request([9])))
        bench.until(lambda: bench.meter.queued == 1)
        bench.until(lambda: not bench.page.has_work)


def test_a_row_whose_reader_is_slow_is_no_work_that_stands_still() -> None:
    with running(FakeModel(max_length=400), max_unsent_tokens=5) as bench:
        port = bench.submit(request(PROMPT, max_tokens=300))
        bench.until(lambda: port.wants_wake)
        bench.until(lambda: not bench.page.has_work)
        assert bench.meter.active == 1


def test_an_order_that_the_model_thread_does_not_take_is_work() -> None:
    """A thread that stands still while nothing runs never sees the next request by itself."""
    with running() as bench:
        bench.until(lambda: not bench.page.has_work)
        bench.scheduler.post(Pause(0.2))
        bench.submit(request(PROMPT))
        assert bench.page.has_work
        assert bench.page.get("steps") == 0
        bench.until(lambda: not bench.page.has_work)
        assert bench.page.get("steps") > 0


def test_the_canary_of_a_standby_gives_way_to_its_promotion_and_is_answered_behind_it() -> None:
    model = FakeModel()
    with running(model, role="standby") as bench:
        promoted: Future[Assumed] = Future()
        steps_before: list[int] = []  # asked in the model thread, as soon as it has the role
        promoted.add_done_callback(lambda _: steps_before.append(len(model.steps)))

        def promote_once() -> None:
            model.before_layer = None
            bench.scheduler.post(AssumeRole(Assume("primary", 2), promoted))

        model.before_layer = promote_once
        canary: Future[CanaryResult] = Future()
        bench.scheduler.post(RunCanary(canary))
        assert promoted.result(10).role == "primary"
        assert len(canary.result(10).token_ids) == 2
    assert steps_before == [0]
    assert len(model.steps) == 2


def test_the_canary_of_a_primary_gives_way_to_nobody() -> None:
    """Requests come all the time: it would never be answered."""
    model = FakeModel()
    with running(model) as bench:
        model.before_layer = lambda: bench.scheduler.post(Wake())
        canary: Future[CanaryResult] = Future()
        bench.scheduler.post(RunCanary(canary))
        assert len(canary.result(10).token_ids) == 2
