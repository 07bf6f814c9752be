"""The root of every error that a person may read, and the errors of wires and cache.

One object becomes the log line, the CLI exit and the HTTP problem body: it carries a stable
`code`, one sentence, a `hint` that says what to do next, and the fields a program may need.
Errors cross process boundaries as `ErrorBody` (see `cache.wire`) and are raised again on the
other side as `RemoteError` with the same code.
"""

from typing import Any, ClassVar

import msgspec

__all__ = [
    "ArenaMemoryError",
    "BackendNotBuiltError",
    "CacheBusyError",
    "CacheError",
    "CacheFencedError",
    "CacheInUseError",
    "CacheNotReadyError",
    "CheckpointCorruptError",
    "CheckpointMissingError",
    "ConnectionClosedError",
    "CudaBindingsMissingError",
    "CudaError",
    "DeadlineExceededError",
    "DescriptorLimitError",
    "DonationRefusedError",
    "ErrorBody",
    "FingerprintMismatchError",
    "LoadFailedError",
    "ManifestError",
    "MappingError",
    "MissingTensorError",
    "ProtocolError",
    "RemoteError",
    "SealError",
    "SlotTableError",
    "StaleEpochError",
    "UnderstudyError",
    "UnexpectedDtypeError",
    "UnsupportedModelError",
    "UnsupportedQuantizationError",
    "VersionMismatchError",
]


class ErrorBody(msgspec.Struct, frozen=True):
    """An error as it travels: never a traceback, never a pickled object."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}


class UnderstudyError(Exception):
    """Base of all our errors."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(
        self, message: str, *, hint: str = "", details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details or {}

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    @property
    def stable_code(self) -> str:
        """The code a caller may match on."""
        return self.code

    def to_body(self) -> ErrorBody:
        """This error as it travels over a socket."""
        return ErrorBody(self.stable_code, self.message, self.hint, self.details)


class RemoteError(UnderstudyError):
    """The peer refused or failed a request; `stable_code` is the peer's code."""

    code = "remote"

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(body.message, hint=body.hint, details=body.details)
        self.body = body

    @property
    def stable_code(self) -> str:
        """The code that the peer gave."""
        return self.body.code


class ProtocolError(UnderstudyError):
    """The peer sent something that the protocol does not allow; the connection is closed."""

    code = "protocol"


class VersionMismatchError(ProtocolError):
    """The peer speaks another version of the protocol."""

    code = "protocol_version"

    def __init__(self, protocol: str, *, ours: int, theirs: int) -> None:
        super().__init__(
            f"{protocol} protocol version {theirs} from the peer, this side speaks {ours}",
            hint="run both ends from the same release, or restart the older one",
        )


class ConnectionClosedError(UnderstudyError):
    """The peer closed the connection, or died."""

    code = "connection_closed"


class DeadlineExceededError(UnderstudyError):
    """A wait reached its deadline."""

    code = "deadline"
    http_status = 504

    def __init__(self, what: str, *, timeout_s: float) -> None:
        super().__init__(f"{what} did not happen within {timeout_s:g} s")
        self.timeout_s = timeout_s


class DescriptorLimitError(UnderstudyError):
    """This process may open no more files, so descriptors cannot be handed on."""

    code = "descriptor_limit"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"descriptors cannot be duplicated: {reason}", hint="raise the limit (RLIMIT_NOFILE)"
        )


class CacheError(UnderstudyError):
    """Base of the weight cache's own errors."""

    code = "cache"


class BackendNotBuiltError(CacheError):
    """The topology names a device for which this release has no arena backend."""

    code = "backend_not_built"
    exit_code = 2

    def __init__(self, device: str) -> None:
        super().__init__(
            f"no arena backend for device {device!r} in this release",
            hint="use device cpu or cuda:N",
            details={"device": device},
        )


class ArenaMemoryError(CacheError):
    """Memory for an arena could not be taken: not enough of it, or a limit was reached."""

    code = "out_of_memory"

    def __init__(
        self,
        purpose: str,
        wanted_bytes: int,
        reason: str,
        *,
        hint: str = "free memory or raise the limit (cgroup memory.max, RLIMIT_FSIZE, "
        "RLIMIT_NOFILE)",
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            f"cannot take {wanted_bytes} bytes for {purpose}: {reason}",
            hint=hint,
            details={"purpose": purpose, "wanted_bytes": wanted_bytes, **(details or {})},
        )

    def with_holdings(
        self, *, weights_bytes: int, kv_bytes: int, attached: list[str]
    ) -> "ArenaMemoryError":
        """The same, saying what the daemon holds itself and for whom."""
        held = f"this cache holds {weights_bytes} bytes of weights and {kv_bytes} of KV"
        if attached:
            held += f", attached: {', '.join(attached)}"
        self.message = f"{self.message}; {held}"
        self.details |= {
            "cache_weights_bytes": weights_bytes,
            "cache_kv_bytes": kv_bytes,
            "attached": attached,
        }
        return self


