"""The model: `transformers` code, parameters in the weight arena, keys and values in slots.

`decode` always runs all slots, one token each. `prefill` runs one slot and one chunk of tokens,
padded. These two shapes are the only ones that ever reach a matrix product, because bits of a
row change with the shape (measured: `linear` differs between 1 and 16 rows).

On a GPU both are captured as graphs: the decode step, which reads just what each row needs,
before the engine is ready; prefill chunks, one graph for each attended length, when it has nothing
to do (`capture_next`). Until then a chunk runs eagerly, to the same bits.

Invariants
    1. On the CPU the attended length of a decode step comes from `lengths`, a set the self-check
       proved bit-equal. That of a prefill chunk depends on the request's own position alone.
    2. Everything a step reads from the host lies in two input buffers, uploaded before it.

WARNING: one thread at a time, and only inside `torch.inference_mode`.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

import torch

from cache.protocol import KvGeometry
from engines.native.attention import RowPasts, SlotWindow, StepInputs
from engines.native.binding import bind, kinds_of_layers
from engines.native.device import HOST, Device, DeviceFault, InputBuffer, on_device
from engines.native.experts import ExpertsMode, experts_mode
from engines.native.graphs import StepAbandonedError, StepGraphs, StepKind
from engines.native.kv import KvMemoryView
from engines.native.logits import Choice, DeviceChooser, DeviceLogits, HostLogits, Logits
from engines.native.skeleton import Skeleton

__all__ = ["SlotModel", "attended_lengths"]

_FIRST_LENGTH: Final = 128
_HIDDEN_FROM_CUDNN: Final = -65504.0
"""Added to the score of a token that a row must not see. cuDNN makes NaN from -infinity in some
shapes; beside any real score this one gives a weight of exactly zero, too."""

_EVERY_CHOICE: Final = (
    Choice(0),
    Choice(0, temperature=1.0),
    Choice(0, temperature=1.0, top_k=5, top_p=0.5),
)

_TOO_MUCH_BYTES: Final = 1 << 50  # more than any machine has

# Rows of the decode input buffer, and words behind the ids of the prefill one.
_IDS, _POSITIONS, _ACTIVE = range(3)
_START, _COUNT, _SLOT = range(3)
_WORDS: Final = 3


def attended_lengths(max_length: int) -> tuple[int, ...]:
    """Candidates for the attended length: 128, then powers of two and their halves between."""
    lengths: list[int] = []
    step = _FIRST_LENGTH
    while step < max_length:
        lengths.append(step)
        if step >= 2 * _FIRST_LENGTH and step * 3 // 2 < max_length:
            lengths.append(step * 3 // 2)
        step *= 2
    return (*lengths, max_length)


class SlotModel:
    """A model over slots. Built in the engine, from a skeleton and an arena."""

    def __init__(
        self,
        skeleton: Skeleton,
        tensors: Mapping[str, torch.Tensor],
        geometry: KvGeometry,
        device: Device = HOST,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.chunk_tokens = device.chunk_tokens
        self.lengths: tuple[int, ...] = (geometry.max_length,)
        self.vocabulary_size = int(skeleton.config.vocab_size)
        self.decode_experts: ExpertsMode = "grouped" if device.is_cuda else "dense"
        self._model = skeleton.model
        began_s = time.perf_counter()
        bind(self._model, tensors, device.torch_device)
        self.bind_ms = (time.perf_counter() - began_s) * 1e3
        slots = geometry.slots
        where = device.torch_device
        self._inputs = InputBuffer(device, (_WORDS, slots))
        self._chunk = InputBuffer(device, (self.chunk_tokens + _WORDS,))
        self._all_positions = on_device(torch.arange(geometry.max_length), where)
        self._chunk_offsets = on_device(torch.arange(self.chunk_tokens), where)
        dtype = getattr(torch, geometry.dtype)
        hidden = _HIDDEN_FROM_CUDNN if device.is_cuda else float("-inf")
        self._zero = on_device(torch.tensor(0.0, dtype=dtype), where)
        self._hidden = on_device(torch.tensor(hidden, dtype=dtype), where)
        self._graphs: StepGraphs | None = None
        self._before_layer: Callable[[], None] | None = None
        if device.is_cuda:
            from engines.native.decode_attention import DecodeAttention

            heads = int(skeleton.config.num_attention_heads)
            self._kernel = DecodeAttention(geometry, heads, where)
            self._graphs = StepGraphs(slots, self.vocabulary_size, where)
            self._choosers = {
                "decode": DeviceChooser(slots, self.vocabulary_size, where),
                "prefill": DeviceChooser(1, self.vocabulary_size, where),
            }

    @property
    def has_experts(self) -> bool:
        """Whether rows of a step share matrix products of a size that depends on routing."""
        return bool(getattr(self._model.config, "num_experts", 0))

    @contextmanager
    def sample_layers(self, of_each_kind: int) -> Iterator[None]:
        """Run only so many layers of each kind in this block."""
        inner = self._model.model
        layers = inner.layers
        seen: Counter[int] = Counter()
        chosen = torch.nn.ModuleList()
        for number, kind in enumerate(kinds_of_layers(self._model)):
            seen[kind] += 1
            if seen[kind] <= of_each_kind:
                chosen.append(layers[number])
        inner.layers = chosen
        try:
            yield
        finally:
            inner.layers = layers

    # ------------------------------------------------------------------- steps

    def decode(
        self,
        kv: KvMemoryView,
        tokens: Sequence[tuple[int, int, int]],
        *,
        attended_tokens: int | None = None,
    ) -> Logits:
        """One token for each (slot, token id, position); logits of all slots.

        Rows of slots that are not named run too, write to the tail and mean nothing.
        `attended_tokens` overrides the choice of length (the self-check).
        """
        inputs = self._inputs.host
        inputs.fill(0)
        longest = 0
        for slot, token_id, position in tokens:
            inputs[:, slot] = (token_id, position, 1)
            longest = max(longest, position)
        self._inputs.upload()
        attended = attended_tokens or kv.geometry.max_length
        if attended_tokens is None and not self.device.is_cuda:
            attended = self.lengths[bisect_left(self.lengths, longest + 1)]
        return self._run("decode", kv, attended, lambda: self._decode(kv, attended))

    def prefill(self, kv: KvMemoryView, slot: int, ids: Sequence[int], *, start: int) -> Logits:
        """At most `chunk_tokens` prompt tokens from position `start` on; logits of the last."""
        count, chunk = len(ids), self.chunk_tokens
        host = self._chunk.host
        host[:count] = ids
        host[count:chunk] = 0
        host[chunk:] = (start, count, slot)
        self._chunk.upload()
        full = kv.geometry.max_length
        needed = min(start + chunk, full)
        if self.device.is_cuda:  # few lengths: each costs an attention plan and a graph
            lengths = attended_lengths(full)
            attended = lengths[bisect_left(lengths, needed)]
        else:
            attended = min(-(-(start + chunk) // _FIRST_LENGTH) * _FIRST_LENGTH, full)
        return self._run("prefill", kv, attended, lambda: self._prefill(kv, attended))

    def _run(
        self, kind: StepKind, kv: KvMemoryView, attended: int, eager: Callable[[], torch.Tensor]
    ) -> Logits:
        if self._graphs is None:
            return HostLogits(eager().numpy())
        chooser = self._choosers[kind]
        if self._graphs.has(kind, kv, attended):
            logits, summary = self._graphs.replay(kind, kv, attended)
            return DeviceLogits(logits, chooser, summary)
        return DeviceLogits(eager(), chooser)

    # ------------------------------------------------------------------ graphs

    @contextmanager
    def giving_way(self, *, once: Callable[[], bool]) -> Iterator[None]:
        """In this block a step is given up between two layers, silently, `once` that holds.

        A step that is captured already runs to its end: it is one launch.
        """

        def give_way() -> None:
            if once():
                raise StepAbandonedError

        self._before_layer = give_way
        try:
            with suppress(StepAbandonedError):
                yield
        finally:
            self._before_layer = None

    def capture_next(self, kv: KvMemoryView) -> bool:
        """Capture one more step, the most useful first; False when there is none left."""
        if self._graphs is None:
            return False
        full = kv.geometry.max_length
        return self.capture_once("decode", kv, full) or any(
            self.capture_once("prefill", kv, length) for length in attended_lengths(full)
        )

    def capture_once(self, kind: StepKind, kv: KvMemoryView, attended: int) -> bool:
        """Capture one step, with no row active; False when it is captured already."""
        if self._graphs is None or self._graphs.has(kind, kv, attended):
            return False
        self._inputs.host.fill(0)
        self._inputs.upload()
        self._chunk.host.fill(0)
        self._chunk.upload()

        def step() -> torch.Tensor:
            if kind == "decode":
                return self._decode(kv, attended)
            return self._prefill(kv, attended)

        def rehearse() -> None:
            with self.sample_layers(1):
                step()

        self._graphs.capture(kind, kv, attended, rehearse=rehearse, step=step)
        return True

    def try_layer(self, kv: KvMemoryView) -> None:
        """Compute a layer of each kind with no row active, on a GPU: it loads kernels."""
        if self._graphs is None:
            return
        with self.sample_layers(1):
            self.decode(kv, [])
        self.device.synchronize()

    def launch_once(self, kv: KvMemoryView) -> bool:
        """Run the serving step's graph with no row active; False when it has run already.

        The driver puts a graph on the card when it is first launched, and says then if it cannot.
        Legal on memory that may only be read.
        """
        full = kv.geometry.max_length
        if self._graphs is None or not self._graphs.waits_for_launch("decode", kv, full):
            return False
        self.decode(kv, [])
        self.device.synchronize()
        return True

    def fail_on_purpose(self, action: DeviceFault) -> NoReturn:
        """Only for chaos tests, see `faults`. The process may end in here.

        Raises:
            RuntimeError, IndexError: the error that was ordered.
        """
        if action == "device_write":
            self._model.lm_head.weight.zero_()
        elif action == "device_memory":
            torch.empty(_TOO_MUCH_BYTES, dtype=torch.uint8, device=self.device.torch_device)
        else:
            self.device.fail_on_purpose()
        self.device.synchronize()
        raise RuntimeError(f"{action} was ordered, and nothing failed")

    def try_choices(self) -> None:
        """Choose in every way that there is, on a GPU, from logits of nothing.

        First uses load kernels, tens of milliseconds that no stream should wait for after a
        promotion. No step is computed for it: beside a busy engine one takes twice its time.
        """
        if self._graphs is None:
            return
        logits = DeviceLogits(self._graphs.logits("decode"), self._choosers["decode"])
        slots = self.geometry.slots
        logits.choose([c._replace(row=i % slots) for i, c in enumerate(_EVERY_CHOICE)])

    # --------------------------------------------------------------- computing

    def _mask(self, positions: torch.Tensor, attended: int) -> torch.Tensor:
        """What each position may see: `[positions, attended]`, to be added to the scores."""
        visible = self._all_positions[:attended] <= positions[:, None]
        return torch.where(visible, self._zero, self._hidden)

    def _decode(self, kv: KvMemoryView, attended: int) -> torch.Tensor:
        ids, positions, active = self._inputs.tensor
        attends: SlotWindow | RowPasts
        if self.device.is_cuda:
            attends = RowPasts(positions, self._kernel)
        else:
            mask = self._mask(positions, attended)[:, None, None, :]
            attends = SlotWindow(None, attended, mask)
        rows = kv.decode_rows(positions, active != 0)
        step = StepInputs(kv, rows, attends, self._before_layer)
        with experts_mode(self.decode_experts):
            return self._forward(ids[:, None], positions[:, None], step)[:, 0]

    def _prefill(self, kv: KvMemoryView, attended: int) -> torch.Tensor:
        chunk = self.chunk_tokens
        ids, words = self._chunk.tensor[:chunk], self._chunk.tensor[chunk:]
        start, count, slot = words[_START], words[_COUNT], words[_SLOT:]
        positions = start + self._chunk_offsets
        attends = SlotWindow(
            slot if self.device.is_cuda else int(slot),
            attended,
            self._mask(positions, attended)[None, None],
        )
        step = StepInputs(kv, kv.chunk_rows(slot, start, count), attends, self._before_layer)
        # Padding behind the last slot position would index the rotary table out of range.
        positions = positions.clamp(max=kv.geometry.max_length - 1)[None]
        last = (words[_COUNT : _COUNT + 1] - 1).clamp(min=0)
        with experts_mode("grouped" if self.device.is_cuda else "dense"):
            return self._forward(ids[None], positions, step, keep=last)[0]

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepInputs,
        *,
        keep: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        out: torch.Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            understudy_step=step,
        ).logits
        return out.to(torch.float32)
