"""Tile arithmetic that the stages of chunk_kda share: where a chunk lies, the levels of its pairs, the inverse.

Levels. A pair (i, j), i > j, of a chunk is served by exactly one level s of 32, 16, 8, 4, 2, 1: the highest bit in
which i and j differ, so that i lies in the upper and j in the lower half of one block of 2s rows. With r the first row
of the upper half,

    2^(G_i - G_j) = 2^(G_i - G_r) 2^(G_r - G_j),        both exponents <= 0 for every legal gate,

so a level is a plain matrix product of rows that were scaled by 2^-|G - G_r|. No factor exceeds 1, nothing can
overflow, a factor that flushes to zero belongs to a pair that is zero, and the anchor r is at or before every row i it
serves, so that no token reads a later one.

The products of a level hold more than its own pairs. With the lower halves of the row operand and the upper halves of
the column operand set to zero, what is superfluous lies at pairs of higher levels or above the diagonal alone, finite,
and is cut before the next level is added: the levels go upwards from 1 into one accumulator.
"""

import torch
import triton
import triton.language as tl

CHUNK = 64


def operand_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The type of matrix operands: the inputs' common type; FP32 where bf16 meets fp16."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def block_width(width: int) -> int:
    """The padded width of a key or value tile: a power of two, never below 64 (narrow tiles miscompile on sm_90)."""
    return max(64, triton.next_power_of_2(width))


def chunk_slots(tokens: int, sequences: int, packed: bool) -> int:
    """An upper bound on the number of chunks, from shapes alone.

    Packed sequence n owns the slots from ``cu_seqlens[n] // 64 + n``: never fewer than its chunks, since
    ceil(length / 64) <= end // 64 - start // 64 + 1, and found from the offsets with no prefix sum.
    """
    return tokens // CHUNK + sequences if packed else sequences * triton.cdiv(tokens, CHUNK)


@triton.jit
def sequence_bounds(cu_seqlens, n, T, PACKED: tl.constexpr):
    """First token, one past the last token, and first chunk slot of sequence n, held inside the tensor."""
    if PACKED:
        begin = tl.load(cu_seqlens + n)
        end = tl.load(cu_seqlens + n + 1)
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= T), "cu_seqlens must rise from 0 to at most T")
        begin = tl.minimum(tl.maximum(begin, 0), T)
        end = tl.minimum(tl.maximum(end, begin), T)
        slot = begin // 64 + n
        begin = begin.to(tl.int64)
        end = end.to(tl.int64)
    else:
        begin = n.to(tl.int64) * T
        end = begin + T
        slot = n * tl.cdiv(T, 64)
    return begin, end, slot


@triton.jit
def locate_chunk(cu_seqlens, slot, T, N, PACKED: tl.constexpr):
    """Sequence, first token and number of rows of chunk ``slot``; no rows for a slot that is not in use."""
    n = slot // tl.cdiv(T, 64)
    if PACKED:
        n = 0
        last = N - 1
        while n < last:  # ends at the last n with cu_seqlens[n] // 64 + n <= slot
            middle = (n + last + 1) // 2
            below = tl.load(cu_seqlens + middle) // 64 + middle <= slot
            n = tl.where(below, middle, n)
            last = tl.where(below, last, middle - 1)
    begin, end, first = sequence_bounds(cu_seqlens, n, T, PACKED)
    start = begin + (slot - first).to(tl.int64) * 64
    rows = tl.where(slot < first, 0, tl.minimum(tl.maximum(end - start, 0), 64).to(tl.int32))
    return n, start, rows


@triton.jit
def load_rows(base, row, rows, column, width, stride, MASKED: tl.constexpr):
    """The tile of rows ``row`` [R, 1] and columns ``column`` [1, C]; zeros past ``rows`` and, if MASKED, ``width``."""
    mask = row < rows
    if MASKED:
        mask = mask & (column < width)
    return tl.load(base + row * stride + column, mask=mask, other=0.0)


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """a b with FP32 sums; FP32 operands at PRECISION."""
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def keep_levels(tile, log_levels):
    """The pairs below the diagonal of a [64, 64] tile that the levels below 2^log_levels serve; zero elsewhere."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    return tl.where((i > j) & ((i >> log_levels) == (j >> log_levels)), tile, 0.0)


@triton.jit
def only_level(tile, log_level):
    """The pairs of a strictly lower [64, 64] tile that level 2^log_level serves; zero elsewhere."""
    i = tl.arange(0, 64)[:, None] >> log_level
    j = tl.arange(0, 64)[None, :] >> log_level
    return tl.where((i ^ j) == 1, tile, 0.0)


@triton.jit
def level_factors(gate_tile, gate_anchor, row, level):
    """2^-|G - G_r| for the rows of the upper halves and for those of the lower halves, zero for the others."""
    factor = tl.exp2(-tl.abs(gate_tile - gate_anchor))
    upper = (row & level) != 0
    return tl.where(upper, factor, 0.0), tl.where(upper, 0.0, factor)


@triton.jit
def merge_product(a, b, FULL: tl.constexpr):
    if FULL:
        return tl.dot(a, b, input_precision="tf32x3", out_dtype=tl.float32)
    else:
        return tl.dot(a.to(tl.float16), b.to(tl.float16), out_dtype=tl.float32)


@triton.jit
def invert_unit_lower(lower, FULL: tl.constexpr):
    """(I + lower)^-1 for a strictly lower [64, 64] tile: inverses of 1 x 1 blocks merged to 2, 4, ..., 64 rows.

    A merge is forward substitution by blocks, [[A, 0], [-D L A, D]] for a block [[., .], [L, .]] with inverses A and D:
    nothing cancels, whatever the keys. FULL takes 3xTF32 products. Otherwise they are FP16 products, whose 11 bits are
    TF32's, rounded to nearest: for unit keys and beta <= 1 the entries of L and of the inverse are at most about 1, and
    the error is an eighth of what rounding the inverse to bf16 costs afterwards.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - only_level(lower, 0)
    for log_level in range(1, 6):
        product = merge_product(inverse, only_level(lower, log_level), FULL)
        inverse = inverse - merge_product(product, inverse, FULL)
    return inverse
