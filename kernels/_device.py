"""What the token-parallel kernels share on the device: which tokens a program owns, bounds, a cheap sigmoid.

A *span* is up to SPAN consecutive tokens of one sequence, starting at a multiple of SPAN from the sequence's first. It
is the unit of work. Dense, sequence n's spans follow those of sequence n - 1. Packed, the host knows T and N but not
the offsets, so it counts *slots*: sequence i's spans take the slots from ``cu_seqlens[i] // SPAN + i`` on. That number
rises with i by at least the spans that sequence i has, and by at least one: no two spans share a slot, an empty
sequence has a slot of its own, a slot's sequence is found by bisection, and T // SPAN + N slots are enough. Slots left
over are spans of no tokens.
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def locate_span(slot, cu_seqlens_ptr, T, N, SPAN, PACKED: tl.constexpr):
    """The span of a slot: (sequence, batch row, sequence's first token, sequence's length, span's first token in the
    sequence). A slot left over starts at or past the length. Offsets that break the rules never lead outside [0, T).
    SPAN may be a constant or not.
    """
    if PACKED:
        low = 0 * slot
        high = low + N
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_seqlens_ptr + middle) // SPAN + middle <= slot:
                low = middle
            else:
                high = middle
        sequence = low
        begin = tl.load(cu_seqlens_ptr + sequence)
        end = tl.load(cu_seqlens_ptr + sequence + 1)
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= T), "cu_seqlens must rise from 0 to at most T")
        position = tl.maximum((slot - (begin // SPAN + sequence)) * SPAN, 0)
        begin = tl.minimum(tl.maximum(begin, 0), T)
        length = tl.minimum(tl.maximum(end, begin), T) - begin
        batch = 0 * sequence
    else:
        spans = tl.cdiv(T, SPAN)
        sequence = slot // spans
        position = (slot - sequence * spans) * SPAN
        begin = 0 * slot
        length = begin + T
        batch = sequence
    return sequence.to(tl.int64), batch.to(tl.int64), begin.to(tl.int64), length, position


@triton.jit
def mask_if(mask, condition):
    """``mask`` where the scalar condition holds, else nothing. (It goes through a block of integers: interpreters make
    integers of a block mask & a scalar one, in Triton 3.9, or fail at it, in 3.7.)"""
    return mask & (tl.zeros(mask.shape, tl.int32) + condition.to(tl.int32) != 0)


@triton.jit
def load_rows(ptrs, stride, start, first, rows, in_channels, ROWS: tl.constexpr):
    """Rows first to first + ROWS of a span, whose row 0 is at ``ptrs + start * stride``. From row ``rows`` on nothing
    is read, and zeros come back.

    Callers ask for rows one turn of their loop ahead of using them: the loads then run under the arithmetic. Offsets
    stay scalars until the last addition: pointers carried by a loop may be laid out unlike the loads that use them.
    """
    loaded = ()
    for r in tl.static_range(ROWS):
        mask = mask_if(in_channels, first + r < rows)
        loaded = loaded + (tl.load(ptrs + (start + first + r) * stride, mask=mask, other=0.0),)
    return loaded


@triton.jit
def at_most(tile, limit):
    """The minimum, and ``limit`` where the tile is no number."""
    if INTERPRETED:  # Triton 3.7's lets NaN through a minimum
        return tl.where(tile < limit, tile, limit)
    else:
        return tl.minimum(tile, limit)


@triton.jit
def within(tile, LIMIT: tl.constexpr):
    """The FP32 tile within +-LIMIT; NaN stays NaN."""
    tile = tl.minimum(tile, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(tile, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def held(tile):
    """The tile within +-2^60, so that sums of its products stay finite; NaN stays NaN. FP16 cannot leave it."""
    if tile.dtype == tl.float16:
        return tile
    elif tile.dtype == tl.bfloat16 and not INTERPRETED and tile.numel > 1:  # two at a time
        return tl.inline_asm_elementwise(
            "{ .reg .b32 top; mov.b32 top, 0x5d805d80; min.NaN.bf16x2 $0, $1, top; mov.b32 top, 0xdd80dd80; "
            "max.NaN.bf16x2 $0, $0, top; }",
            "=r,r", [tile], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return within(tile.to(tl.float32), 2.0**60).to(tile.dtype)


@triton.jit
def widened(tile):
    """The tile in FP32. Of bf16, two at a time: an instruction each, where the compiler takes three for two."""
    if tile.dtype == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [tile], tl.float32, is_pure=True, pack=2
        )
    else:
        return tile.to(tl.float32)


@triton.jit
def reciprocal(tile):
    """1 / tile, FP32, within two units in the last place: one instruction, where a division takes eight. Magnitudes
    above 2^126 give 0."""
    if INTERPRETED:
        return 1.0 / tile
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [tile], tl.float32, is_pure=True, pack=1)


@triton.jit
def logistic(x_log2):
    """1 / (1 + 2^-x): the sigmoid of x ln(2), for every x."""
    return reciprocal(1.0 + tl.exp2(x_log2 * -1.0))


def flag(condition: bool) -> bool | int:
    """A condition as a kernel's runtime argument: the interpreter of Triton 3.7 takes no bool."""
    return int(condition) if INTERPRETED.value else condition


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own serves kernels as well, and takes microseconds on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Launch:
    """How a kernel that walks spans is launched.

    rows: rows loaded ahead of their use. warps, per_thread: threads to a program, and channels to each of them. span:
    the most tokens to a program. registers: the most to a thread, None for the compiler's own choice. streams: rows at
    a time, from places of their own, which share the threads.
    """

    rows: int
    warps: int
    per_thread: int
    span: int
    registers: int | None = None
    streams: int = 1

    def over(self, channels: int, taps: int = 1) -> tuple[int, int, int]:
        """Channels to a program, programs along the channels, and warps: fewer where there are few channels. A filter
        of many taps, all in registers, leaves room for two channels a thread."""
        per_thread = min(self.per_thread, 2) if taps > 4 else self.per_thread
        block = min(32 * self.warps * per_thread // self.streams, power_of_2(channels))
        return block, cdiv(channels, block), max(1, block * self.streams // (32 * per_thread))

    def span_over(self, tokens: int, blocks: int, least: int) -> int:
        """Tokens to a span: many, so that few rows are read twice and few partial sums written, but not so many that
        the GPU stands idle. At least ``least``; both are powers of two."""
        span = max(self.span, least)
        while span > least and tokens * blocks < 512 * span:
            span //= 2
        return span


def span_slots(tokens: int, sequences: int, span: int, packed: bool) -> int:
    """How many slots cover every span; ``sequences`` is the batch size unless packed."""
    if packed:
        return tokens // span + sequences if sequences else 0
    return cdiv(tokens, span) * sequences


@triton.jit
def wait_for_earlier_launches(DEPENDENT: tl.constexpr):
    """First in a kernel launched with ``dependent_launch``: its programs may be started while the launch before it
    ends, and nothing that earlier launches wrote may be read, nor anything be written, before this returns."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def _depends(device: int) -> bool:
    compiled = not triton.knobs.runtime.interpret and torch.version.hip is None
    return compiled and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(tensor: Tensor, wanted: bool) -> dict[str, bool]:
    """Keyword arguments for a kernel that starts with ``wait_for_earlier_launches``: a programmatic dependent launch
    where it is wanted and there is one, on NVIDIA's GPUs from Hopper on."""
    if wanted and tensor.is_cuda and _depends(tensor.get_device()):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """Of the tensor's device; one for a tensor on the CPU, where kernels are interpreted."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 1


_HERE = contextlib.nullcontext()


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE
