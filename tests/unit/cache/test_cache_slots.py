"""The slot table: what a reader may rely on, whatever instruction the writer dies at."""

import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import SlotTableError, StaleEpochError
from cache.mapping import Mapping, round_to_page
from cache.slots import MAX_PARAMS_BYTES, SlotRecord, SlotState, SlotTable

SLOTS, MAX_LENGTH = 3, 24
ROOT = Path(__file__).parents[3]


def new_buffer(slots: int = SLOTS, max_length: int = MAX_LENGTH) -> memoryview:
    buffer = memoryview(bytearray(SlotTable.size_bytes(slots, max_length)))
    SlotTable.format(buffer, slots, max_length)
    return buffer


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(new_buffer())


class TableAgainstModel(RuleBasedStateMachine):
    """Any sequence of legal steps, compared with a plain dictionary after each one."""

    def __init__(self) -> None:
        super().__init__()
        buffer = new_buffer()
        self.writer, self.reader = SlotTable(buffer), SlotTable(buffer.toreadonly())
        self.buffer = buffer
        self.model: dict[int, tuple[bytes, list[int], bytes, list[int], bool]] = {}
        self.generations = dict.fromkeys(range(SLOTS), 0)

    @rule(
        slot=st.integers(0, SLOTS - 1),
        request_id=st.binary(min_size=16, max_size=16),
        prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=MAX_LENGTH),
        params=st.binary(max_size=200),
    )
    def begin(self, slot: int, request_id: bytes, prompt: list[int], params: bytes) -> None:
        if slot in self.model:
            with pytest.raises(SlotTableError):
                self.writer.begin(slot, request_id, prompt, params, 64)
            return
        self.writer.begin(slot, request_id, prompt, params, 64)
        self.model[slot] = (request_id, prompt, params, [], False)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), token=st.integers(0, 2**32 - 1))
    def append(self, data: st.DataObject, token: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        _, prompt, _, tokens, _ = self.model[slot]
        if len(prompt) + len(tokens) == MAX_LENGTH:
            with pytest.raises(SlotTableError, match="full"):
                self.writer.append(slot, token)
            return
        tokens.append(token)
        assert self.writer.append(slot, token) == len(tokens)

    @precondition(lambda self: any(m[3] for m in self.model.values()))
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(s for s, m in self.model.items() if m[3])))
        self.writer.activate(slot)
        self.model[slot] = (*self.model[slot][:4], True)

    @rule(slot=st.integers(0, SLOTS - 1))
    def free(self, slot: int) -> None:
        self.writer.free(slot)
        if self.model.pop(slot, None) is not None:
            self.generations[slot] += 1

    @invariant()
    def reader_sees_the_model(self) -> None:
        for slot in range(SLOTS):
            record = self.reader.read(slot)
            assert record.generation == self.generations[slot]
            if slot not in self.model:
                assert record == SlotRecord(
                    slot, SlotState.FREE, self.generations[slot], bytes(16), [], b"", 0, []
                )
                continue
            request_id, prompt, params, tokens, is_active = self.model[slot]
            expected = SlotState.ACTIVE if is_active else SlotState.PREFILL
            assert record.state is expected
            assert (record.request_id, record.prompt_ids) == (request_id, prompt)
            assert (record.params, record.token_ids) == (params, tokens)
        active = [slot for slot, model in sorted(self.model.items()) if model[4]]
        assert [record.slot for record in self.reader.active()] == active

    @invariant()
    def an_empty_table_holds_no_text(self) -> None:
        if not self.model:
            assert not any(words_besides_generation(self.buffer))


TestTableAgainstModel = TableAgainstModel.TestCase
TestTableAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def words_besides_generation(buffer: memoryview) -> bytes:
    """All bytes behind the header, with each slot's commit word blanked."""
    data = bytearray(buffer)
    size = SlotTable.size_bytes(SLOTS, MAX_LENGTH)
    stride = (size - 4096) // SLOTS
    for slot in range(SLOTS):
        at = 4096 + slot * stride + 8
        data[at : at + 8] = bytes(8)
    return bytes(data[4096:size])


def test_activating_before_the_first_token_is_refused(table: SlotTable) -> None:
    table.begin(0, bytes(16), [1], b"", 64)
    with pytest.raises(SlotTableError, match="no committed token"):
        table.activate(0)


@pytest.mark.parametrize(
    ("request_id", "prompt", "params"),
    [
        (b"short", [1], b""),
        (bytes(16), [], b""),
        (bytes(16), [1] * (MAX_LENGTH + 1), b""),
        (bytes(16), [1], b"x" * (MAX_PARAMS_BYTES + 1)),
    ],
)
def test_fields_out_of_bounds_leave_the_slot_untouched(
    table: SlotTable, request_id: bytes, prompt: list[int], params: bytes
) -> None:
    with pytest.raises(SlotTableError):
        table.begin(1, request_id, prompt, params, 64)
    assert table.read(1).state is SlotState.FREE


def test_a_token_id_that_is_no_32_bit_number_leaves_the_slot_clean(table: SlotTable) -> None:
    with pytest.raises(OverflowError):
        table.begin(1, bytes(16), [1, 2**32], b"{}", 64)
    table.begin(1, b"r" * 16, [1, 2], b"{}", 64)
    assert table.read(1).prompt_ids == [1, 2]


def test_slots_that_do_not_exist_are_refused(table: SlotTable) -> None:
    for slot in (-1, SLOTS):
        with pytest.raises(SlotTableError, match="no slot"):
            table.read(slot)


def test_a_writer_with_an_older_epoch_is_refused(table: SlotTable) -> None:
    table.claim(4)
    table.claim(4)  # the same writer again
    with pytest.raises(StaleEpochError):
        table.claim(3)
    assert table.epoch == 4


def test_writers_are_named_until_they_resign_or_are_struck_out(table: SlotTable) -> None:
    assert table.writers == []
    first, second, third = (11, 100), (22, 200), (33, 300)
    table.claim(1, first)
    table.claim(2)  # a new epoch of the same writer
    assert table.writers == [first]
    table.claim(3, second)
    table.claim(4, third)
    assert table.writers == [third, first, second]
    table.resign()  # of its own work alone
    assert table.writers == [first, second]
    table.strike(first)
    table.strike((22, 999))  # the same number, another process
    assert table.writers == [second]
    table.claim(5, third)
    table.claim(6, second)  # again the writer, and still named as an earlier one
    table.strike(second)
    assert table.writers == [second, third]


def test_of_many_unfinished_writers_the_newest_are_kept(table: SlotTable) -> None:
    for number in range(1, 41):
        table.claim(number, (number, number))
    assert table.writers[0] == (40, 40)
    assert sorted(table.writers) == [(number, number) for number in range(24, 41)]


def test_memory_that_is_no_table_is_refused() -> None:
    size = SlotTable.size_bytes(SLOTS, MAX_LENGTH)
    with pytest.raises(SlotTableError, match="not a slot table"):
        SlotTable(memoryview(bytearray(size)))
    with pytest.raises(SlotTableError, match="too small"):
        SlotTable(memoryview(bytearray(100)))
    with pytest.raises(SlotTableError, match="claims"):
        SlotTable(new_buffer()[: size - 64])


