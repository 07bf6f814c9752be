"""`mix128` on the GPU: a kernel of forty instructions, kept as PTX so that nothing compiles it.

The driver turns PTX into machine code in a few milliseconds. A compiler (NVRTC) would be one more
library in a process that is meant to live for a second, and torch would be four seconds of import.

One thread takes every n-th word, sums up by itself; a warp adds up its 32 pairs by shuffling and
adds them to the result with two atomic additions.
"""

import ctypes
from collections.abc import Iterable
from typing import Final

from cache.cudadriver import Untyped, call

__all__ = ["Checksummer"]

_THREADS: Final = 256
_MAX_BLOCKS: Final = 1056
"""Eight for each of the 132 multiprocessors of a Hopper card: enough to reach memory speed."""

_WORDS_A_THREAD: Final = 8

_PTX: Final = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry mix128(.param .u64 words, .param .u64 size_bytes, .param .u64 result)
{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %d<16>;
    // d0 words, d1 count of words, d2 index, d3 step, d4 sum, d5 weighted sum, d6 mask of the last
    ld.param.u64 %d0, [words];
    ld.param.u64 %d7, [size_bytes];
    cvta.to.global.u64 %d0, %d0;
    add.u64 %d1, %d7, 7;
    shr.u64 %d1, %d1, 3;
    and.b64 %d8, %d7, 7;
    cvt.u32.u64 %r0, %d8;
    shl.b32 %r0, %r0, 3;
    mov.u64 %d6, 0xFFFFFFFFFFFFFFFF;
    shl.b64 %d9, %d6, %r0;
    not.b64 %d9, %d9;
    setp.ne.u64 %p0, %d8, 0;
    selp.b64 %d6, %d9, %d6, %p0;
    sub.u64 %d10, %d1, 1;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %d2, %r1, %r2;
    cvt.u64.u32 %d11, %r3;
    add.u64 %d2, %d2, %d11;
    mul.wide.u32 %d3, %r4, %r2;
    mov.u64 %d4, 0;
    mov.u64 %d5, 0;
next_word:
    setp.ge.u64 %p1, %d2, %d1;
    @%p1 bra words_done;
    shl.b64 %d11, %d2, 3;
    add.u64 %d11, %d0, %d11;
    ld.global.u64 %d12, [%d11];
    setp.eq.u64 %p2, %d2, %d10;
    @%p2 and.b64 %d12, %d12, %d6;
    add.u64 %d13, %d2, 1;
    mul.lo.u64 %d13, %d13, 0x9E3779B97F4A7C15;
    add.u64 %d12, %d12, %d13;
    shr.u64 %d13, %d12, 30;
    xor.b64 %d12, %d12, %d13;
    mul.lo.u64 %d12, %d12, 0xBF58476D1CE4E5B9;
    shr.u64 %d13, %d12, 27;
    xor.b64 %d12, %d12, %d13;
    mul.lo.u64 %d12, %d12, 0x94D049BB133111EB;
    shr.u64 %d13, %d12, 31;
    xor.b64 %d12, %d12, %d13;
    add.u64 %d4, %d4, %d12;
    shl.b64 %d13, %d2, 1;
    or.b64 %d13, %d13, 1;
    mul.lo.u64 %d13, %d12, %d13;
    add.u64 %d5, %d5, %d13;
    add.u64 %d2, %d2, %d3;
    bra next_word;
words_done:
    mov.u32 %r5, 16;
next_lane:
    mov.b64 {%r6, %r7}, %d4;
    mov.b64 {%r8, %r9}, %d5;
    shfl.sync.down.b32 %r6, %r6, %r5, 31, 0xffffffff;
    shfl.sync.down.b32 %r7, %r7, %r5, 31, 0xffffffff;
    shfl.sync.down.b32 %r8, %r8, %r5, 31, 0xffffffff;
    shfl.sync.down.b32 %r9, %r9, %r5, 31, 0xffffffff;
    mov.b64 %d12, {%r6, %r7};
    mov.b64 %d13, {%r8, %r9};
    add.u64 %d4, %d4, %d12;
    add.u64 %d5, %d5, %d13;
    shr.u32 %r5, %r5, 1;
    setp.ne.u32 %p1, %r5, 0;
    @%p1 bra next_lane;
    and.b32 %r10, %r3, 31;
    setp.ne.u32 %p3, %r10, 0;
    @%p3 bra done;
    ld.param.u64 %d14, [result];
    cvta.to.global.u64 %d14, %d14;
    red.global.add.u64 [%d14], %d4;
    red.global.add.u64 [%d14 + 8], %d5;
done:
    ret;
}
"""


class Checksummer:
    """The kernel, loaded into the current context, and memory for its results. Close it."""

    def __init__(self, capacity: int = 4096) -> None:
        """Load it.

        Raises:
            CudaError: no context is current, or the driver cannot load the kernel.
        """
        self._module = call("cuModuleLoadData", _PTX.encode() + b"\0")
        self._kernel = call("cuModuleGetFunction", self._module, b"mix128")
        self._capacity = capacity
        self._results = int(call("cuMemAlloc", 16 * capacity))

    def compute(self, spans: Iterable[tuple[int, int]], stream: Untyped = 0) -> list[str]:
        """Checksums of (device address, bytes), in order. Addresses are multiples of 8.

        The last word is read whole: the memory goes on to the next multiple of 8.
        """
        found: list[str] = []
        batch: list[tuple[int, int]] = []
        for span in spans:
            batch.append(span)
            if len(batch) == self._capacity:
                found += self._compute_batch(batch, stream)
                batch = []
        return found + (self._compute_batch(batch, stream) if batch else [])

    def _compute_batch(self, spans: list[tuple[int, int]], stream: Untyped) -> list[str]:
        call("cuMemsetD8Async", self._results, 0, 16 * len(spans), stream)
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
        for index, (address, size_bytes) in enumerate(spans):
            words = -(-size_bytes // 8)
            blocks = min(_MAX_BLOCKS, max(1, -(-words // (_THREADS * _WORDS_A_THREAD))))
            values = (address, size_bytes, self._results + 16 * index)
            call(
                "cuLaunchKernel",
                *(self._kernel, blocks, 1, 1, _THREADS, 1, 1, 0, stream, (values, kinds), 0),
            )
        host = (ctypes.c_uint64 * (2 * len(spans)))()
        call("cuStreamSynchronize", stream)
        call("cuMemcpyDtoH", ctypes.addressof(host), self._results, 16 * len(spans))
        return [f"{host[2 * i]:016x}{host[2 * i + 1]:016x}" for i in range(len(spans))]

    def close(self) -> None:
        """Give memory and kernel back."""
        call("cuMemFree", self._results)
        call("cuModuleUnload", self._module)
