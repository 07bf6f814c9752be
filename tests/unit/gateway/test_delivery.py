"""The record of what a client has got, against every order of frames and cuts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.contract import Accepted, Delta, End, Resume, Usage
from supervisor.gateway.delivery import Delivery, Emit, Started
from supervisor.gateway.errors import StreamViolationError

END = End("stop", Usage(2, 3))


def accepted(epoch: int = 1, prompt_ids: list[int] | None = None) -> Accepted:
    return Accepted([1, 2] if prompt_ids is None else prompt_ids, epoch, "fresh", exact=True)


def begun(epoch: int = 1) -> Delivery:
    delivery = Delivery()
    delivery.begin(epoch)
    assert delivery.take(accepted(epoch)) == Started("fresh", resumed=False)
    return delivery


def test_text_flows_in_order_to_the_end() -> None:
    delivery = begun()

    assert delivery.take(Delta(0, [7], "he", 2)) == Emit("he", 1)
    assert delivery.take(Delta(1, [8, 9], "llo", 5)) == Emit("llo", 2)
    assert delivery.take(END) == END


def test_without_an_accepting_engine_there_is_nothing_to_resume() -> None:
    delivery = Delivery()
    delivery.begin(1)

    assert delivery.resume() is None
    assert not delivery.was_accepted


def test_resume_names_all_delivered_tokens_and_characters() -> None:
    delivery = begun()
    delivery.take(Delta(0, [7], "hé☃", 3))
    delivery.take(Delta(1, [8], "", 3))

    assert delivery.resume() == Resume([1, 2], [7, 8], 3)


def test_an_accepted_stream_without_tokens_is_resumed_from_its_prompt() -> None:
    assert begun().resume() == Resume([1, 2], [], 0)


def test_an_engine_need_not_repeat_the_prompt_that_a_resume_named() -> None:
    delivery = begun()
    delivery.take(Delta(0, [7], "he", 2))
    delivery.begin(2)

    assert delivery.take(Accepted([], 2, "slot", exact=True)) == Started("slot", resumed=True)
    assert delivery.resume() == Resume([1, 2], [7], 2)


def test_characters_are_code_points_not_bytes_or_utf16_units() -> None:
    delivery = begun()

    delivery.take(Delta(0, [7], "😀é", 2))

    assert delivery.chars == 2


def test_text_without_tokens_is_taken() -> None:
    delivery = begun()
    delivery.take(Delta(0, [7], "", 0))

    assert delivery.take(Delta(1, [], "held", 4)) == Emit("held", 0)


@pytest.mark.parametrize(
    "frame",
    [
        Delta(1, [8], "b", 2),  # a repeated token
        Delta(3, [8], "b", 3),  # a lost token
        Delta(2, [8], "b", 2),  # repeated text
        Delta(2, [8], "b", 4),  # lost text
        Delta(0, [6, 7], "aa", 2),  # an older frame as a whole
        accepted(),  # a second acceptance
    ],
)
def test_a_wrong_frame_is_refused_and_changes_nothing(frame: Delta | Accepted) -> None:
    delivery = begun()
    delivery.take(Delta(0, [6, 7], "aa", 2))
    before = delivery.resume()

    with pytest.raises(StreamViolationError):
        delivery.take(frame)

    assert delivery.resume() == before
    assert delivery.take(Delta(2, [8], "b", 3)) == Emit("b", 1)


@pytest.mark.parametrize("frame", [Delta(0, [7], "a", 1), END])
def test_nothing_counts_before_acceptance(frame: Delta | End) -> None:
    delivery = Delivery()
    delivery.begin(1)

    with pytest.raises(StreamViolationError):
        delivery.take(frame)


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_an_engine_of_another_epoch_is_refused(epoch: int) -> None:
    delivery = begun()
    delivery.begin(2)

    with pytest.raises(StreamViolationError):
        delivery.take(accepted(epoch))

    assert not delivery.is_accepted


def test_an_engine_that_resumes_another_prompt_is_refused() -> None:
    delivery = begun()
    delivery.begin(2)

    with pytest.raises(StreamViolationError):
        delivery.take(accepted(2, [1, 3]))


def test_frames_behind_the_end_are_refused() -> None:
    delivery = begun()
    delivery.take(END)

    with pytest.raises(StreamViolationError):
        delivery.take(Delta(0, [7], "a", 1))


class PureEngine:
    """Sends frames as the contract says, cut at will; text is a function of the ids alone."""

    def __init__(self, pieces: list[str], hold: list[bool]) -> None:
        self.pieces = pieces
        self.hold = hold

    def visible(self, tokens: int) -> str:
        """Some tokens hold their text back until the next one (or the end)."""
        shown = tokens
        while 0 < shown < len(self.pieces) and self.hold[shown - 1]:
            shown -= 1
        return "".join(self.pieces[:shown])

    def frames(
        self, resume: Resume | None, epoch: int, steps: list[int]
    ) -> list[Accepted | Delta | End]:
        frames: list[Accepted | Delta | End] = [accepted(epoch)]
        index = 0 if resume is None else len(resume.token_ids)
        chars = 0 if resume is None else resume.chars
        turn = 0
        while index < len(self.pieces):
            count = min(steps[turn % len(steps)], len(self.pieces) - index)
            turn += 1
            text = self.visible(index + count)[chars:]
            chars += len(text)
            frames.append(Delta(index, list(range(index, index + count)), text, chars))
            index += count
        tail = "".join(self.pieces)[chars:]
        if tail:
            frames.append(Delta(index, [], tail, chars + len(tail)))
        return [*frames, END]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(max_size=4), min_size=1, max_size=30),
    data=st.data(),
)
def test_random_cuts_never_lose_or_repeat_text(pieces: list[str], data: st.DataObject) -> None:
    """Given cuts anywhere and rubbish in between, the client's text is exact."""
    hold = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    engine = PureEngine(pieces, hold)
    delivery = Delivery()
    emitted: list[str] = []
    ids: list[int] = []
    ended = False
    epoch = 0
    while not ended:
        epoch += 1
        assert epoch < 200
        delivery.begin(epoch)
        steps = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        frames = engine.frames(delivery.resume(), epoch, steps)
        cut = len(frames) if epoch > 6 else data.draw(st.integers(0, len(frames)))
        duplicate = data.draw(st.none() | st.integers(0, len(frames) - 1))
        for number, frame in enumerate(frames[:cut]):
            step = delivery.take(frame)
            if isinstance(step, Emit):
                emitted.append(step.text)
                assert isinstance(frame, Delta)
                ids += frame.token_ids
            ended = isinstance(step, End)
            is_repeatable = isinstance(frame, Accepted) or (
                isinstance(frame, Delta) and (frame.token_ids or frame.text)
            )
            if number == duplicate and is_repeatable:
                with pytest.raises(StreamViolationError):
                    delivery.take(frame)
                break

    assert "".join(emitted) == "".join(pieces)
    assert ids == list(range(len(pieces)))
    assert delivery.chars == len("".join(pieces))