@given(noise=st.binary(min_size=40, max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_header_of_noise_is_refused_or_harmless(noise: bytes) -> None:
    buffer = new_buffer()
    buffer[16:40] = noise[16:40]  # numbers and epoch; magic and version stay
    try:
        opened = SlotTable(buffer)
    except SlotTableError:
        return
    assert SlotTable.size_bytes(opened.slots, opened.max_length) <= len(buffer)


@given(word=st.integers(0, 5), value=st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_a_record_of_noise_raises_one_typed_error_at_most(word: int, value: int) -> None:
    buffer = new_buffer()
    buffer.cast("Q")[4096 // 8 + word] = value
    opened = SlotTable(buffer)
    try:
        record = opened.read(0)
    except SlotTableError:
        return
    assert len(record.prompt_ids) + len(record.token_ids) <= MAX_LENGTH


def test_a_slot_cut_short_while_it_was_begun_is_wiped_by_the_next_writer() -> None:
    buffer = new_buffer()
    table = SlotTable(buffer)
    table.begin(0, b"q" * 16, [7, 8, 9], b"secret", 64)
    words = buffer.cast("Q")
    words[4096 // 8] = SlotState.FREE  # as if the writer had died before it published PREFILL
    SlotTable(buffer).claim(1)
    assert not any(words_besides_generation(buffer))


# ------------------------------------------------------------ a real writer, killed

WRITER = """
import os, sys, signal
from cache.mapping import Mapping
from cache.slots import SlotTable

fd, size, seed = int(sys.argv[1]), int(sys.argv[2]), 0
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by themselves
mapping = Mapping([fd], [size], writable=True)
for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    table = SlotTable(mapping.view())
    table.claim(int(line))
    number = 0
    while True:
        for slot in range(table.slots):
            number += 1
            key = number.to_bytes(8, "big") * 2
            table.begin(slot, key, [number + i for i in range(5)], str(number).encode(), 64)
            for n in range(12):
                table.append(slot, number * 100 + n)
                if n == 0:
                    table.activate(slot)
            if number % 3:
                table.free(slot)
        for slot in range(table.slots):
            table.free(slot)
"""


@pytest.fixture
def shared() -> Iterator[tuple[int, Mapping]]:
    size = round_to_page(SlotTable.size_bytes(SLOTS, MAX_LENGTH))
    fd = os.memfd_create("slots-under-test")
    os.ftruncate(fd, size)
    mapping = Mapping([fd], [size], writable=True)
    SlotTable.format(mapping.view(), SLOTS, MAX_LENGTH)
    yield fd, mapping
    mapping.close()
    os.close(fd)


def test_a_writer_killed_a_hundred_times_always_leaves_a_consistent_prefix(
    shared: tuple[int, Mapping],
) -> None:
    fd, mapping = shared
    size = mapping.size_bytes
    draw = random.Random(20261129)
    seen: dict[str, int] = dict.fromkeys(["FREE", "PREFILL", "ACTIVE", "partial", "dirty"], 0)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(fd), str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd], cwd=ROOT,
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        for epoch in range(1, 101):
            table = SlotTable(mapping.view())
            print(epoch, file=server.stdin, flush=True)
            pid = int(server.stdout.readline())
            kill_after_it_wrote(pid, table, epoch, draw)
            check_table(table, seen)
            table.claim(epoch)
            for slot in range(SLOTS):
                table.free(slot)
            assert not any(words_besides_generation(mapping.view()))
        server.stdin.close()
    assert seen["ACTIVE"] > 20, seen
    assert seen["FREE"] > 20, seen
    assert seen["partial"] > 5, seen


def kill_after_it_wrote(pid: int, table: SlotTable, epoch: int, draw: random.Random) -> None:
    """Kill at a random moment once it is writing, and wait until it is dead."""
    pidfd = os.pidfd_open(pid)
    try:
        deadline = time.monotonic() + 10
        while table.epoch != epoch:
            assert time.monotonic() < deadline, "the writer never started"
        until = time.monotonic() + draw.uniform(0, 0.002)
        while time.monotonic() < until:
            pass
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], 10)[0], "the writer does not die"
    finally:
        os.close(pidfd)


def check_table(table: SlotTable, seen: dict[str, int]) -> None:
    for slot in range(SLOTS):
        record = table.read(slot)
        seen[record.state.name] += 1
        if record.state is SlotState.FREE:
            continue
        number = int.from_bytes(record.request_id[:8], "big")
        assert record.request_id == number.to_bytes(8, "big") * 2
        assert record.prompt_ids == [number + i for i in range(5)]
        assert json.loads(record.params) == number
        assert record.chunk_tokens == 64
        assert record.token_ids == [number * 100 + n for n in range(len(record.token_ids))]
        assert len(record.token_ids) <= 12
        seen["partial"] += 0 < len(record.token_ids) < 12
        if record.state is SlotState.ACTIVE:
            assert record.token_ids


def test_reading_works_over_memory_that_is_mapped_read_only() -> None:
    buffer = new_buffer()
    SlotTable(buffer).begin(0, bytes(16), [1], b"", 64)
    with mmap.mmap(-1, len(buffer)) as area:
        area[:] = bytes(buffer)
        reader = SlotTable(memoryview(area).toreadonly())
        assert reader.read(0).prompt_ids == [1]
        with pytest.raises(TypeError):
            reader.append(0, 1)
        reader.release()