class CudaBindingsMissingError(CacheError):
    """A CUDA device is configured, and the Python package that speaks to the driver is absent."""

    code = "cuda_bindings_missing"
    exit_code = 2

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the CUDA driver's Python bindings cannot be imported: {reason}",
            hint="install the extra that brings them: pip install 'understudy[cuda]'",
        )


class CudaError(CacheError):
    """The CUDA driver refused a call, or reported what an earlier kernel did."""

    code = "cuda"

    def __init__(self, call: str, error: str, text: str = "", *, hint: str = "") -> None:
        super().__init__(
            f"{call} failed: {error}{f' ({text})' if text else ''}",
            hint=hint,
            details={"call": call, "error": error},
        )
        self.error = error


class MappingError(CacheError):
    """The kernel refused to map, unmap or protect shared memory."""

    code = "mapping"


class SealError(CacheError):
    """A shared memory file does not carry the seals that make it safe to map."""

    code = "seals"


class SlotTableError(CacheError):
    """The slot table is not one of ours, is damaged, or was used against its rules."""

    code = "slot_table"


class StaleEpochError(CacheError):
    """A writer tried to claim shared memory with an epoch below one already seen."""

    code = "stale_epoch"
    exit_code = 4
    http_status = 409

    def __init__(self, *, ours: int, seen: int) -> None:
        super().__init__(
            f"epoch {ours} is older than epoch {seen}, which has already written here",
            hint="this process was replaced; it must not serve",
            details={"epoch": ours, "seen": seen},
        )


class CheckpointMissingError(CacheError):
    """A model folder, or a file that belongs to it, is not there or cannot be read."""

    code = "checkpoint_missing"
    exit_code = 2
    http_status = 400


class CheckpointCorruptError(CacheError):
    """A checkpoint file is truncated or damaged, or contradicts its own header."""

    code = "checkpoint_corrupt"

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(
            f"{file} is damaged: {reason}",
            hint="copy the checkpoint again and compare its size and hash with the source",
            details={"file": file},
        )


class MissingTensorError(CacheError):
    """The model needs tensors that the checkpoint does not hold, or holds in another shape."""

    code = "missing_tensor"

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(
            message,
            hint="the config and the weights belong to different models, or a shard is absent",
            details={"tensors": names[:20]},
        )


class UnexpectedDtypeError(CacheError):
    """A tensor has a dtype that this model cannot be loaded from."""

    code = "unexpected_dtype"


class UnsupportedModelError(CacheError):
    """The model, or the way it should be split, is not one that this release can load."""

    code = "unsupported_model"
    exit_code = 2
    http_status = 400


class UnsupportedQuantizationError(CacheError):
    """The quantisation is not on the allow-list; nothing was loaded and no memory was taken."""

    code = "unsupported_quantization"
    exit_code = 2
    http_status = 400


class FingerprintMismatchError(CacheError):
    """The cache holds, or loads, other weights than the client asked for."""

    code = "fingerprint_mismatch"
    exit_code = 4
    http_status = 409

    def __init__(
        self, differing: list[str], *, held: dict[str, Any], wanted: dict[str, Any]
    ) -> None:
        changes = ", ".join(f"{n} (cache {held[n]!r}, client {wanted[n]!r})" for n in differing)
        super().__init__(
            f"the cache holds other weights: they differ in {changes}",
            hint="set on_mismatch to reload, or make both sides name the same model",
            details={"fields": differing, "held": held, "wanted": wanted},
        )


class CacheInUseError(CacheError):
    """The weights or the KV arena cannot be replaced while engines are attached."""

    code = "cache_in_use"
    exit_code = 4
    http_status = 409

    def __init__(self, what: str, holders: list[str]) -> None:
        super().__init__(
            f"{what} while {', '.join(holders)} {'is' if len(holders) == 1 else 'are'} attached",
            hint="stop these engines first",
            details={"attached": holders},
        )


class CacheBusyError(CacheError):
    """The cache is loading; the request cannot be served until it has finished."""

    code = "cache_busy"
    exit_code = 4
    http_status = 409


class CacheNotReadyError(CacheError):
    """No weights were served before the client's deadline."""

    code = "cache_not_ready"


class CacheFencedError(CacheError):
    """A scrub found bytes that differ from their checksum; nothing attaches any more."""

    code = "cache_fenced"

    def __init__(self, tensors: list[str]) -> None:
        super().__init__(
            f"the weights in memory are damaged: {', '.join(tensors[:5])}",
            hint="stop the engines, drop the cache and load again; check the machine's memory",
            details={"tensors": tensors[:100]},
        )


class LoadFailedError(CacheError):
    """The loader died, hung or reported an error that it could not name better."""

    code = "load_failed"


class DonationRefusedError(CacheError):
    """Donated memory does not fit its manifest, or the daemon already holds some."""

    code = "donation_refused"


class ManifestError(CacheError):
    """A manifest contradicts itself, its arena or its checksums."""

    code = "manifest"
