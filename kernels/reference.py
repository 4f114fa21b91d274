"""Kimi Delta Attention in plain PyTorch: the specification that every kernel is tested against.

Each ``naive_<operator>`` computes what ``<operator>`` promises, in its inputs' type (all FP32 or all FP64), on any
device, dense or packed, differentiable by autograd. ``naive_recurrent_kda`` is the definition: the recurrence of Kimi
Linear (arXiv 2510.26692), one token at a time. ``naive_chunk_kda`` is the same function rearranged into matrix products
over chunks of 64 tokens, and what ``chunk_kda(impl="reference")`` trains with.

Gates are log2 decays. B batch, T tokens, H heads, K key width, V value width, N sequences, C chunk size. Packed tensors
([1, T, ...] with ``cu_seqlens``) may end in rows of no sequence: those are never read, come out as zeros, and
their gradients are zeros.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ._operator import LOG2_E, MIN_LOG2_DECAY, read_offsets, without_autocast

LN_2 = math.log(2.0)
MAX_A_LOG = 88.72
"""exp of it is just inside FP32's range."""
GRAD_LIMIT = 2.0**100
"""A gate's gradient at one token is held below it: sums of such stay finite, where inf - inf would be NaN."""

_Function = TypeVar("_Function", bound=Callable)


def _without_autocast(function: _Function) -> _Function:
    """The function (or the backward) computes in its tensors' own type, inside an autocast region too."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if tensor is None:
            return function(*args, **kwargs)  # which says what is missing
        with without_autocast(tensor):
            return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _exp2(x: Tensor) -> Tensor:
    """2^x. On a CPU torch.exp2 gives other bits where an element falls into a loop's remainder; torch.exp does not, so
    that a sequence's results do not depend on what else is in the batch."""
    return (LN_2 * x).exp()


# ---- the recurrence ----


