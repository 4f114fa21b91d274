"""recurrent_kda_conv_step: a decode step of the whole core in one launch, the convolutions' caches included.

Source: Kimi Linear, arXiv 2510.26692. For each sequence and head: the short convolutions of q, k and v on the token's
projections (``causal_conv1d_step`` with SiLU), rounded to the projections' types as that operator rounds them, then
everything that ``recurrent_kda_step`` does. One launch for four, and q, k and v do not go through memory between them.

Every value column needs the whole convolved rows of q and k, whose caches are advanced in place. So one program owns a
sequence and a head, all of V: no other program reads what it writes, and inside it a barrier stands between the loads
of the caches and the stores (a row's entry may be loaded by several threads). It walks V in blocks where the state's
tile does not fit its registers. Beside the step's bytes: 2 (W - 1) + 1 rows of 2 K + V entries.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import mask_if, on_device, power_of_2
from ._operator import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_rank,
    check_shape,
    check_slots,
    register,
    resolve_impl,
    runs_eagerly,
    wants_grad,
)
from .configs import RecurrentConfig, recurrent_conv_step_config
from .gate import gate_log2_decay, gate_slope
from .recurrent import L2NORM_EPS, advance, block_k, check_step, l2_normalised, recurrent_kda_step_reference
from .short_conv import check_taps
from .short_conv_step import advance_window, convolution_step_reference, filter_window, load_taps, load_window

# ---- Triton kernel ----


@triton.jit
def _convolved(run, taps, W: tl.constexpr):
    """The window's convolution and SiLU, rounded to the rows' type as causal_conv1d_step's output is."""
    return filter_window(run, taps, True, W).to(run[0].dtype).to(tl.float32)


