"""What can go wrong in the native engine, by what the reader should do about it.

Start-up errors become one line on stderr and exit status 1; request errors become a
`GenerateError` frame; control errors travel as `ErrorBody`.
"""

from collections.abc import Sequence
from typing import ClassVar

from cache.errors import UnderstudyError

__all__ = [
    "ContextLengthExceededError",
    "DeviceFailedError",
    "DeviceMemoryError",
    "EngineError",
    "InvalidRequestError",
    "LeftOnMetaError",
    "QueueFullError",
    "RequestRefusedError",
    "TensorMismatchError",
    "ThreadsNotPinnedError",
    "TorchWithoutCudaError",
]


class EngineError(UnderstudyError):
    """Base of the native engine's own errors."""

    code = "engine"


class TensorMismatchError(EngineError):
    """The arena and the model class disagree about a tensor."""

    code = "tensor_mismatch"

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"tensor {name}: {problem}",
            hint="the checkpoint does not fit the architecture that its config.json names",
        )


class LeftOnMetaError(EngineError):
    """Something in the model has no memory; it would fail at the first step, or worse, later."""

    code = "left_on_meta"

    def __init__(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(
            f"no memory behind {shown}",
            hint="the weight arena lacks these tensors: load the checkpoint again",
        )


class DeviceFailedError(EngineError):
    """The GPU, or a library on it, reported an error; the context of the process may be lost."""

    code = "device_failed"

    def __init__(self, device: str, problem: str) -> None:
        super().__init__(
            f"{device} failed: {problem}",
            hint="the engine is replaced; if it happens again look at the kernel's log for Xid "
            "(dmesg) and at nvidia-smi -q",
            details={"device": device},
        )


class DeviceMemoryError(EngineError):
    """The GPU has not enough memory for what this engine needs beside the shared arenas."""

    code = "device_out_of_memory"

    def __init__(self, device: str, problem: str) -> None:
        super().__init__(
            f"{device} has not enough memory left: {problem}",
            hint="stop what else holds the card, or use fewer KV slots, a shorter max_length or "
            "a smaller batch engine",
            details={"device": device},
        )


class ThreadsNotPinnedError(EngineError):
    """The environment would start more than one compute thread."""

    code = "threads_not_pinned"

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(
            f"the environment does not set {', '.join(missing)}",
            hint="these must be set before the process starts: bits depend on one thread",
        )


class TorchWithoutCudaError(EngineError):
    """The topology names a GPU, and the torch that is installed knows none."""

    code = "torch_without_cuda"

    def __init__(self, version: str, device: str) -> None:
        super().__init__(
            f"torch {version} was built without CUDA, the topology names {device}",
            hint="install torch for CUDA, or write device: cpu",
        )


class RequestRefusedError(EngineError):
    """A request is refused before it costs anything; `http_status` is for the client."""

    code: ClassVar[str] = "invalid_request"
    http_status: ClassVar[int] = 400


class InvalidRequestError(RequestRefusedError):
    """The request cannot be understood or rendered."""


class ContextLengthExceededError(RequestRefusedError):
    """Prompt and output together do not fit a slot."""

    code = "context_length_exceeded"

    def __init__(
        self, *, prompt_tokens: int | str, wanted_tokens: int, max_length_tokens: int
    ) -> None:
        super().__init__(
            f"this model's maximum context length is {max_length_tokens} tokens; the request has "
            f"{prompt_tokens} prompt tokens and asks for {wanted_tokens} more",
            hint="shorten the prompt or lower max_tokens",
        )


class QueueFullError(RequestRefusedError):
    """Too many requests wait for a slot."""

    code = "queue_full"
    http_status = 429

    def __init__(self, *, queued: int) -> None:
        super().__init__(f"{queued} requests are waiting already", hint="try again shortly")
