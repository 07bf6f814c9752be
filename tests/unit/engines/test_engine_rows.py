"""Rows, parameters, roles, waiting requests and the progress page, each on its own."""

from __future__ import annotations

import mmap

import msgspec
import pytest

from cache.errors import StaleEpochError
from cache.slots import SlotRecord, SlotState, SlotTable
from engines.contract import ProgressPage, Role
from engines.errors import RoleNotPossibleError
from engines.native.commands import Submit
from engines.native.meter import STEP_BUCKETS_S, Meter
from engines.native.request import RowParams
from engines.native.roles import TRANSITIONS, RoleFacts, check_assume
from engines.native.rows import Row, RowState, finish_reason
from engines.native.streams import StreamPort
from engines.native.text import StreamDecoding, StreamText
from engines.native.waiting import WaitingRequests
from tests.unit.engines.fake_model import EOS, params, request, tokenizer

DECODING = StreamDecoding(tokenizer())


def table() -> SlotTable:
    view = memoryview(bytearray(SlotTable.size_bytes(2, 64)))
    SlotTable.format(view, 2, 64)
    return SlotTable(view)


def begun(row: Row, shared: SlotTable) -> Row:
    shared.begin(row.slot, row.request_id, row.prompt_ids, row.params.encode(), 64)
    return row


def test_a_row_commits_before_it_sends() -> None:
    shared = table()
    row = begun(Row.of_request(0, request([1, 2]), StreamPort(), DECODING), shared)
    assert row.state.value == "prefill"
    row.commit(7, shared)
    assert row.state.value == "decode"
    assert shared.read(0).state is SlotState.ACTIVE
    assert shared.read(0).token_ids == [7]
    assert row.next_position == 2
    delta = row.take_delta()
    assert delta is not None
    assert (delta.index, delta.token_ids, delta.text, delta.chars) == (0, [7], "w7", 2)
    assert row.take_delta() is None


def test_a_replaying_row_sends_nothing_that_the_client_has() -> None:
    shared = table()
    wanted = request([1, 2], delivered=[7, 8])
    row = begun(Row.of_request(0, wanted, StreamPort(), DECODING), shared)
    row.text = StreamText(DECODING, [], skip_chars=len("w7w8"))
    for token_id in (7, 8):
        assert row.is_replaying
        row.commit(token_id, shared)
        assert row.take_delta() is None
    assert not row.is_replaying
    row.commit(9, shared)
    delta = row.take_delta()
    assert delta is not None
    assert (delta.index, delta.token_ids, delta.text, delta.chars) == (2, [9], "w9", 6)


@pytest.mark.parametrize(
    ("committed", "delivered", "fits"),
    [([7, 8, 9], [7], True), ([7], [7, 8], True), ([7, 8], [7, 9], False), ([], [7], True)],
)
def test_a_row_fits_when_one_is_a_past_of_the_other(
    committed: list[int], delivered: list[int], fits: bool
) -> None:
    row = Row.of_request(0, request([1]), StreamPort(), DECODING)
    row.tokens = committed
    assert row.fits(request([1], delivered=delivered)) is fits
    assert not row.fits(request([2], delivered=delivered))
    assert not row.fits(request([1], delivered=delivered, temperature=0.5))
    assert not row.fits(request([1], delivered=delivered, seed=9))
    assert row.fits(request([1], delivered=delivered, gateway="other")) is fits


def test_a_record_becomes_a_parked_row_and_rubbish_does_not() -> None:
    record = SlotRecord(
        slot=1, state=SlotState.ACTIVE, generation=0, request_id=b"i" * 16, prompt_ids=[1],
        params=params(gateway="g7").encode(), chunk_tokens=64, token_ids=[4, 5],
    )  # fmt: skip
    row = Row.of_record(record, DECODING, deadline_s=5.0)
    assert (row.state, row.params.gateway, row.tokens) == (RowState.PARKED, "g7", [4, 5])
    import dataclasses

    with pytest.raises(msgspec.MsgspecError):
        Row.of_record(dataclasses.replace(record, params=b"{"), DECODING, deadline_s=5.0)


def test_reasons_to_end() -> None:
    def reason(tokens: list[int], **changes: object) -> str | None:
        wanted = params(**changes)
        text = StreamText(DECODING, wanted.stop)
        text.feed(tokens)
        return finish_reason(tokens, text, wanted, frozenset({EOS}))

    assert reason([]) is None
    assert reason([1, 2]) is None
    assert reason([1, EOS]) == "stop"
    assert reason([1, EOS], ignore_eos=True) is None
    assert reason([1] * 10) == "length"
    assert reason([1] * 9 + [EOS]) == "stop"
    assert reason([1, 2], stop=["w2"]) == "stop"


def test_parameters_survive_the_slot_table() -> None:
    made = params(stop=["a", "\n"], temperature=0.7, seed=2**63 - 1)
    assert RowParams.decode(made.encode()) == made


def test_every_role_change_is_allowed_or_refused_as_the_table_says() -> None:
    roles: list[Role] = ["none", "primary", "standby", "batch"]
    for old in roles:
        for new in roles[1:]:
            for shared in (True, False):
                facts = RoleFacts(old, 3, shared)
                guard = TRANSITIONS.get((old, new))
                if guard is not None and guard(facts):
                    check_assume(facts, new, 3)
                else:
                    with pytest.raises(RoleNotPossibleError):
                        check_assume(facts, new, 3)
                with pytest.raises(StaleEpochError):
                    check_assume(facts, new, 2)


def submits(count: int, *, resumed: bool = False) -> list[Submit]:
    return [
        Submit(request([1], delivered=[5] if resumed else None), StreamPort()) for _ in range(count)
    ]


def test_waiting_requests_are_bounded_and_resumes_go_first() -> None:
    waiting = WaitingRequests(max_queue=2, slots=2)
    fresh, resumed = submits(4), submits(5, resumed=True)
    assert [waiting.try_add(s, free_slots=1) for s in fresh] == [True, True, True, False]
    assert [waiting.try_add(s, free_slots=0) for s in resumed] == [True] * 4 + [False]
    assert len(waiting) == 7
    assert waiting.pop() is resumed[0]
    waiting.remove_port(resumed[1].port)
    assert waiting.remove_request(resumed[2].request.request_id) == [resumed[2]]
    assert waiting.pop() is resumed[3]
    assert waiting.pop() is fresh[0]
    waiting.remove_gateway("other")
    assert len(waiting) == 2
    waiting.remove_gateway("g")
    assert waiting.remove_all() == []


def test_steps_are_counted_and_shown() -> None:
    with mmap.mmap(-1, ProgressPage.SIZE_BYTES) as memory:
        page = ProgressPage(memoryview(memory))
        page.format()
        meter = Meter(page)
        meter.step_begins()
        assert page.get("step_started_ns") > 0
        meter.counters.tokens += 3
        meter.step_ends(is_prefill=False)
        meter.step_begins()
        meter.step_ends(is_prefill=True)
        meter.publish(active=2, parked=1, queued=4, paused=0, free_slots=1)
        assert (page.get("steps"), page.get("tokens")) == (2, 3)
        assert (page.get("active"), page.get("queued"), page.get("runnable")) == (2, 4, 3)
        assert sum(meter.counters.step_buckets) == 2
        assert len(meter.counters.step_buckets) == len(STEP_BUCKETS_S) + 1
        page.release()
