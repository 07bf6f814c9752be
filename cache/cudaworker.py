"""Work on device memory that the cache daemon cannot do itself: it has no CUDA context.

`python -m cache.cudaworker`, started by the daemon for one job and gone after it: clearing new KV,
or re-computing checksums. It gets the descriptors by inheritance, the job as JSON on standard
input, and answers with JSON on standard output: a result, or a typed error. Torch-free, so that it
starts in half a second.

Invariants
    1. Weights are mapped read-only, so a scrub cannot do harm.
    2. The daemon waits with a deadline, kills the worker at it, and gets the worker's own error.
       A worker that does not end then is left behind: it keeps no thread of the daemon.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from cache.children import ask_child
from cache.cudadriver import device_ordinal
from cache.errors import ErrorBody, LoadFailedError, RemoteError, UnderstudyError
from cache.protocol import Scrubbed, TensorEntry

__all__ = ["Job", "main", "scrub_in_child", "zero_in_child"]

ARGV: Final = (sys.executable, "-m", "cache.cudaworker")

_ZERO_TIMEOUT_S: Final = 60.0
_SCRUB_START_S: Final = 60.0
_MAX_ANSWER_BYTES: Final = 16 << 20
"""Room for the name of every tensor of a model, should all of them be damaged."""

_BATCH_BYTES: Final = 256 << 20
"""A scrub looks at its rate after this many bytes; the kernel takes 0.1 ms for them."""


class Job(msgspec.Struct, frozen=True):
    """What to do with which memory; `entries` and rate are for a scrub."""

    device: str
    fds: list[int]
    extent_bytes: list[int]
    entries: list[TensorEntry] | None = None
    rate_bytes_per_s: float | None = None


class _Answer(msgspec.Struct, frozen=True):
    scrubbed: Scrubbed | None = None
    error: ErrorBody | None = None


def zero_in_child(device: str, fds: Sequence[int], extent_bytes: Sequence[int]) -> None:
    """Clear memory; returns when it reads as zero for everybody. Blocking: call it in a thread.

    Raises:
        RemoteError: the worker's own error, such as `cuda` or `mapping`.
        LoadFailedError, DeadlineExceededError: it died, or took too long.
    """
    _run(Job(device, list(fds), list(extent_bytes)), timeout_s=_ZERO_TIMEOUT_S, stop=None)


def scrub_in_child(job: Job, *, stop: threading.Event) -> Scrubbed | None:
    """Re-compute checksums; None when `stop` was set. Blocking: call it in a thread.

    Raises:
        As `zero_in_child`.
    """
    assert job.entries is not None  # noqa: S101 - that makes it a scrub
    size_bytes = sum(entry.size_bytes for entry in job.entries)
    timeout_s = _SCRUB_START_S
    if job.rate_bytes_per_s is not None:
        timeout_s += 2 * size_bytes / job.rate_bytes_per_s
    answer = _run(job, timeout_s=timeout_s, stop=stop)
    return None if answer is None else answer.scrubbed


def _run(job: Job, *, timeout_s: float, stop: threading.Event | None) -> _Answer | None:
    ended = ask_child(
        ARGV, what="work on device memory", timeout_s=timeout_s,
        max_output_bytes=_MAX_ANSWER_BYTES, data=msgspec.json.encode(job), pass_fds=job.fds,
        stop=stop,
    )  # fmt: skip
    return None if ended is None else _answer(ended.output, ended.returncode)


def _answer(out: bytes, returncode: int) -> _Answer:
    try:
        answer = msgspec.json.decode(out, type=_Answer)
    except msgspec.MsgspecError as error:
        raise LoadFailedError(
            f"the worker on device memory ended with status {returncode}",
            hint="see the cache daemon's log",
        ) from error
    if answer.error is not None:
        raise RemoteError(answer.error)
    return answer


def main() -> int:
    """Do the job on standard input; exit status 0 if it was done."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        answer = _Answer(_work(job))
    except UnderstudyError as error:
        answer = _Answer(error=error.to_body())
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.buffer.flush()
    return 0 if answer.error is None else 1


def _work(job: Job) -> Scrubbed | None:
    from cache.cudamapping import CudaMapping

    is_scrub = job.entries is not None
    with CudaMapping(
        device_ordinal(job.device), job.fds, job.extent_bytes, writable=not is_scrub
    ) as mapping:
        if job.entries is None:
            mapping.zero()
            return None
        return _scrub(mapping.address, job.entries, job.rate_bytes_per_s)


def _scrub(address: int, entries: list[TensorEntry], rate: float | None) -> Scrubbed:
    from cache.cudachecksum import Checksummer

    with contextlib.suppress(OSError):  # the bound on the rate still holds
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    started_s = time.monotonic()
    mismatches: list[str] = []
    checked = 0
    checksummer = Checksummer()
    for batch in _batches(entries):
        spans = [(address + entry.offset_bytes, entry.size_bytes) for entry in batch]
        found = checksummer.compute(spans)
        mismatches += [e.name for e, value in zip(batch, found, strict=True) if value != e.checksum]
        checked += sum(entry.size_bytes for entry in batch)
        if rate is not None:
            time.sleep(max(0.0, checked / rate - (time.monotonic() - started_s)))
    checksummer.close()
    return Scrubbed(checked, mismatches, time.monotonic() - started_s)


def _batches(entries: list[TensorEntry]) -> list[list[TensorEntry]]:
    batches: list[list[TensorEntry]] = []
    room = 0
    for entry in entries:
        if room < entry.size_bytes or not batches:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1].append(entry)
        room -= entry.size_bytes
    return batches


if __name__ == "__main__":
    sys.exit(main())
