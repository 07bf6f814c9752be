"""From logits to token ids: on the host for the CPU, on the device for a GPU.

Both are the same pure function of (logits, parameters, seed, tokens so far) as in `sampling`, and
both give every row the same answer whatever the other rows are. They need not agree with each
other in the last bit: a stream never moves between a CPU and a GPU.

On CUDA only a few numbers travel: the greedy choice and a "finite" flag of each row; for sampled
rows sums over blocks of weights, then the one block that the draw fell into; the heads of sorted
rows for top-k and top-p. Each sum runs over all rows in one fixed shape, and in float64, because
how a device adds up depends on the shape.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engines.native.device import on_device
from engines.native.sampling import GREEDY_BELOW, draw, sample

__all__ = ["Choice", "DeviceChooser", "DeviceLogits", "HostLogits", "Logits", "summarise"]

Floats = npt.NDArray[np.float64]

_BLOCK: Final = 256
_HEAD: Final = 1024
"""Sorted candidates that travel for a row with top-k or top-p; more are fetched when needed."""


class Choice(NamedTuple):
    """What decides a row's next token, beside its logits. The default is greedy."""

    row: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    nth: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit wins."""
        return self.temperature < GREEDY_BELOW

    def is_cut(self, vocabulary: int) -> bool:
        """Whether only some of the tokens take part."""
        return 0 < self.top_k < vocabulary or self.top_p < 1.0


class Logits(Protocol):
    """Result of one step. Valid until the next step of the same model."""

    def choose(self, choices: Sequence[Choice]) -> list[int | None]:
        """The next token of each named row; None where the numbers are not finite."""

    def array(self) -> npt.NDArray[np.float32]:
        """All of it, on the host: `[rows, vocabulary]`."""


class HostLogits:
    """Logits in host memory."""

    def __init__(self, values: npt.NDArray[np.float32]) -> None:
        self._values = values

    def choose(self, choices: Sequence[Choice]) -> list[int | None]:
        """See `Logits`."""
        return [self._choose(one) for one in choices]

    def _choose(self, one: Choice) -> int | None:
        logits = self._values[one.row]
        if not np.isfinite(logits).all():
            return None
        return sample(
            logits,
            temperature=one.temperature,
            top_k=one.top_k,
            top_p=one.top_p,
            seed=one.seed,
            count=one.nth,
        )

    def array(self) -> npt.NDArray[np.float32]:
        """See `Logits`."""
        return self._values


def summarise(logits: torch.Tensor) -> torch.Tensor:
    """Per row the lowest id of the largest logit, and 1 if all are finite: int64 `[2, rows]`."""
    finite = torch.isfinite(logits).all(dim=-1)
    return torch.stack((logits.argmax(dim=-1), finite.to(torch.int64)))


class DeviceChooser:
    """Buffers for choosing from logits of one shape; used by one thread."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        blocks = -(-vocabulary // _BLOCK)
        self.device = device
        self._padding = blocks * _BLOCK - vocabulary
        self._row_numbers = on_device(torch.arange(rows), device)
        self._summary = torch.zeros(2, rows, dtype=torch.int64, pin_memory=pin)
        self._temperatures = torch.ones(rows, 1, dtype=torch.float64, pin_memory=pin)
        self._sums = torch.zeros(rows, blocks, dtype=torch.float64, pin_memory=pin)
        self._picked = torch.zeros(rows, dtype=torch.int64, pin_memory=pin)
        self._block = torch.zeros(rows, _BLOCK, dtype=torch.float64, pin_memory=pin)

    def choose(
        self, logits: torch.Tensor, summary: torch.Tensor, choices: Sequence[Choice]
    ) -> list[int | None]:
        """See `Logits.choose`."""
        self._summary.copy_(summary, non_blocking=True)
        sampled = [one for one in choices if not one.is_greedy]
        weights = self._weigh(logits, sampled) if sampled else None
        self._wait()
        found: dict[int, int | None] = {}
        greedy, finite = self._summary.tolist()
        for one in choices:
            found[one.row] = greedy[one.row] if finite[one.row] else None
        if weights is not None:
            good = [one for one in sampled if finite[one.row]]
            vocabulary = logits.shape[1]
            plain = [one for one in good if not one.is_cut(vocabulary)]
            cut = [one for one in good if one.is_cut(vocabulary)]
            if plain:
                found |= self._choose_plain(weights, plain)
            for one in cut:
                found[one.row] = self._choose_cut(logits[one.row], weights[one.row], one)
        return [found[one.row] for one in choices]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _weigh(self, logits: torch.Tensor, sampled: Sequence[Choice]) -> torch.Tensor:
        """Unnormalised probabilities of all rows, whole blocks, and their sums on the way here."""
        self._temperatures.fill_(1.0)
        for one in sampled:
            self._temperatures[one.row, 0] = one.temperature
        scaled = logits.to(torch.float64)
        scaled.div_(self._temperatures.to(self.device, non_blocking=True))
        scaled.sub_(scaled.amax(dim=-1, keepdim=True))
        weights = torch.nn.functional.pad(scaled.exp_(), (0, self._padding))
        sums = weights.view(weights.shape[0], -1, _BLOCK).sum(dim=-1)
        self._sums.copy_(sums, non_blocking=True)
        return weights

    def _choose_plain(self, weights: torch.Tensor, choices: Sequence[Choice]) -> dict[int, int]:
        """All tokens take part: find the block, fetch it, find the token."""
        targets: dict[int, float] = {}
        self._picked.zero_()
        for one in choices:
            cumulative = np.cumsum(self._sums[one.row].numpy())
            target = draw(one.seed, one.nth) * float(cumulative[-1])
            block = int(np.searchsorted(cumulative, target, side="right"))
            if block == cumulative.shape[0]:  # the draw was rounded up to the whole
                block = int(np.flatnonzero(self._sums[one.row].numpy())[-1])
            self._picked[one.row] = block
            targets[one.row] = target - (float(cumulative[block - 1]) if block else 0.0)
        picked = self._picked.to(self.device, non_blocking=True)
        blocks = weights.view(weights.shape[0], -1, _BLOCK)
        self._block.copy_(blocks[self._row_numbers, picked], non_blocking=True)
        self._wait()
        return {
            one.row: int(self._picked[one.row]) * _BLOCK
            + _place(self._block[one.row].numpy(), targets[one.row])
            for one in choices
        }

    def _choose_cut(self, logits: torch.Tensor, weights: torch.Tensor, one: Choice) -> int:
        """Top-k and top-p: sort, and look at the head of what comes."""
        order = torch.sort(logits, descending=True, stable=True).indices
        total = float(np.cumsum(self._sums[one.row].numpy())[-1])
        vocabulary = logits.shape[0]
        kept = one.top_k if 0 < one.top_k < vocabulary else vocabulary
        for length in (min(_HEAD, vocabulary), vocabulary):
            head = order[:length]
            candidates: Floats = weights[head].cpu().numpy()
            cumulative = np.cumsum(candidates[:kept])
            if kept <= length:
                total = float(cumulative[-1])
            is_enough = kept <= length or (
                kept == vocabulary and float(cumulative[-1]) >= one.top_p * total
            )
            if is_enough or length == vocabulary:
                break
        if one.top_p < 1.0:
            last = int(np.searchsorted(cumulative, one.top_p * total, side="left")) + 1
            cumulative = cumulative[:last]
        target = draw(one.seed, one.nth) * float(cumulative[-1])
        at = int(np.searchsorted(cumulative, target, side="right"))
        return int(head[min(at, cumulative.shape[0] - 1)])


def _place(block: Floats, target: float) -> int:
    """Where the draw falls in one block; rounding never leads to a token of weight zero."""
    at = int(np.searchsorted(np.cumsum(block), target, side="right"))
    if at < block.shape[0] and block[at] > 0.0:
        return at
    return int(np.flatnonzero(block)[-1])


class DeviceLogits:
    """Logits that stay on the device."""

    def __init__(
        self, values: torch.Tensor, chooser: DeviceChooser, summary: torch.Tensor | None = None
    ) -> None:
        """`summary` comes with the step where a graph computed it."""
        self._values = values
        self._chooser = chooser
        self._summary = summary

    def choose(self, choices: Sequence[Choice]) -> list[int | None]:
        """See `Logits`."""
        summary = self._summary if self._summary is not None else summarise(self._values)
        return self._chooser.choose(self._values, summary, choices)

    def array(self) -> npt.NDArray[np.float32]:
        """See `Logits`."""
        found: npt.NDArray[np.float32] = self._values.cpu().numpy()
        return found