@_without_autocast
def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA by its definition, token by token (Kimi Linear, arXiv 2510.26692).

    Args:
        q, k: [B, T, H, K]; the scale 1 / sqrt(K) is applied here.
        v: [B, T, H, V].
        gate: [B, T, H, K], each token's own log2 decay, at most 0; -inf resets a channel.
        beta: [B, T, H], past its sigmoid.
        initial_state: [N, H, K, V], or None for zeros.
        cu_seqlens: int32 [N + 1]: B is 1, and sequence n holds the tokens from cu_seqlens[n] to cu_seqlens[n + 1].
        output_final_state: whether to return the states after the last tokens.

    Returns:
        The output [B, T, H, V], and the final states [N, H, K, V] or None.

    Raises:
        TypeError: tensors that are not all FP32 or all FP64.
        ValueError: offsets that decrease or leave [0, T].
    """
    _check_types("naive_recurrent_kda", q, k, v, gate, beta, initial_state)
    steps = _Steps("naive_recurrent_kda", q, cu_seqlens, 1)
    inputs = [steps.split(x) for x in (q, k, v, gate, beta)]
    scale = q.shape[-1] ** -0.5
    state = steps.first_states(initial_state, v)  # [sequences still running, H, K, V]
    outputs: list[Tensor] = []
    finished: list[Tensor] = []
    for q_t, k_t, v_t, gate_t, beta_t in zip(*inputs):  # [running, H, K], ... [running, H]
        state = _retire(state, q_t.shape[0], finished)
        state = state * _exp2(gate_t).unsqueeze(-1)  # decay
        residual = beta_t.unsqueeze(-1) * (v_t - _read(state, k_t))  # against the decayed state
        state = state + k_t.unsqueeze(-1) * residual.unsqueeze(-2)  # rank-one write
        outputs.append(_read(state, scale * q_t))  # from the updated state
    return steps.join(outputs, v), steps.last_states(state, finished) if output_final_state else None


@_without_autocast
def naive_recurrent_kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    beta_scale: float = 1.0,
) -> Tensor:
    """One token for each of N sequences, from raw q, k, gate and beta logits; ``state`` is updated in place.

    Args:
        q, k, raw_gate: [N, H, K]; q and k are L2-normalised here.
        v: [N, H, V].
        beta_logits: [N, H]; beta = beta_scale * sigmoid(beta_logits).
        A_log, dt_bias: [H], [H, K], the gate's parameters.
        state: [slots, H, K, V].
        state_indices: int32 [N], each sequence's slot, all different; negative for a row to skip. None: sequence i
            uses slot i.
        gate: "bounded" (with ``lower_bound``) or "softplus".

    Returns:
        The output [N, H, V]; zero in skipped rows.

    Raises:
        ValueError: an unknown gate, or an index past the last slot.
    """
    _check_types("naive_recurrent_kda_step", q, k, v, raw_gate, beta_logits, A_log, dt_bias, state)
    if gate not in ("bounded", "softplus"):
        raise ValueError(f"naive_recurrent_kda_step: gate must be 'bounded' or 'softplus', got {gate!r}")
    rows, slots = _live_slots("naive_recurrent_kda_step", state_indices, q.shape[0], state)
    log2_decay = _log2_decay(raw_gate[rows], A_log, dt_bias, lower_bound if gate == "bounded" else None)
    beta = beta_scale * beta_logits[rows].sigmoid()
    output, final_state = naive_recurrent_kda(
        naive_l2norm(q[rows]).unsqueeze(1),
        naive_l2norm(k[rows]).unsqueeze(1),
        v[rows].unsqueeze(1),
        log2_decay.unsqueeze(1),
        beta.unsqueeze(1),
        state[slots],
        output_final_state=True,
    )
    assert final_state is not None
    state[slots] = final_state
    return _scatter_rows(output.squeeze(1), rows, v.shape[0])


def _read(state: Tensor, key: Tensor) -> Tensor:
    """S^T k: [N, H, K, V], [N, H, K] -> [N, H, V]."""
    return _matmul(key.unsqueeze(-2), state).squeeze(-2)


def _retire(state: Tensor, running: int, finished: list[Tensor]) -> Tensor:
    """Sequences run longest first: sets the states of those that have ended aside and returns the others."""
    if running < state.shape[0]:
        finished.append(state[running:])
    return state[:running]


# ---- the chunk form ----


@_without_autocast
def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """KDA by matrix products over chunks: the same function as ``naive_recurrent_kda``.

    With G the gate summed from the chunk's start and D_ij = 2^(G_i - G_j), each chunk is worked out as

        L_ij = beta_i <k_i D_ij, k_j>  (i > j)          A = (I + L)^-1
        u, w = A (beta v), A (beta k 2^G)               v_new = u - w S
        o    = (q 2^G) S + a_qk v_new                   a_qk_ij = <q_i D_ij, k_j>  (i >= j), q already scaled
        S'   = diag(2^G_last) S + (k 2^(G_last - G))^T v_new

    All chunks of all sequences go through the first two lines at once; only the state is carried from chunk to chunk,
    for all sequences together. No exponent is positive: see ``_DecayedProducts``.

    The gate's gradient survives strong gates because a pair whose decay is 2^0 has no gate in its graph (the diagonal
    of a_qk, the last token's own write); left in, it would add a large term to G_i and take it away again, and FP32
    would keep the rounding.

    Args:
        cumulative_gate: [B, T, H, K], the log2 decay summed from the start of each chunk and each sequence; finite.
        chunk_size: C, a power of two; the one that the gate was summed with.

    The other arguments, the results and the errors are ``naive_recurrent_kda``'s; also
        ValueError: a chunk size that is not a power of two.
    """
    _check_types("naive_chunk_kda", q, k, v, cumulative_gate, beta, initial_state)
    _check_chunk_size("naive_chunk_kda", chunk_size)
    steps = _Steps("naive_chunk_kda", q, cu_seqlens, chunk_size)
    # [chunks, H, C, ...], by step and then by sequence; zeros after a sequence's end
    q, k, v, G, beta = (steps.chunks(x) for x in (q, k, v, cumulative_gate, beta.unsqueeze(-1)))
    q = q * q.shape[-1] ** -0.5
    row = torch.arange(chunk_size, device=q.device).view(-1, 1)
    last = steps.chunk_lengths - 1
    G_last = G[torch.arange(len(last), device=q.device), :, last].unsqueeze(-2)  # [chunks, H, 1, K]
    last = last.view(-1, 1, 1, 1)
    G = torch.where(row <= last, G, G_last.detach())  # past the end nothing decays

    products: Tensor = _DecayedProducts.apply(torch.stack([q, _finite(beta * k)], -2), k, G)  # pyright: ignore
    a_qk, L = _finite(products).unbind(-2)  # [chunks, H, C, C], both without their diagonals
    decay = _exp2(G)
    # What is no number from the start stays so, in all that its chunk and later ones give.
    lost = torch.cat([k, v, beta], -1).isnan().any(-1, keepdim=True)
    u_w: Tensor = _UnitLowerSolve.apply(L, _finite(beta * torch.cat([v, k * decay], -1)))  # pyright: ignore
    u, w = _finite(u_w).split([v.shape[-1], k.shape[-1]], -1)
    read = torch.cat([w, q * decay], -2)  # [chunks, H, 2 C, K]: one product with the state serves both
    k_decayed = k * _exp2(torch.where(row < last, G_last - G, 0))
    state_decay = _exp2(G_last).mT  # [chunks, H, K, 1]

    state = steps.first_states(initial_state, v)
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    finished: list[Tensor] = []
    inputs = (read, u, k_decayed, state_decay, lost)
    for read_c, u_c, k_c, decay_c, lost_c in zip(*(x.split(steps.running) for x in inputs)):
        state = _retire(state, u_c.shape[0], finished)
        w_S, q_S = _matmul(read_c, state).split(chunk_size, -2)
        v_new = torch.where(lost_c, torch.nan, _finite(u_c - w_S))  # [running, H, C, V]
        state = decay_c * state + _matmul(k_c.mT, v_new)
        values.append(v_new)
        outputs.append(q_S)
    v_new = torch.cat([u[:0], *values])  # [chunks, H, C, V]
    output = torch.cat([u[:0], *outputs]) + _matmul(a_qk, v_new) + _finite((q * k).sum(-1, keepdim=True)) * v_new
    return steps.unchunk(output), steps.last_states(state, finished) if output_final_state else None


class _Finite(torch.autograd.Function):
    """x with the largest finite numbers for infinities and NaN, and its gradient as it is.

    A matrix product multiplies what comes later by zeros. Where enormous inputs overflow there, 0 times infinity would
    reach back: outputs and gradients would not be causal.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.nan_to_num(nan=torch.finfo(x.dtype).max)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def _finite(x: Tensor) -> Tensor:
    return _Finite.apply(x)  # pyright: ignore[reportReturnType]


