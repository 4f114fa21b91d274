"""The next token of each sequence, drawn on the device from logits and one uniform number a sequence.

With temperature t a token weighs exp((logit - largest) / t). ``top_k`` keeps so many likeliest tokens, then ``top_p``
the fewest likeliest ones that hold this much of their weight; of equals the earlier token is the likelier. The draw is
the first kept token, in the vocabulary's order, at which the weights' running sum passes ``uniform`` times their sum:
a draw is a function of its own row alone, and nothing is read by the host.

The kernel has one program a row. It sorts nothing: the least kept logit is found by bisection over the bits of a
float's ordered integer, 16 for bf16 and 32 for the others, each a pass over the row, which stays in the L1 or L2 cache.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# (a Triton kernel is another language in Python's clothes)

import sys
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import implementation

_LARGEST_BLOCK = 4096


@triton.jit
def _load(logits_ptr, start, V, BLOCK: tl.constexpr):
    index = start + tl.arange(0, BLOCK)
    live = index < V
    x = tl.load(logits_ptr + index, mask=live, other=0.0).to(tl.float32) + 0.0  # -0 becomes 0, its equal
    return x, index, live


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """An unsigned integer in the order of finite x."""
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return key >> SHIFT


@triton.jit
def _above(logits_ptr, V, threshold, best, scale, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """(count, weight) of the tokens whose key is above the threshold, and (count, weight of each) of those at it."""
    count = tl.zeros([BLOCK], tl.int32)  # summed over the threads once, after the pass
    weight = tl.zeros([BLOCK], tl.float32)
    ties = tl.zeros([BLOCK], tl.int32)
    tie_weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x, _, live = _load(logits_ptr, start, V, BLOCK)
        key = _key(x, SHIFT)
        w = tl.exp((x - best) * scale)
        over, at = live & (key > threshold), live & (key == threshold)
        count += over.to(tl.int32)
        weight += tl.where(over, w, 0.0)
        ties += at.to(tl.int32)
        tie_weight = tl.maximum(tie_weight, tl.where(at, w, 0.0))
    return tl.sum(count), tl.sum(weight), tl.sum(ties), tl.max(tie_weight)


@triton.jit
def _sample_kernel(
    logits_ptr,
    uniforms_ptr,
    tokens_ptr,
    stride,
    V,
    scale,
    top_k,
    top_p,
    GREEDY: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    SHIFT: tl.constexpr = 32 - BITS
    FAR: tl.constexpr = 0x7FFFFFFF  # pyright: ignore[reportAssignmentType]

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    infinite = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x, _, live = _load(logits_ptr, start, V, BLOCK)
        finite = tl.abs(x) < float("inf")
        infinite += (live & (finite == 0)).to(tl.int32)
        largest = tl.maximum(largest, tl.where(live & finite, x, float("-inf")))
    strange = tl.sum(infinite)
    best = tl.max(largest)

    first = tl.full([BLOCK], FAR, tl.int32)
    if GREEDY:
        for start in range(0, V, BLOCK):
            x, index, live = _load(logits_ptr, start, V, BLOCK)
            first = tl.minimum(first, tl.where(live & (x == best), index, FAR))
        token = tl.min(first)
    else:
        floor = (row * 0).to(tl.uint32)  # top_k's least key; the keys of finite numbers are above 0
        kept_ties = 0
        if HAS_TOP_K:
            for i in range(BITS):
                candidate = floor | ((row * 0 + 1).to(tl.uint32) << (BITS - 1 - i))
                at_least = tl.zeros([BLOCK], tl.int32)
                for start in range(0, V, BLOCK):
                    x, _, live = _load(logits_ptr, start, V, BLOCK)
                    at_least += (live & (_key(x, SHIFT) >= candidate)).to(tl.int32)
                floor = tl.where(tl.sum(at_least) >= top_k, candidate, floor)
        count, weight, ties, tie_weight = _above(logits_ptr, V, floor, best, scale, SHIFT, BLOCK)
        if HAS_TOP_K:
            kept_ties = tl.minimum(top_k - count, ties)
        threshold = floor
        total = weight + kept_ties * tie_weight
        if HAS_TOP_P:
            wanted = top_p * total
            threshold = floor & 0
            for i in range(BITS):
                candidate = threshold | ((row * 0 + 1).to(tl.uint32) << (BITS - 1 - i))
                held = tl.zeros([BLOCK], tl.float32)
                for start in range(0, V, BLOCK):
                    x, _, live = _load(logits_ptr, start, V, BLOCK)
                    w = tl.exp((x - best) * scale)
                    held += tl.where(live & (_key(x, SHIFT) >= candidate), w, 0.0)
                threshold = tl.where((candidate <= floor) | (tl.sum(held) >= wanted), candidate, threshold)
            _, weight, ties, tie_weight = _above(logits_ptr, V, threshold, best, scale, SHIFT, BLOCK)
            needed = tl.ceil((wanted - weight) / tl.maximum(tie_weight, 1e-38))
            needed = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float32)).to(tl.int32)
            kept_ties = tl.where((threshold == floor) & HAS_TOP_K, tl.minimum(needed, kept_ties), needed)
            total = weight + kept_ties * tie_weight

        target = tl.load(uniforms_ptr + row) * total
        sum_before, ties_before = 0.0, 0
        last = tl.zeros([BLOCK], tl.int32)
        for start in range(0, V, BLOCK):
            x, index, live = _load(logits_ptr, start, V, BLOCK)
            key = _key(x, SHIFT)
            kept = live & (key > threshold)
            if HAS_TOP_K or HAS_TOP_P:
                at = (live & (key == threshold)).to(tl.int32)
                kept = kept | ((at != 0) & (ties_before + tl.cumsum(at) <= kept_ties))
                ties_before += tl.sum(at)
            w = tl.where(kept, tl.exp((x - best) * scale), 0.0)
            passed = (w > 0) & (sum_before + tl.cumsum(w) > target)
            first = tl.minimum(first, tl.where(passed, index, FAR))
            last = tl.maximum(last, tl.where(w > 0, index, 0))
            sum_before += tl.sum(w)
        token = tl.min(first)
        # The sum of the parts may be less than the whole, by rounding.
        token = tl.where(token == FAR, tl.max(last), token)

    tl.store(tokens_ptr + row, tl.where(strange > 0, -1, token).to(tl.int64))


def _launch(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    greedy = temperature < sys.float_info.min
    block = min(triton.next_power_of_2(vocab), _LARGEST_BLOCK)
    on_device = torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
    with on_device:
        _sample_kernel[(rows,)](
            logits,
            uniforms,
            tokens,
            logits.stride(0),
            vocab,
            0.0 if greedy else min(1.0 / temperature, 3e38),
            min(top_k, vocab),
            top_p,
            GREEDY=greedy,
            HAS_TOP_K=0 < top_k < vocab,
            HAS_TOP_P=top_p < 1,
            BITS=16 if logits.dtype == torch.bfloat16 else 32,
            BLOCK=block,
            num_warps=max(1, min(16, block // 128)),
        )
    return tokens


def _reference(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The same by sorting, in FP64."""
    logits = logits.float()
    finite = torch.isfinite(logits).all(-1)
    if temperature < sys.float_info.min:
        tokens = logits.argmax(-1)
    else:
        order = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        kept = (order.values - order.values[:, :1]) / temperature  # at most 0, so that no temperature is too low
        if top_k:
            kept = kept[:, :top_k]
        weights = torch.softmax(kept, -1)
        if top_p < 1:
            before = weights.cumsum(-1) - weights  # the likeliest token always stays
            weights = torch.where(before < top_p, weights, 0)
        in_order = torch.zeros_like(order.values).scatter(-1, order.indices[:, : kept.shape[1]], weights)
        sums = in_order.cumsum(-1)
        target = uniforms.double()[:, None] * sums[:, -1:]  # below the sum, as a uniform number is at most 1 - 2^-24
        tokens = torch.searchsorted(sums, target, right=True).squeeze(-1)
    return torch.where(finite, tokens, -1)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    impl: str | None = None,
) -> Tensor:
    """Draws a token for each row.

    Args:
        logits: [N, vocab_size], bf16, fp16 or fp32; rows may lie apart.
        uniforms: [N] fp32, from 0 up to but below 1, multiples of 2^-24 as ``torch.rand`` gives them.
        temperature: divides the logits; 0 (or a denormal, which may be flushed to it) takes the likeliest token.
        top_k: draw among so many likeliest tokens; 0: all.
        top_p: draw among the fewest likeliest tokens that hold this much of the weight, above 0; 1: all.
        impl: None for "triton" on CUDA tensors and "reference" elsewhere, or either. The two agree but where a sum's
            rounding decides.

    Returns:
        int64 [N], on the logits' device and without a synchronisation; -1 for a row with NaN or infinity in it.
    """
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    if implementation("sample_tokens", impl, logits.device) == "reference":
        return _reference(logits, uniforms, temperature, top_k, top_p)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    return _launch(logits, uniforms, temperature, top_k, top_p)