@triton.jit(do_not_specialize=["slots", "H"])
def _recurrent_kda_conv_step_kernel(
    q_ptr,  # [N, H * K]
    k_ptr,  # [N, H * K]
    v_ptr,  # [N, H * V]
    q_weight_ptr,  # [H * K, W]
    k_weight_ptr,  # [H * K, W]
    v_weight_ptr,  # [H * V, W]
    q_cache_ptr,  # [slots, W - 1, H * K]
    k_cache_ptr,  # [slots, W - 1, H * K]
    v_cache_ptr,  # [slots, W - 1, H * V]
    raw_gate_ptr,  # [N, H, K]
    beta_logits_ptr,  # [N, H]
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H, K]
    state_ptr,  # [slots, H, K, V]
    state_indices_ptr,  # [N]
    output_ptr,  # [N, H, V]
    q_stride_n,
    q_stride_c,
    k_stride_n,
    k_stride_c,
    v_stride_n,
    v_stride_c,
    q_cache_stride_n,
    q_cache_stride_w,
    q_cache_stride_c,
    k_cache_stride_n,
    k_cache_stride_w,
    k_cache_stride_c,
    v_cache_stride_n,
    v_cache_stride_w,
    v_cache_stride_c,
    gate_stride_n,
    gate_stride_h,
    gate_stride_k,
    beta_stride_n,
    beta_stride_h,
    A_stride,
    bias_stride_h,
    bias_stride_k,
    state_stride_n,
    state_stride_h,
    state_stride_k,
    state_stride_v,
    indices_stride,
    slots,
    H,
    scale,
    lower_bound,
    beta_scale,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    DENSE_TILE: tl.constexpr,
    BOUNDED: tl.constexpr,
    EPS: tl.constexpr,
):
    pid = tl.program_id(0)  # sequence * H + head
    head = (pid % H).to(tl.int64)
    sequence = (pid // H).to(tl.int64)
    if HAS_INDICES:
        slot = tl.load(state_indices_ptr + sequence * indices_stride).to(tl.int64)
    else:
        slot = sequence
    tl.device_assert(slot < slots, "recurrent_kda_conv_step: state_indices must be below the number of slots")
    is_live = (slot >= 0) & (slot < slots)

    rows = tl.arange(0, BLOCK_K)
    in_k = rows < K
    live_k = mask_if(in_k, is_live)
    wide_rows = rows.to(tl.int64)
    channels = head * K + wide_rows
    q_cache_ptrs = q_cache_ptr + slot * q_cache_stride_n + channels * q_cache_stride_c
    k_cache_ptrs = k_cache_ptr + slot * k_cache_stride_n + channels * k_cache_stride_c
    q_x_ptrs = q_ptr + sequence * q_stride_n + channels * q_stride_c
    k_x_ptrs = k_ptr + sequence * k_stride_n + channels * k_stride_c
    q_run = load_window(q_x_ptrs, q_cache_ptrs, q_cache_stride_w, live_k, W)
    k_run = load_window(k_x_ptrs, k_cache_ptrs, k_cache_stride_w, live_k, W)
    q_taps = load_taps(q_weight_ptr + head * (K * W), rows, in_k, W, W_PAD)
    k_taps = load_taps(k_weight_ptr + head * (K * W), rows, in_k, W, W_PAD)
    raw_ptrs = raw_gate_ptr + sequence * gate_stride_n + head * gate_stride_h + wide_rows * gate_stride_k
    raw = tl.load(raw_ptrs, mask=in_k, other=0.0)
    bias = tl.load(dt_bias_ptr + head * bias_stride_h + wide_rows * bias_stride_k, mask=in_k, other=0.0)
    beta = tl.load(beta_logits_ptr + sequence * beta_stride_n + head * beta_stride_h)
    A_log = tl.load(A_log_ptr + head * A_stride)

    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    for v_block in range(v_blocks):
        columns = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = columns < V
        live_v = mask_if(in_v, is_live)
        wide_columns = columns.to(tl.int64)
        v_channels = head * V + wide_columns
        v_cache_ptrs = v_cache_ptr + slot * v_cache_stride_n + v_channels * v_cache_stride_c
        v_x_ptrs = v_ptr + sequence * v_stride_n + v_channels * v_stride_c
        v_run = load_window(v_x_ptrs, v_cache_ptrs, v_cache_stride_w, live_v, W)
        v_taps = load_taps(v_weight_ptr + head * (V * W), columns, in_v, W, W_PAD)

        in_state = in_k[:, None] & live_v[None, :]
        state_ptrs = state_ptr + slot * state_stride_n + head * state_stride_h
        if DENSE_TILE:  # state[slot, head] is one contiguous [K, V] block
            state_ptrs += rows[:, None] * V + columns[None, :]
        else:
            state_ptrs += wide_rows[:, None] * state_stride_k + wide_columns[None, :] * state_stride_v
        state = tl.load(state_ptrs, mask=in_state, other=0.0)

        # The same in every turn, and hoisted out of the loop; written here so that the state's loads come first.
        log2_decay = gate_log2_decay(raw.to(tl.float32) + bias, gate_slope(A_log), lower_bound, BOUNDED)
        state, output = advance(
            state,
            l2_normalised(_convolved(q_run, q_taps, W), EPS),
            l2_normalised(_convolved(k_run, k_taps, W), EPS),
            _convolved(v_run, v_taps, W),
            tl.exp2(log2_decay),
            beta_scale * tl.sigmoid(beta.to(tl.float32)),
        )
        output = tl.where(live_v, output * scale, 0.0)
        output_ptrs = output_ptr + pid.to(tl.int64) * V + wide_columns
        tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=in_v)
        tl.store(state_ptrs, state, mask=in_state)
        # A cache's entry may be held by several threads: none may still have to read it.
        tl.debug_barrier()
        advance_window(v_cache_ptrs, v_cache_stride_w, v_run, live_v, W)
    advance_window(q_cache_ptrs, q_cache_stride_w, q_run, live_k, W)
    advance_window(k_cache_ptrs, k_cache_stride_w, k_run, live_k, W)


# ---- launcher ----


