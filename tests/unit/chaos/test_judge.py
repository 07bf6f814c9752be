"""The judge of streams finds every kind of damage, and measures gaps from the fault."""

import pytest

from chaos.judge import Spread, check_streams, interruptions, percentile
from chaos.streams import BrokenStreamError, StreamRecord, make_requests

MS = 1_000_000


def finished(texts: list[str], arrivals_ms: list[float] | None = None) -> StreamRecord:
    """A stream that came through: one token a chunk."""
    request = make_requests(1, max_tokens=len(texts))[0]
    moments = arrivals_ms or list(range(len(texts)))
    return StreamRecord(
        request,
        arrivals_ns=[round(moment * MS) for moment in moments],
        texts=texts,
        finish_reason="length",
        completion_tokens=len(texts),
        has_end_mark=True,
    )


def test_an_undamaged_stream_passes() -> None:
    record = finished(["a", "b", "c"])
    check_streams([record], {record.request.name: "abc"})


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["a", "c"], "text differs at character 1"),  # lost
        (["a", "b", "b", "c"], "text differs at character 2"),  # repeated
        (["b", "a", "c"], "text differs at character 0"),  # reordered
    ],
)
def test_a_lost_repeated_or_reordered_token_is_found(texts: list[str], sentence: str) -> None:
    record = finished(texts)
    with pytest.raises(BrokenStreamError, match=sentence):
        check_streams([record], {record.request.name: "abc"})


def test_a_stream_without_its_end_is_found() -> None:
    record = finished(["a"])
    record.has_end_mark = False
    with pytest.raises(BrokenStreamError, match="without"):
        check_streams([record], {record.request.name: "a"})


def test_a_silent_end_and_an_error_event_are_found() -> None:
    silent, failed = finished(["a"]), finished(["a"])
    silent.finish_reason = None
    failed.error = '{"code": "engine_failed"}'
    texts = {silent.request.name: "a"}
    with pytest.raises(BrokenStreamError, match="finish_reason is None"):
        check_streams([silent], texts)
    with pytest.raises(BrokenStreamError, match="engine_failed"):
        check_streams([failed], texts)


def test_a_chunk_under_way_at_the_kill_is_not_the_next_token() -> None:
    record = finished(["a"] * 5, [0, 10, 20.5, 80, 90])  # killed at 20: 20.5 was under way
    (felt,) = interruptions([record], 20 * MS)
    assert felt.next_token_ms == pytest.approx(60)
    assert felt.gap_ms == pytest.approx(59.5)


def test_a_longer_gap_a_little_later_is_felt_but_does_not_move_the_next_token() -> None:
    record = finished(["a"] * 6, [0, 20, 60, 80, 150, 160])  # killed at 21; 80 to 150: a start
    (felt,) = interruptions([record], 21 * MS)
    assert felt.next_token_ms == pytest.approx(39)
    assert felt.gap_ms == pytest.approx(70)


def test_streams_that_had_ended_or_not_begun_are_no_witnesses() -> None:
    ended = finished(["a"] * 2, [0, 10])
    late = finished(["a"] * 2, [500, 510])
    assert interruptions([ended, late], 100 * MS) == []


def test_a_pause_long_after_the_fault_is_not_blamed_on_it() -> None:
    record = finished(["a"] * 4, [0, 30, 700, 2000])
    (felt,) = interruptions([record], 20 * MS)
    assert felt.next_token_ms == pytest.approx(680)


def test_percentiles_are_values_of_the_sample() -> None:
    values = [float(v) for v in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99)) == (50, 99)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(3, 2.0, 3.0, 3.0)
    assert Spread.of([]).count == 0