class _DecayedProducts(torch.autograd.Function):
    """<x_i 2^(G_i - G_j), k_j> for i > j, zero elsewhere: rows x [..., C, R, K], k and G [..., C, K] -> [..., C, R, C].

    A block of 2n tokens holds two of n tokens on its diagonal and, below them, the pairs of its later half with its
    earlier half. Those are one matrix product, factored around the gate of the later half's first token r,
    2^(G_i - G_r) 2^(G_r - G_j): neither exponent is positive, and nothing later than token i is used. Blocks of 2, 4,
    ... C tokens make up the triangle.

    Autograd would give each factor's exponent its own gradient and carry those of G_r along, which cancel. Here G gets
    what every pair p_ij is owed, grad_ij p_ij to G_i and from G_j, summed by rows and by columns.
    """

    @staticmethod
    def forward(rows: Tensor, k: Tensor, G: Tensor) -> Tensor:
        products = rows.new_zeros(*rows.shape[:-1], k.shape[-2])
        half = 1
        while half < k.shape[-2]:
            late_decay, early_decay = _half_decays(G, half)
            late = (_halves(rows, half, -3)[1] * late_decay.unsqueeze(-2)).flatten(-3, -2)  # [..., C / 2n, n R, K]
            early = _halves(k, half)[0] * early_decay  # [..., C / 2n, n, K]
            _pairs(products, half).copy_((late @ early.mT).unflatten(-2, (half, -1)))
            half *= 2
        return products

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @_without_autocast
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, k, G = ctx.saved_tensors
        d_rows, dk = torch.zeros_like(rows), torch.zeros_like(k)
        half = 1
        while half < k.shape[-2]:
            late_decay, early_decay = _half_decays(G, half)
            late_decay = late_decay.unsqueeze(-2)
            late = (_halves(rows, half, -3)[1] * late_decay).flatten(-3, -2)
            early = _halves(k, half)[0] * early_decay
            d_pairs = _pairs(grad, half).flatten(-3, -2)  # [..., C / 2n, n R, n]
            _halves(d_rows, half, -3)[1].addcmul_((d_pairs @ early).unflatten(-2, (half, -1)), late_decay)
            _halves(dk, half)[0].addcmul_(d_pairs.mT @ late, early_decay)
            half *= 2
        return d_rows, dk, LN_2 * ((rows * d_rows).sum(-2) - k * dk)


