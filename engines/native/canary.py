"""The canary: a known prompt through the real weights, on a few tokens of private memory.

One prefill chunk and one decode step of the full batch, greedy. It proves that weights, kernels
and the model thread work, whatever the role: it touches neither KV arena nor slot table.

On a GPU all layers share the memory of one, or the canary of a large model would cost hundreds of
megabytes. Its decode step then attends to what the last layer wrote: not what the model would
say, but the same for every engine, which is all that a known answer needs.
"""

import time
from collections.abc import Iterator
from typing import Final

import msgspec

from engines.contract import CanaryResult
from engines.native.errors import EngineError
from engines.native.kv import KvMemoryView
from engines.native.logits import Choice, Logits
from engines.native.model import SlotModel

__all__ = ["Canary", "CanaryFailedError"]

_PROMPT_TOKENS: Final = 12
_LENGTH_TOKENS: Final = 128


class CanaryFailedError(EngineError):
    """The model computed something that is not a number."""

    code = "canary_failed"


class Canary:
    """Runs in the model thread, one piece between two steps of serving."""

    def __init__(self, model: SlotModel) -> None:
        self._model = model
        self._length = min(_LENGTH_TOKENS, model.geometry.max_length)
        geometry = msgspec.structs.replace(model.geometry, max_length=self._length)
        device = model.device
        self._kv = KvMemoryView.private(geometry, device=device, layers_share_rows=device.is_cuda)
        count = min(_PROMPT_TOKENS, self._length - 1)
        self._prompt = [(7919 * i + 13) % model.vocabulary_size for i in range(1, count + 1)]

    def pieces(self) -> Iterator[CanaryResult | None]:
        """Work in two pieces; the second gives the result. Orders are heard in between.

        Raises:
            CanaryFailedError: the logits are not finite.
        """
        started = time.perf_counter()
        first = self._best(self._model.prefill(self._kv, 0, self._prompt, start=0))
        yield None
        logits = self._model.decode(
            self._kv, [(0, first, len(self._prompt))], attended_tokens=self._length
        )
        second = self._best(logits)
        duration_ms = (time.perf_counter() - started) * 1e3
        yield CanaryResult([first, second], duration_ms, time.monotonic_ns())

    def capture(self) -> bool:
        """Capture one of the canary's two steps as a graph; False when both are."""
        if not self._model.device.is_cuda:
            return False
        for kind in ("prefill", "decode"):
            if self._model.capture_once(kind, self._kv, self._length):
                return True
        return False

    @staticmethod
    def _best(logits: Logits) -> int:
        (found,) = logits.choose((Choice(0),))
        if found is None:
            raise CanaryFailedError("the canary's logits are not finite")
        return found