def launch_recurrent_kda_conv_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    gate: str,
    lower_bound: float,
    beta_scale: float,
    config: RecurrentConfig | None = None,
) -> Tensor:
    """recurrent_kda_conv_step on checked arguments; ``config`` overrides the tuned launch configuration."""
    _, heads, key_width, value_width = state.shape
    sequences = q.shape[0]
    width = q_weight.shape[1]
    output = torch.empty(sequences, heads, value_width, dtype=q.dtype, device=q.device)
    if output.numel() == 0:
        return output
    config = config or recurrent_conv_step_config(key_width, value_width)
    with on_device(q):
        _recurrent_kda_conv_step_kernel[(sequences * heads,)](
            q,
            k,
            v,
            q_weight.contiguous(),
            k_weight.contiguous(),
            v_weight.contiguous(),
            q_cache,
            k_cache,
            v_cache,
            raw_gate,
            beta_logits,
            A_log,
            dt_bias,
            state,
            state_indices,
            output,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *q_cache.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            *raw_gate.stride(),
            *beta_logits.stride(),
            *A_log.stride(),
            *dt_bias.stride(),
            *state.stride(),
            0 if state_indices is None else state_indices.stride(0),
            state.shape[0],
            heads,
            1.0 / math.sqrt(key_width),
            lower_bound,
            beta_scale,
            K=key_width,
            V=value_width,
            W=width,
            W_PAD=power_of_2(width),
            BLOCK_K=block_k(key_width),
            BLOCK_V=config.block_v,
            HAS_INDICES=state_indices is not None,
            DENSE_TILE=state.stride()[2:] == (value_width, 1),
            BOUNDED=gate == "bounded",
            EPS=L2NORM_EPS,
            num_warps=config.num_warps,
            maxnreg=config.registers,
        )
    return output


# ---- the reference on the table's types ----


def _conv_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    gate: str,
    lower_bound: float,
    beta_scale: float,
) -> Tensor:
    _, heads, key_width, value_width = state.shape
    op = "recurrent_kda_conv_step"
    q, k, v = (
        convolution_step_reference(x, weight, cache, "silu", state_indices, op).unflatten(1, (heads, width))
        for x, weight, cache, width in (
            (q, q_weight, q_cache, key_width),
            (k, k_weight, k_cache, key_width),
            (v, v_weight, v_cache, value_width),
        )
    )
    return recurrent_kda_step_reference(
        q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, state_indices, gate, lower_bound, beta_scale, op
    )


# ---- registration ----


def _conv_step(*arguments) -> Tensor:
    *arguments, impl = arguments
    return (launch_recurrent_kda_conv_step if impl == "triton" else _conv_step_reference)(*arguments)


def _conv_step_fake(q, *arguments):
    state = arguments[12]
    return torch.empty(q.shape[0], state.shape[1], state.shape[3], dtype=q.dtype, device=q.device)


_OP = register(
    "recurrent_kda_conv_step(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor v_weight, "
    "Tensor(a!) q_cache, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor raw_gate, Tensor beta_logits, Tensor A_log, "
    "Tensor dt_bias, Tensor(d!) state, Tensor? state_indices, str gate, float lower_bound, float beta_scale, "
    "str impl) -> Tensor",
    _conv_step,
    _conv_step_fake,
)


# ---- public function ----


def _check_convolution(op, name, x, weight, cache, shape, slots) -> None:
    channels = shape[1]
    check_shape(op, name, x, f"[N, H * {'V' if name == 'v' else 'K'}]", shape)
    check_dtype(op, f"{name}_weight", weight, (x.dtype,))
    check_rank(op, f"{name}_weight", weight, "[C, W]")
    check_shape(op, f"{name}_weight", weight, "[C, W]", (channels, weight.shape[1]))
    if weight.shape[1] < 1:
        raise ValueError(f"{op}: {name}_weight must have at least one tap, got shape {list(weight.shape)}")
    check_dtype(op, f"{name}_cache", cache, (x.dtype,))
    check_shape(op, f"{name}_cache", cache, "[slots, W - 1, C]", (slots, weight.shape[1] - 1, channels))
    check_device(op, f"{name}_weight", weight, x.device)
    check_device(op, f"{name}_cache", cache, x.device)


