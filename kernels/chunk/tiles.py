"""Tile arithmetic that the stages of chunk_kda share: where a chunk lies, how its rows are loaded, the inverse."""

import torch
import triton
import triton.language as tl

from .._device import INTERPRETED, cdiv, power_of_2, within

CHUNK = 64


def operand_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The type of matrix operands: the inputs' common type; FP32 where bf16 meets fp16."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def block_width(width: int) -> int:
    """The padded width of a key or value tile: a power of two, never below 64 (narrower wgmma tiles miscompile)."""
    return max(64, power_of_2(width))


def chunk_slots(tokens: int, sequences: int, packed: bool) -> int:
    """An upper bound on the number of chunks, from shapes alone.

    Packed sequence n owns the slots from ``cu_seqlens[n] // 64 + n``: never fewer than its chunks, since
    ceil(length / 64) <= end // 64 - start // 64 + 1, and found from the offsets with no prefix sum.
    """
    return tokens // CHUNK + sequences if packed else sequences * cdiv(tokens, CHUNK)


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
def load_clamped(base, row, rows, column, width, stride, MASKED: tl.constexpr):
    """Rows ``row`` of a chunk, those past its end as its last; columns past ``width`` are zero."""
    at = base + tl.minimum(row, rows - 1) * stride + column
    if MASKED:
        return tl.load(at, mask=column < width, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(base, tile, row, rows, stride, column):
    tl.store(base + row * stride + column, tile.to(base.dtype.element_ty), mask=row < rows)


# Causality is exact for whatever finite values a later token has. A matrix product multiplies its row by zeros, and 0
# times infinity would reach earlier ones. So what a row puts into an operand stays finite: ``held`` bounds the entries
# that sums multiply, far above any use, so that no sum overflows; ``finite`` converts. Neither hides an input's NaN.


@triton.jit
def held_beta(beta):
    """beta in FP32 within +-2^16; NaN stays NaN."""
    return within(beta.to(tl.float32), 2.0**16)


@triton.jit
def finite(tile, TYPE: tl.constexpr, LIMIT: tl.constexpr = 2.0**126):
    """An FP32 tile in TYPE, the largest finite number where it is too large; FP32 is held within LIMIT, below what TF32
    could round to infinity. NaN stays NaN."""
    if TYPE == tl.float32 or INTERPRETED:
        limit: tl.constexpr = 65504.0 if TYPE == tl.float16 else LIMIT
        return within(tile, limit).to(TYPE)
    elif TYPE == tl.float16:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [tile], tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;", "=r,f,f", [tile], tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def finite_scores(tile, TYPE: tl.constexpr):
    """``finite``, and the largest finite number for NaN as well: sums of raw entries can overflow both ways. An input's
    NaN goes on in what else its row puts into operands."""
    if TYPE == tl.float32 or INTERPRETED:
        limit: tl.constexpr = 65504.0 if TYPE == tl.float16 else 2.0**126
        return tl.maximum(tl.minimum(tile, limit), -limit).to(TYPE)
    elif TYPE == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 top; mov.b32 top, 0x7bff7bff; cvt.rn.satfinite.f16x2.f32 $0, $2, $1; "
            "min.f16x2 $0, $0, top; }",
            "=r,f,f", [tile], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 top; mov.b32 top, 0x7f7f7f7f; cvt.rn.satfinite.bf16x2.f32 $0, $2, $1; "
            "min.bf16x2 $0, $0, top; }",
            "=r,f,f", [tile], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """a b with FP32 sums; FP32 operands at PRECISION."""
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def opaque(tile):
    """The tile itself, but the compiler may not compute it a second time for another layout. It does where a tile is an
    operand of two products, and triples their exponentials; and it looks past this for the operand's width, which a
    join would spoil. In the interpreter there is nothing to stop."""
    if INTERPRETED:
        return tile
    elif tile.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [tile], tl.float32, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=False, pack=2)


@triton.jit
def stack(upper, lower):
    """Two [R, C] tiles as one [2 R, C]."""
    both = tl.permute(tl.join(upper, lower), (2, 0, 1))
    return tl.reshape(both, (2 * upper.shape[0], upper.shape[1]))


@triton.jit
def merge_product(a, b, FULL: tl.constexpr):
    """a b with FP32 sums. FULL: 3xTF32, within 2^40, so that no sum overflows; otherwise in FP16."""
    TYPE: tl.constexpr = tl.float32 if FULL else tl.float16
    a = finite(a, TYPE, 2.0**40)
    b = finite(b, TYPE, 2.0**40)
    return tl.dot(a, b, input_precision="tf32x3", out_dtype=tl.float32)


@triton.jit
def invert_unit_lower(lower, FULL: tl.constexpr):
    """(I + lower)^-1 for a strictly lower [32, 32] tile: inverses of 1 x 1 blocks merged to 2, 4, ..., 32 rows.

    A merge is forward substitution by blocks, [[A, 0], [-D L A, D]] for a block [[., .], [L, .]] with inverses A and D:
    nothing cancels, whatever the keys. FULL takes 3xTF32 products. Otherwise they are FP16 products, whose 11 bits are
    TF32's, rounded to nearest: for unit keys and beta <= 1 the entries of L and of the inverse are at most about 1, and
    the error is an eighth of what rounding the inverse to bf16 costs afterwards.
    """
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i ^ j) == 1, lower, 0.0)
    for level in tl.static_range(1, 5):
        part = tl.where(((i >> level) ^ (j >> level)) == 1, lower, 0.0)
        inverse -= merge_product(merge_product(inverse, part, FULL), inverse, FULL)
    return inverse


@triton.jit
def merge_inverses(upper, corner, lower, FULL: tl.constexpr):
    """The lower left quarter of [[I + L, 0], [corner, I + L']]^-1, from the inverses of the diagonal quarters."""
    return -merge_product(lower, merge_product(corner, upper, FULL), FULL)