def _halves(x: Tensor, half: int, dim: int = -2) -> tuple[Tensor, Tensor]:
    """Views of the earlier and the later half of each block of 2n tokens: [..., C, K] -> twice [..., C / 2n, n, K]."""
    blocks = x.unflatten(dim, (-1, 2, half))
    return blocks.select(dim - 1, 0), blocks.select(dim - 1, 1)


def _half_decays(G: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """2^(G_i - G_r) for the later halves, 2^(G_r - G_j) for the earlier: [..., C / 2n, n, K]."""
    early, late = _halves(G, half)
    anchor = late[..., :1, :]
    return _exp2(late - anchor), _exp2(anchor - early)


def _pairs(products: Tensor, half: int) -> Tensor:
    """A view of the pairs (later half, earlier half) of each block: [..., C, R, C] -> [..., C / 2n, n, R, n]."""
    blocks = products.unflatten(-1, (-1, 2, half)).select(-2, 0).unflatten(-4, (-1, 2, half)).select(-5, 1)
    return blocks.diagonal(0, -5, -2).movedim(-1, -4)  # from [..., C / 2n, n, R, C / 2n, n]


class _UnitLowerSolve(torch.autograd.Function):
    """(I + L)^-1 x by forward substitution, which does not cancel where keys are alike: [..., C, C], [..., C, X].

    What L holds on and above its diagonal is not read, and what its gradient holds there means nothing.
    """

    @staticmethod
    def forward(L: Tensor, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(L, x, upper=False, unitriangular=True)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    @_without_autocast
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        L, y = ctx.saved_tensors
        dx = torch.linalg.solve_triangular(L.mT, grad, upper=True, unitriangular=True)
        return -(dx @ y.mT), dx


class _MatMul(torch.autograd.Function):
    """a @ b for equal batch axes; autograd's own would be cast down by a backward() under autocast."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @_without_autocast
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        return grad @ b.mT if ctx.needs_input_grad[0] else None, a.mT @ grad if ctx.needs_input_grad[1] else None


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return _MatMul.apply(a, b)  # pyright: ignore[reportReturnType]


class _Reorder(torch.autograd.Function):
    """x[order] for a permutation of the first axis; the gradient is then a permutation too, not a scatter."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.order = inputs[1:]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.order
        return _Reorder.apply(grad, inverse, order), None, None  # pyright: ignore[reportReturnType]


# ---- the gates ----


def naive_bounded_gate_cumsum(
    raw_gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    chunk_size: int = 64,
    lower_bound: float = -5.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The bounded gate, ``lower_bound * sigmoid(exp(A_log) (raw + dt_bias))`` in nats, as a cumulative log2 decay.

    Args:
        raw_gate: [B, T, H, K].
        A_log, dt_bias: [H], [H, K].
        chunk_size: a power of two; the sums restart there and at every sequence's start. 1 gives each token's own.
        lower_bound: the strongest decay of a token, in nats; negative.
        cu_seqlens: int32 [N + 1], as in ``naive_recurrent_kda``.

    Returns:
        [B, T, H, K]. A token's log2 decay is floored at -256, where its gradient is zero.
    """
    _check_types("naive_bounded_gate_cumsum", raw_gate, A_log, dt_bias)
    return _gate_cumsum("naive_bounded_gate_cumsum", raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens)


def naive_softplus_gate_cumsum(
    raw_gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The softplus gate, ``-exp(A_log) softplus(raw + dt_bias)`` in nats; see ``naive_bounded_gate_cumsum``."""
    _check_types("naive_softplus_gate_cumsum", raw_gate, A_log, dt_bias)
    return _gate_cumsum("naive_softplus_gate_cumsum", raw_gate, A_log, dt_bias, chunk_size, None, cu_seqlens)


def _log2_decay(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Each token's log2 decay: bounded, or softplus without a lower bound."""
    # Clamped before exp: an infinite exp(A_log) would make NaN of a saturated gate's zero gradient.
    rate = A_log.clamp(max=MAX_A_LOG).exp().unsqueeze(-1)  # [H, 1]
    x: Tensor = _HoldGradient.apply(raw_gate + dt_bias)  # pyright: ignore[reportAssignmentType]
    if lower_bound is not None:
        decay = LOG2_E * lower_bound * (rate * x).sigmoid()
    else:
        x = torch.where(x > -87, x, x.detach())  # further down the slope is 0 in FP32, and rate * gradient may be inf
        decay = -LOG2_E * (rate * torch.logaddexp(x, torch.zeros_like(x)))  # softplus, exact at both ends
    return torch.where(decay > MIN_LOG2_DECAY, decay, MIN_LOG2_DECAY)


class _HoldGradient(torch.autograd.Function):
    """x itself; its gradient is held within GRAD_LIMIT."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clamp(-GRAD_LIMIT, GRAD_LIMIT)


def _gate_cumsum(
    op: str,
    raw_gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    chunk_size: int,
    lower_bound: float | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    _check_chunk_size(op, chunk_size)
    batch, tokens = raw_gate.shape[:2]
    lengths = _lengths(op, cu_seqlens, tokens)
    raw_gate = _to_chunks(
        raw_gate, lengths, chunk_size
    )  # [chunks, C, H, K], before anything is computed: live rows only
    return _from_chunks(_log2_decay(raw_gate, A_log, dt_bias, lower_bound).cumsum(1), batch, tokens, lengths)


# ---- norm and convolution ----


def naive_l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x * rsqrt(sum(x^2) + eps)`` over the last axis."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def naive_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None = "silu",
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The causal depthwise convolution, with SiLU or no activation after it.

    Args:
        x: [B, T, C].
        weight: [C, W]; the last tap meets the current token.
        activation: "silu" or None.
        cu_seqlens: int32 [N + 1], as in ``naive_recurrent_kda``.
        initial_state: [N, W - 1, C], the W - 1 tokens before the first, oldest first; None for zeros.

    Returns:
        The output [B, T, C], and the last W - 1 tokens of each sequence, [N, W - 1, C], or None.
    """
    _check_types("naive_causal_conv1d", x, weight, initial_state)
    batch, tokens, channels = x.shape
    lengths = _lengths("naive_causal_conv1d", cu_seqlens, tokens)
    if lengths is None:
        sequences: Sequence[Tensor] = x.unbind(0)
        lengths = [tokens] * batch
    else:
        sequences = x[0, : sum(lengths)].split(lengths)
    past = weight.shape[1] - 1
    if initial_state is None:
        initial_state = x.new_zeros(len(lengths), past, channels)

    # One run of rows, each sequence after its past. Windows that reach from one sequence into the next are dropped.
    runs = [x.new_zeros(0, channels)]
    cuts = []
    for sequence, state, length in zip(sequences, initial_state, lengths):
        runs += [state, sequence]
        cuts += [length, past]
    run = torch.cat(runs)
    final_state = torch.stack(run.split(cuts)[1::2]) if output_final_state and lengths else None
    if output_final_state and not lengths:
        final_state = initial_state.clone()
    windows = max(run.shape[0] - past, 0)
    run = run.clamp(-(2.0**100), 2.0**100)  # so that no sum overflows: SiLU's slope is no number at infinity
    if x.is_cuda or not windows or not channels:
        y = x.new_zeros(windows, channels)  # by hand: cuDNN's convolution may round FP32 to TF32
        for tap in range(past + 1):
            y = y + weight[:, tap] * run[tap : tap + windows]
    else:
        y = F.conv1d(run.mT[None], weight[:, None], groups=channels)[0].mT
    y = _activate("naive_causal_conv1d", y, activation)
    kept = y.split(cuts[:-1])[::2] if lengths else ()
    nothing = x[:, :0].reshape(0, channels) * weight[:, 0]  # without sequences too, the output has a gradient
    output = torch.cat([nothing, *kept, x.new_zeros(batch * tokens - sum(lengths), channels)])
    return output.reshape(x.shape), final_state


def naive_causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    activation: str | None = "silu",
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token of ``naive_causal_conv1d`` for each of N sequences; ``state`` is updated in place.

    Args:
        x: [N, C].
        weight: [C, W].
        state: [slots, W - 1, C], oldest first.
        state_indices: int32 [N], as in ``naive_recurrent_kda_step``.

    Returns:
        The output [N, C]; zero in skipped rows.
    """
    _check_types("naive_causal_conv1d_step", x, weight, state)
    rows, slots = _live_slots("naive_causal_conv1d_step", state_indices, x.shape[0], state)
    window = torch.cat([state[slots], x[rows].unsqueeze(1)], 1)  # [live, W, C]
    y = _activate("naive_causal_conv1d_step", (window * weight.mT).sum(1), activation)
    state[slots] = window[:, 1:]
    return _scatter_rows(y, rows, x.shape[0])


def _activate(op: str, y: Tensor, activation: str | None) -> Tensor:
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")
    return y if activation is None else y * y.sigmoid()


# ---- the output stage ----


@_without_autocast
def naive_chunk_output(
    q: Tensor,
    v_new: Tensor,
    h: Tensor,
    *,
    a_qk: Tensor | None = None,
    k: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    l2norm_q: bool = False,
) -> Tensor:
    """The last stage of the chunk form: ``scale ((q 2^G) h + tril(a_qk) v_new)``, G being g, gk or zero.

    Args:
        q: [B, T, Hg, K], each of its heads serving H / Hg value heads.
        v_new: [B, T, H, V].
        h: the states at the chunks' starts, [B, chunks, H, K, V]; packed [chunks, H, K, V], sequence after sequence.
        a_qk: [B, T, H, chunk_size], the decayed and not yet scaled products of a token with those of its chunk; what
            lies above the diagonal is not read. None: formed from q, k and g.
        k: [B, T, Hg, K], needed without a_qk.
        g: [B, T, H], one cumulative log2 decay per head, or
        gk: [B, T, H, K], one per key channel; it needs a_qk.
        scale: None for 1 / sqrt(K).
        l2norm_q: scale each row by 1 / sqrt(sum(q^2) + 1e-6), as if q had been L2-normalised.

    Returns:
        o [B, T, H, V].
    """
    _check_types("naive_chunk_output", q, v_new, h, a_qk, k, g, gk)
    batch, tokens, heads, _ = v_new.shape
    lengths = _lengths("naive_chunk_output", cu_seqlens, tokens)

    def chunks(x: Tensor) -> Tensor:  # [B, T, H or Hg, X] -> [chunks, H, C, X]
        x = x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] != heads else x
        return _to_chunks(x, lengths, chunk_size).transpose(1, 2)

    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    rows = chunks(q)
    G = chunks(g.unsqueeze(-1)) if g is not None else chunks(gk) if gk is not None else None
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    if a_qk is not None:
        weights = chunks(a_qk)
    else:
        assert k is not None and gk is None, "without a_qk, k is needed and gk cannot be"
        weights = _matmul(rows, chunks(k).mT)
        if G is not None:  # the exponent is masked: above the diagonal it may be large and positive
            weights = weights * _exp2(torch.where(causal, G - G.mT, 0))
    weights = torch.where(causal, weights, 0)
    if cu_seqlens is None:
        h = h.flatten(0, 1)
    else:
        needed = rows.shape[0]
        if h.shape[0] < needed:
            raise ValueError(f"naive_chunk_output: h must hold {needed} chunks for these sequences, got {h.shape[0]}")
        h = h[:needed]
    output = _matmul(rows if G is None else rows * _exp2(G), h) + _matmul(weights, chunks(v_new))
    if l2norm_q:
        output = output * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return _from_chunks(scale * output.transpose(1, 2), batch, tokens, lengths)


# ---- chunks and packs ----


class _Steps:
    """The order in which a scan meets its tokens: piece after piece, in each step the sequences that still have one.

    A piece is a chunk, or with ``chunk_size`` 1 a token. Sequences run longest first, so that those still running are
    always the first ones; ``running[s]`` counts them at step s.
    """

    def __init__(self, op: str, q: Tensor, cu_seqlens: Tensor | None, chunk_size: int):
        self.chunk_size = chunk_size
        self.batch, self.tokens, self.heads, self.key_width = q.shape
        self.packed = _lengths(op, cu_seqlens, self.tokens)
        lengths = [self.tokens] * self.batch if self.packed is None else self.packed
        pieces = [-(-length // chunk_size) for length in lengths]
        starts = [0]
        for count in pieces:
            starts.append(starts[-1] + count)
        sequences = sorted(range(len(lengths)), key=lambda n: -pieces[n])
        order = []  # of the pieces, which lie sequence after sequence
        live = []  # the tokens that each of them holds
        self.running = []
        for step in range(max(pieces, default=0)):
            running = [n for n in sequences if pieces[n] > step]
            self.running.append(len(running))
            order += [starts[n] + step for n in running]
            live += [min(lengths[n] - step * chunk_size, chunk_size) for n in running]
        self.sequences = torch.tensor(sequences, dtype=torch.long, device=q.device)
        self.order = torch.tensor(order, dtype=torch.long, device=q.device)
        self.inverse = self.order.argsort()
        self.chunk_lengths = torch.tensor(live, dtype=torch.long, device=q.device)

    def chunks(self, x: Tensor) -> Tensor:
        """[B, T, H, X] -> [chunks, H, C, X]."""
        x = _to_chunks(x, self.packed, self.chunk_size).transpose(1, 2)
        return _Reorder.apply(x, self.order, self.inverse)  # pyright: ignore[reportReturnType]

    def unchunk(self, chunks: Tensor) -> Tensor:
        """The inverse of ``chunks``; zeros in rows that belong to no sequence."""
        chunks = _Reorder.apply(chunks, self.inverse, self.order)  # pyright: ignore[reportAssignmentType]
        return _from_chunks(chunks.transpose(1, 2), self.batch, self.tokens, self.packed)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """[B, T, ...] -> for each step [running, ...], where a piece is a token."""
        x = _to_chunks(x, self.packed, 1).squeeze(1)
        return _Reorder.apply(x, self.order, self.inverse).split(self.running)  # pyright: ignore

    def join(self, steps: list[Tensor], like: Tensor) -> Tensor:
        """The inverse of ``split``, for tensors shaped like ``like``."""
        rows = torch.cat([like[:, :0].flatten(0, 1), *steps])
        rows = _Reorder.apply(rows, self.inverse, self.order)  # pyright: ignore[reportAssignmentType]
        return _from_chunks(rows.unsqueeze(1), self.batch, self.tokens, self.packed)

    def first_states(self, initial_state: Tensor | None, v: Tensor) -> Tensor:
        """The states [N, H, K, V], in running order."""
        if initial_state is None:
            return v.new_zeros(len(self.sequences), self.heads, self.key_width, v.shape[-1])
        return initial_state.index_select(0, self.sequences)

    def last_states(self, state: Tensor, finished: list[Tensor]) -> Tensor:
        return torch.cat([state, *reversed(finished)]).index_select(0, self.sequences.argsort())


def _lengths(op: str, cu_seqlens: Tensor | None, tokens: int) -> list[int] | None:
    """The packed sequences' lengths, or None for a dense batch."""
    if cu_seqlens is None:
        return None
    offsets = read_offsets(op, cu_seqlens, tokens)
    return [end - start for start, end in itertools.pairwise(offsets)]


def _to_chunks(x: Tensor, lengths: list[int] | None, size: int) -> Tensor:
    """[B, T, ...] -> [chunks, size, ...], sequence after sequence, each padded with zeros to whole chunks."""
    if lengths is None:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % size])
        return x.reshape(x.shape[0] * (x.shape[1] // size), size, *x.shape[2:])
    x = x[0, : sum(lengths)]
    if size > 1:
        pieces = [x[:0]]
        for sequence, length in zip(x.split(lengths), lengths):
            pieces += [sequence, x.new_zeros(-length % size, *x.shape[1:])]
        x = torch.cat(pieces)
    return x.reshape(x.shape[0] // size, size, *x.shape[1:])


def _from_chunks(chunks: Tensor, batch: int, tokens: int, lengths: list[int] | None) -> Tensor:
    """The inverse of ``_to_chunks``: [chunks, size, ...] -> [B, T, ...], zeros after the last sequence."""
    size = chunks.shape[1]
    if lengths is None:
        padded = -(-tokens // size) * size
        return chunks.reshape(batch, padded, *chunks.shape[2:])[:, :tokens]
    rows = chunks.flatten(0, 1)
    cuts = [cut for length in lengths for cut in (length, -length % size)]
    tail = rows.new_zeros(tokens - sum(lengths), *rows.shape[1:])
    return torch.cat([rows[:0], *(rows.split(cuts)[::2] if cuts else ()), tail]).unsqueeze(0)


def _live_slots(op: str, state_indices: Tensor | None, rows: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rows to step, and their slots: [live], [live]."""
    if state_indices is None:
        all_rows = torch.arange(rows, device=state.device)
        return all_rows, all_rows
    live = (state_indices >= 0).nonzero().squeeze(1)
    slots = state_indices[live].long()
    if slots.numel() and int(slots.max()) >= state.shape[0]:
        raise ValueError(f"{op}: state_indices must be below the {state.shape[0]} slots, got {int(slots.max())}")
    return live, slots


def _scatter_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """The rows put back among ``count``, the others zero."""
    return x.new_zeros(count, *x.shape[1:]).index_copy(0, rows, x)


def _check_types(op: str, *tensors: Tensor | None) -> None:
    dtypes = {t.dtype for t in tensors if t is not None}
    if dtypes not in ({torch.float32}, {torch.float64}):
        raise TypeError(f"{op}: tensors must be all float32 or all float64, got {sorted(map(str, dtypes))}")


def _check_chunk_size(op: str, chunk_size: int) -> None:
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"{op}: chunk_size must be a power of two, got {chunk_size}")