def recurrent_kda_conv_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
    impl: str | None = None,
) -> Tensor:
    """One decode step of a layer's core in one launch: the short convolutions, then ``recurrent_kda_step``.

    What ``causal_conv1d_step`` with SiLU on each of q, k and v and ``recurrent_kda_step`` on their results would do
    one after another (Kimi Linear, arXiv 2510.26692). A sequence has the same bits in any batch.

    Args:
        q, k: [N, H * K], bf16, fp16 or fp32: the token's projections, not yet convolved; K <= 256.
        v: [N, H * V], bf16, fp16 or fp32.
        q_weight, k_weight, v_weight: [H * K, W], [H * K, W] and [H * V, W], each in the type of its rows; the last tap
            meets the current token.
        q_cache, k_cache, v_cache: [slots, W - 1, H * K], twice, and [slots, W - 1, H * V], in the types of their rows,
            oldest row first, advanced in place.
        raw_gate, beta_logits, A_log, dt_bias, gate, lower_bound, beta_scale: as ``recurrent_kda_step`` takes them.
        state: [slots, H, K, V], fp32, updated in place.
        state_indices: [N], int32, each sequence's slot in the state and in the caches, unique; None means that sequence
            i uses slot i. A negative index is a padding row: its output is zero and nothing of it is read or written.
            One at or past ``slots`` is a device assert in debug runs (TRITON_DEBUG=1), and else treated as padding.
        impl: None for "triton" on CUDA tensors and "reference" elsewhere, or either name.

    Returns:
        The output, [N, H, V], in q's dtype.

    Raises:
        ValueError: shapes or devices that break the rules above, an unknown gate, a bad lower_bound or beta_scale.
        TypeError: a dtype outside the list.
        RuntimeError: grad mode is on and an input requires grad, unless ``impl="reference"`` is named, which
            differentiates when run eagerly. ``causal_conv1d`` and ``chunk_kda`` are the operators that train.
    """
    op = "recurrent_kda_conv_step"
    check_dtype(op, "state", state, (torch.float32,))
    check_rank(op, "state", state, "[slots, H, K, V]")
    slots, heads, key_width, value_width = state.shape
    check_dtype(op, "q", q, FLOAT_DTYPES)
    check_rank(op, "q", q, "[N, H * K]")
    rows = ((q, q_weight, q_cache, key_width), (k, k_weight, k_cache, key_width), (v, v_weight, v_cache, value_width))
    for name, (x, weight, cache, width) in zip("qkv", rows):
        check_dtype(op, name, x, FLOAT_DTYPES)
        _check_convolution(op, name, x, weight, cache, (q.shape[0], heads * width), slots)
        check_slots(op, cache, state_indices, q.shape[0], f"{name}_cache")
    if not q_weight.shape[1] == k_weight.shape[1] == v_weight.shape[1]:
        taps = [weight.shape[1] for weight in (q_weight, k_weight, v_weight)]
        raise ValueError(f"{op}: q_weight, k_weight and v_weight must have as many taps each, got {taps}")
    q_heads, k_heads, v_heads = (x.unflatten(1, (heads, width)) for x, _, _, width in rows)
    step = (raw_gate, beta_logits, A_log, dt_bias, state)
    lower_bound, beta_scale = check_step(
        op, q_heads, k_heads, v_heads, *step, state_indices, gate, lower_bound, beta_scale
    )
    settings = (state_indices, gate, lower_bound, beta_scale)
    tensors = (q, k, v, q_weight, k_weight, v_weight, q_cache, k_cache, v_cache, *step)
    chosen = resolve_impl(op, impl, q)
    if wants_grad(*tensors) and (impl != "reference" or not runs_eagerly()):
        raise RuntimeError(
            f"{op} is for inference and does not differentiate, but an input requires grad: use causal_conv1d and "
            "chunk_kda to train, or torch.no_grad() around the step; impl='reference', run eagerly, differentiates too"
        )
    if chosen == "triton":
        check_taps(op, q_weight)
    if chosen == "reference" and runs_eagerly():
        return _conv_step_reference(*tensors, *settings)
    return _OP(*tensors, *settings, chosen)
