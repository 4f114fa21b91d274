"""recurrent_kda and recurrent_kda_step: the KDA recurrence token by token, for inference.

Source: Kimi Linear, arXiv 2510.26692. Per sequence and head, with an FP32 state S of shape [K, V] and log2 decay g_t,

    S <- diag(2^g_t) S;    d <- beta_t (v_t - S^T k_t);    S <- S + k_t d^T;    o_t <- S^T q_t / sqrt(K)

A column of S (one value channel) meets the others nowhere, so a program owns one sequence, one head and a block of
value channels: it holds the tile [K, BLOCK_V] of S in registers, reads it once, walks its tokens in order and writes
the tile once. No program waits for another. Bytes per sequence and head: 8 K V for the state in and out (128 KiB at
K = V = 128), and per token q, k, v, gate and beta read and the output written (1.5 KB in bf16). So one token, a decode
step, is bound by bandwidth; many tokens, by the chain from one token's state to the next, which the loop keeps short by
loading a token's row while the one before it is worked on.

``recurrent_kda_step`` does the same for one token with the state pool updated in place, and takes what a layer holds
before l2norm, the gate function and the sigmoid: one launch for four.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, dependent_launch, flag, mask_if, on_device, power_of_2, wait_for_earlier_launches
from ._operator import (
    FLOAT_DTYPES,
    check_core_inputs,
    check_device,
    check_dtype,
    check_floating,
    check_key_width,
    check_lower_bound,
    check_rank,
    check_shape,
    check_slot_values,
    check_slots,
    empty_like_optional,
    register,
    resolve_impl,
    runs_eagerly,
    sequence_count,
    wants_grad,
    without_autocast,
)
from .configs import RecurrentConfig, recurrent_config, recurrent_step_config
from .gate import gate_log2_decay, gate_slope
from .reference import naive_recurrent_kda, naive_recurrent_kda_step

GATES = ("bounded", "softplus")
L2NORM_EPS = 1e-6

# ---- Triton kernels ----


@triton.jit
def _sum_over_k(x):
    """The sum of x [K, BLOCK_V] over K in one order for every tile, so that the scan's tile may follow the batch size
    and T and change no bit: rows k, k + 8, k + 16 ... one after another, then the eight sums pairwise, 4, 2 and 1
    apart. (The compiler lays a tile out with at most eight threads along K, so the long sums stay inside a thread.)
    """
    x = tl.sum(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), axis=0)
    x = tl.sum(tl.reshape(x, [2, 4, x.shape[1]]), axis=0)
    x = tl.sum(tl.reshape(x, [2, 2, x.shape[1]]), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def advance(state, q, k, v, decay, beta):
    """One token of the recurrence on a state tile [K, BLOCK_V], before the output's scale; every operand is FP32."""
    state *= decay[:, None]
    residual = beta * (v - _sum_over_k(state * k[:, None]))
    state += k[:, None] * residual[None, :]
    return state, _sum_over_k(state * q[:, None])


@triton.jit
def _load_row(q_ptrs, k_ptrs, v_ptrs, gate_ptrs, beta_ptr, in_k, in_v):
    q = tl.load(q_ptrs, mask=in_k, other=0.0)
    k = tl.load(k_ptrs, mask=in_k, other=0.0)
    v = tl.load(v_ptrs, mask=in_v, other=0.0)
    gate = tl.load(gate_ptrs, mask=in_k, other=0.0)
    return q, k, v, gate, tl.load(beta_ptr)


# What two calls that hand the state over may differ in (T, whether there is an initial state) is a runtime argument
# that is never specialised on: no variant in which the compiler fuses or orders the loop's arithmetic in another way.
# One token is the exception: without the loop and the rows ahead, four programs of 64 columns fit an SM, not three. Its
# arithmetic is the same function's, with sums in the same order; tests hold its bits to those of a scan.
@triton.jit(do_not_specialize=["T", "H", "has_initial_state", "has_final_state"])
def _recurrent_kda_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, H, V]
    gate_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, H]
    initial_state_ptr,  # [N, H, K, V]
    final_state_ptr,  # [N, H, K, V]
    output_ptr,  # [B, T, H, V]
    cu_seqlens_ptr,  # [N + 1]
    q_stride_b,
    q_stride_t,
    q_stride_h,
    q_stride_k,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    k_stride_k,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    v_stride_v,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    g_stride_k,
    beta_stride_b,
    beta_stride_t,
    beta_stride_h,
    T,
    H,
    scale,
    has_initial_state,
    has_final_state,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,  # T is 1, and nothing packed
    DEPENDENT: tl.constexpr,
):
    wait_for_earlier_launches(DEPENDENT)
    pid = tl.program_id(0)
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head_row = pid // v_blocks  # sequence * H + head
    head = (head_row % H).to(tl.int64)
    sequence = (head_row // H).to(tl.int64)
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + sequence)
        end = tl.load(cu_seqlens_ptr + sequence + 1)
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= T), "recurrent_kda: cu_seqlens must rise from 0 to T")
        begin = tl.minimum(tl.maximum(begin, 0), T)
        length = tl.minimum(tl.maximum(end, begin), T) - begin
        batch = tl.zeros_like(sequence)
        first = begin.to(tl.int64)
    else:
        length = T
        batch = sequence
        first = tl.zeros_like(sequence)

    rows = tl.arange(0, BLOCK_K)
    columns = (pid % v_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = rows < K
    in_v = columns < V
    in_state = in_k[:, None] & in_v[None, :]
    state_offsets = head_row.to(tl.int64) * (K * V) + rows[:, None] * V + columns[None, :]
    state = tl.load(initial_state_ptr + state_offsets, mask=mask_if(in_state, has_initial_state), other=0.0)

    wide_rows = rows.to(tl.int64)
    wide_columns = columns.to(tl.int64)
    q_ptrs = q_ptr + batch * q_stride_b + first * q_stride_t + head * q_stride_h + wide_rows * q_stride_k
    k_ptrs = k_ptr + batch * k_stride_b + first * k_stride_t + head * k_stride_h + wide_rows * k_stride_k
    v_ptrs = v_ptr + batch * v_stride_b + first * v_stride_t + head * v_stride_h + wide_columns * v_stride_v
    g_ptrs = gate_ptr + batch * g_stride_b + first * g_stride_t + head * g_stride_h + wide_rows * g_stride_k
    beta_ptrs = beta_ptr + batch * beta_stride_b + first * beta_stride_t + head * beta_stride_h
    output_ptrs = output_ptr + ((batch * T + first) * H + head) * V + wide_columns

    if ONE_TOKEN:
        q, k, v, gate, beta = _load_row(q_ptrs, k_ptrs, v_ptrs, g_ptrs, beta_ptrs, in_k, in_v)
        state, output = advance(
            state, q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), tl.exp2(gate), beta.to(tl.float32)
        )
        tl.store(output_ptrs, (output * scale).to(output_ptr.dtype.element_ty), mask=in_v)
    elif length > 0:
        # A row takes longer to arrive than a token takes to work on: rows are asked for two tokens ahead. The last
        # tokens ask for the last row again, since nothing past the sequence's end may be read.
        q, k, v, gate, beta = _load_row(q_ptrs, k_ptrs, v_ptrs, g_ptrs, beta_ptrs, in_k, in_v)
        row = tl.minimum(length - 1, 1).to(tl.int64)
        next_q, next_k, next_v, next_gate, next_beta = _load_row(
            q_ptrs + row * q_stride_t,
            k_ptrs + row * k_stride_t,
            v_ptrs + row * v_stride_t,
            g_ptrs + row * g_stride_t,
            beta_ptrs + row * beta_stride_t,
            in_k,
            in_v,
        )
        for t in range(0, length):
            row = tl.minimum(length - 1, t + 2).to(tl.int64)
            far_q, far_k, far_v, far_gate, far_beta = _load_row(
                q_ptrs + row * q_stride_t,
                k_ptrs + row * k_stride_t,
                v_ptrs + row * v_stride_t,
                g_ptrs + row * g_stride_t,
                beta_ptrs + row * beta_stride_t,
                in_k,
                in_v,
            )
            state, output = advance(
                state,
                q.to(tl.float32),
                k.to(tl.float32),
                v.to(tl.float32),
                tl.exp2(gate),  # a gate of -inf gives 0: a full reset, since the state is finite
                beta.to(tl.float32),
            )
            tl.store(output_ptrs, (output * scale).to(output_ptr.dtype.element_ty), mask=in_v)
            output_ptrs += H * V
            q, k, v, gate, beta = next_q, next_k, next_v, next_gate, next_beta
            next_q, next_k, next_v, next_gate, next_beta = far_q, far_k, far_v, far_gate, far_beta

    tl.store(final_state_ptr + state_offsets, state, mask=mask_if(in_state, has_final_state))


@triton.jit
def l2_normalised(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@triton.jit(do_not_specialize=["slots", "H"])
def _recurrent_kda_step_kernel(
    q_ptr,  # [N, H, K]
    k_ptr,  # [N, H, K]
    v_ptr,  # [N, H, V]
    raw_gate_ptr,  # [N, H, K]
    beta_logits_ptr,  # [N, H]
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H, K]
    state_ptr,  # [slots, H, K, V]
    state_indices_ptr,  # [N]
    output_ptr,  # [N, H, V]
    q_stride_n,
    q_stride_h,
    q_stride_k,
    k_stride_n,
    k_stride_h,
    k_stride_k,
    v_stride_n,
    v_stride_h,
    v_stride_v,
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    DENSE_TILE: tl.constexpr,
    BOUNDED: tl.constexpr,
    EPS: tl.constexpr,
):
    pid = tl.program_id(0)
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head_row = pid // v_blocks  # sequence * H + head
    head = (head_row % H).to(tl.int64)
    sequence = (head_row // H).to(tl.int64)
    if HAS_INDICES:
        slot = tl.load(state_indices_ptr + sequence * indices_stride).to(tl.int64)
    else:
        slot = sequence
    tl.device_assert(slot < slots, "recurrent_kda_step: state_indices must be below the number of slots")

    rows = tl.arange(0, BLOCK_K)
    columns = (pid % v_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = rows < K
    in_v = columns < V
    wide_rows = rows.to(tl.int64)
    wide_columns = columns.to(tl.int64)
    # The token's rows do not wait for the slot: they are asked for before the state's tile, which does.
    q = tl.load(q_ptr + sequence * q_stride_n + head * q_stride_h + wide_rows * q_stride_k, mask=in_k, other=0.0)
    k = tl.load(k_ptr + sequence * k_stride_n + head * k_stride_h + wide_rows * k_stride_k, mask=in_k, other=0.0)
    v = tl.load(v_ptr + sequence * v_stride_n + head * v_stride_h + wide_columns * v_stride_v, mask=in_v, other=0.0)
    raw_ptrs = raw_gate_ptr + sequence * gate_stride_n + head * gate_stride_h + wide_rows * gate_stride_k
    raw = tl.load(raw_ptrs, mask=in_k, other=0.0)
    bias = tl.load(dt_bias_ptr + head * bias_stride_h + wide_rows * bias_stride_k, mask=in_k, other=0.0)
    beta = tl.load(beta_logits_ptr + sequence * beta_stride_n + head * beta_stride_h)
    A_log = tl.load(A_log_ptr + head * A_stride)

    slot_of_column = slot + tl.zeros_like(wide_columns)
    live = (slot_of_column >= 0) & (slot_of_column < slots)
    in_state = in_k[:, None] & (in_v & live)[None, :]
    state_ptrs = state_ptr + slot * state_stride_n + head * state_stride_h
    if DENSE_TILE:  # state[slot, head] is one contiguous [K, V] block
        state_ptrs += rows[:, None] * V + columns[None, :]
    else:
        state_ptrs += wide_rows[:, None] * state_stride_k + wide_columns[None, :] * state_stride_v
    state = tl.load(state_ptrs, mask=in_state, other=0.0)

    log2_decay = gate_log2_decay(raw.to(tl.float32) + bias, gate_slope(A_log), lower_bound, BOUNDED)
    state, output = advance(
        state,
        l2_normalised(q.to(tl.float32), EPS),
        l2_normalised(k.to(tl.float32), EPS),
        v.to(tl.float32),
        tl.exp2(log2_decay),
        beta_scale * tl.sigmoid(beta.to(tl.float32)),
    )
    output = tl.where(live, output * scale, 0.0)
    tl.store(output_ptr + head_row.to(tl.int64) * V + wide_columns, output.to(output_ptr.dtype.element_ty), mask=in_v)
    tl.store(state_ptrs, state, mask=in_state)


# ---- launchers ----


def block_k(key_width: int) -> int:
    return max(power_of_2(key_width), 16)


def _fused(key_width: int) -> bool:
    """Whether multiplies and adds may be fused. Where a thread adds two or four products, the compiler's choice of the
    product that stays unrounded was seen to go with the tile (Triton 3.6); in longer sums it does not."""
    return key_width > 32


def launch_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    config: RecurrentConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """recurrent_kda on checked arguments; ``config`` overrides the tuned launch configuration."""
    batch, tokens, heads, key_width = q.shape
    value_width = v.shape[3]
    sequences = sequence_count(batch, cu_seqlens)
    output = torch.empty(batch, tokens, heads, value_width, dtype=q.dtype, device=q.device)
    final_state = empty_like_optional(
        q, output_final_state, (sequences, heads, key_width, value_width), torch.float32
    )  # [N, H, K, V]
    if sequences * heads == 0 or (tokens == 0 and not output_final_state):
        return output, final_state
    if initial_state is not None and (not initial_state.is_contiguous() or initial_state.data_ptr() % 16):
        initial_state = initial_state.clone(memory_format=torch.contiguous_format)
    if config is None:
        one_token = batch * tokens <= sequences
        config = recurrent_config(key_width, value_width, sequences * heads, one_token, cu_seqlens is not None)
    unrolled = config.unrolled and cu_seqlens is None and tokens == 1
    blocks = cdiv(value_width, config.block_v)
    with on_device(q):
        _recurrent_kda_kernel[(sequences * heads * blocks,)](
            q,
            k,
            v,
            gate,
            beta,
            final_state if initial_state is None else initial_state,
            final_state,
            output,
            cu_seqlens,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *gate.stride(),
            *beta.stride(),
            tokens,
            heads,
            1.0 / math.sqrt(key_width),
            flag(initial_state is not None),
            flag(output_final_state),
            K=key_width,
            V=value_width,
            BLOCK_K=block_k(key_width),
            BLOCK_V=config.block_v,
            PACKED=cu_seqlens is not None,
            ONE_TOKEN=unrolled,
            num_warps=config.num_warps,
            maxnreg=config.registers,
            **dependent_launch(q, unrolled),
            enable_fp_fusion=_fused(key_width),
        )
    return output, final_state


def launch_recurrent_kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """recurrent_kda_step on checked arguments; ``config`` overrides the tuned launch configuration."""
    sequences, heads, key_width = q.shape
    value_width = v.shape[2]
    output = torch.empty(sequences, heads, value_width, dtype=q.dtype, device=q.device)
    if output.numel() == 0:
        return output
    config = config or recurrent_step_config(key_width, value_width)
    blocks = cdiv(value_width, config.block_v)
    with on_device(q):
        _recurrent_kda_step_kernel[(sequences * heads * blocks,)](
            q,
            k,
            v,
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


def _recurrent_kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    with without_autocast(q):
        output, final_state = naive_recurrent_kda(
            q.float(),
            k.float(),
            v.float(),
            gate,
            beta.float(),
            initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
        )
        return output.to(q.dtype), final_state


def recurrent_kda_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    gate: str,
    lower_bound: float,
    beta_scale: float,
    op: str = "recurrent_kda_step",
) -> Tensor:
    check_slot_values(op, state, state_indices)
    with without_autocast(q):
        output = naive_recurrent_kda_step(
            q.float(),
            k.float(),
            v.float(),
            raw_gate.float(),
            beta_logits.float(),
            A_log,
            dt_bias,
            state,
            state_indices=state_indices,
            gate=gate,
            lower_bound=lower_bound,
            beta_scale=beta_scale,
        )
        return output.to(q.dtype).contiguous()


# ---- registration ----


def _recurrent_kda_kernel_impl(
    q, k, v, gate, beta, initial_state, cu_seqlens, output_final_state, impl
) -> tuple[Tensor, Tensor]:
    arguments = (q, k, v, gate, beta, initial_state, cu_seqlens, output_final_state)
    if impl == "triton":
        return launch_recurrent_kda(*arguments)
    output, final_state = _recurrent_kda_reference(*arguments)
    if final_state is None:
        return output.contiguous(), empty_like_optional(q, False, (), torch.float32)
    return output.contiguous(), final_state.contiguous()


def _recurrent_kda_fake(q, k, v, gate, beta, initial_state, cu_seqlens, output_final_state, impl):
    sequences = sequence_count(q.shape[0], cu_seqlens)
    output = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    shape = (sequences, q.shape[2], q.shape[3], v.shape[3])
    return output, empty_like_optional(q, output_final_state, shape, torch.float32)


_recurrent_kda_op = register(
    "recurrent_kda(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, "
    "bool output_final_state, str impl) -> (Tensor, Tensor)",
    _recurrent_kda_kernel_impl,
    _recurrent_kda_fake,
)


def _recurrent_kda_step_impl(
    q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, state_indices, gate, lower_bound, beta_scale, impl
) -> Tensor:
    run = launch_recurrent_kda_step if impl == "triton" else recurrent_kda_step_reference
    return run(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, state_indices, gate, lower_bound, beta_scale)


def _recurrent_kda_step_fake(
    q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, state_indices, gate, lower_bound, beta_scale, impl
):
    return torch.empty(v.shape, dtype=q.dtype, device=q.device)


_recurrent_kda_step_op = register(
    "recurrent_kda_step(Tensor q, Tensor k, Tensor v, Tensor raw_gate, Tensor beta_logits, Tensor A_log, "
    "Tensor dt_bias, Tensor(a!) state, Tensor? state_indices, str gate, float lower_bound, float beta_scale, "
    "str impl) -> Tensor",
    _recurrent_kda_step_impl,
    _recurrent_kda_step_fake,
)


# ---- argument checks ----


def check_step(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    gate: str,
    lower_bound: float,
    beta_scale: float,
) -> tuple[float, float]:
    """Checks a decode step's inputs; returns lower_bound and beta_scale as floats."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("raw_gate", raw_gate)):
        check_dtype(op, name, tensor, FLOAT_DTYPES)
    check_floating(op, "beta_logits", beta_logits)
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias), ("state", state)):
        check_dtype(op, name, tensor, (torch.float32,))
    check_rank(op, "q", q, "[N, H, K]")
    sequences, heads, key_width = q.shape
    check_key_width(op, key_width)
    check_shape(op, "k", k, "[N, H, K]", q.shape)
    check_rank(op, "v", v, "[N, H, V]")
    value_width = v.shape[2]
    check_shape(op, "v", v, "[N, H, V]", (sequences, heads, value_width))
    if value_width < 1:
        raise ValueError(f"{op}: V must be at least 1, got {value_width}")
    check_shape(op, "raw_gate", raw_gate, "[N, H, K]", q.shape)
    check_shape(op, "beta_logits", beta_logits, "[N, H]", (sequences, heads))
    check_shape(op, "A_log", A_log, "[H]", (heads,))
    check_shape(op, "dt_bias", dt_bias, "[H, K]", (heads, key_width))
    check_rank(op, "state", state, "[slots, H, K, V]")
    check_shape(op, "state", state, "[slots, H, K, V]", (state.shape[0], heads, key_width, value_width))
    named = [("k", k), ("v", v), ("raw_gate", raw_gate), ("beta_logits", beta_logits), ("A_log", A_log)]
    for name, tensor in (*named, ("dt_bias", dt_bias), ("state", state)):
        check_device(op, name, tensor, q.device)
    check_slots(op, state, state_indices, sequences)
    if gate not in GATES:
        raise ValueError(f"{op}: gate must be 'bounded' or 'softplus', got {gate!r}")
    lower_bound = check_lower_bound(op, "lower_bound", lower_bound)
    if isinstance(beta_scale, bool) or not isinstance(beta_scale, (int, float)):
        raise TypeError(f"{op}: beta_scale must be a float, got {type(beta_scale).__name__}")
    if not math.isfinite(beta_scale):
        raise ValueError(f"{op}: beta_scale must be finite, got {beta_scale}")
    return lower_bound, float(beta_scale)


# ---- public functions ----


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token, for inference (Kimi Linear, arXiv 2510.26692).

    All arithmetic is FP32. On the Triton path two calls with the state handed over give the bits of one call, and a
    sequence has the same bits in any batch or pack.

    Args:
        q, k: [B, T, H, K], bf16, fp16 or fp32; K <= 256. The scale 1 / sqrt(K) is applied inside, no norm is.
        v: [B, T, H, V], bf16, fp16 or fp32.
        gate: [B, T, H, K], fp32, the log2 decay of each token, at most 0; -inf clears the channel. It is the gate
            function's result with ``chunk_size=1``, where ``chunk_kda`` takes the one with ``chunk_size=64``.
        beta: [B, T, H], any floating dtype, already past its sigmoid.
        initial_state: [N, H, K, V], fp32, or None for zeros. N is B, or ``len(cu_seqlens) - 1``.
        cu_seqlens: [N + 1], int32, on q's device: B is 1 and sequence n holds tokens ``cu_seqlens[n]`` to
            ``cu_seqlens[n + 1]``. What lies past the last offset is never read, and the output there is unspecified.
        output_final_state: whether to return the state after the last token.
        impl: None for "triton" on CUDA tensors and "reference" elsewhere, or either name.

    Returns:
        The output, [B, T, H, V] in q's dtype, and the final state, [N, H, K, V] fp32, or None. The final state shares
        no storage with the initial one.

    Raises:
        ValueError: shapes, devices, or offsets (the reference path reads them) that break the rules above.
        TypeError: a dtype outside the list.
        RuntimeError: grad mode is on and an input requires grad, unless ``impl="reference"`` is named, which
            differentiates when run eagerly. ``chunk_kda`` is the operator that trains.
    """
    op = "recurrent_kda"
    check_core_inputs(op, q, k, v, gate, beta, initial_state, cu_seqlens, "gate")
    chosen = resolve_impl(op, impl, q)
    if wants_grad(q, k, v, gate, beta, initial_state) and (impl != "reference" or not runs_eagerly()):
        raise RuntimeError(
            f"{op} is for inference and does not differentiate, but an input requires grad: use chunk_kda (with the "
            "cumulative gate), or torch.no_grad(); impl='reference', run eagerly, differentiates too"
        )
    if chosen == "reference" and runs_eagerly():
        return _recurrent_kda_reference(q, k, v, gate, beta, initial_state, cu_seqlens, output_final_state)
    output, final_state = _recurrent_kda_op(q, k, v, gate, beta, initial_state, cu_seqlens, output_final_state, chosen)
    return output, final_state if output_final_state else None


def recurrent_kda_step(
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
    impl: str | None = None,
) -> Tensor:
    """One decode step of Kimi Delta Attention in one launch, on a pool of states updated in place.

    What l2norm of q and k, the gate function, the sigmoid of beta and ``recurrent_kda`` on one token would do one after
    another (Kimi Linear, arXiv 2510.26692), all in FP32. A sequence has the same bits in any batch.

    Args:
        q, k: [N, H, K], bf16, fp16 or fp32, not normalised; K <= 256.
        v: [N, H, V], bf16, fp16 or fp32.
        raw_gate: [N, H, K], bf16, fp16 or fp32, the gate's logits.
        beta_logits: [N, H], any floating dtype; beta is ``beta_scale * sigmoid(beta_logits)``.
        A_log, dt_bias: [H] and [H, K], fp32, the gate's parameters.
        state: [slots, H, K, V], fp32, updated in place.
        state_indices: [N], int32, each sequence's slot; None means that sequence i uses slot i. A negative index is a
            padding row: its output is zero and no state is read or written. Indices are unique. One at or past
            ``slots`` is a device assert in debug runs (TRITON_DEBUG=1), and else treated as padding.
        gate: "bounded", ``lower_bound * sigmoid(exp(A_log) * (raw_gate + dt_bias))`` nats a token, or "softplus",
            ``-exp(A_log) * softplus(raw_gate + dt_bias)``.
        lower_bound: negative and finite; the bounded gate's.
        beta_scale: 2 where beta may reach 2 (negative eigenvalues), else 1.
        impl: None for "triton" on CUDA tensors and "reference" elsewhere, or either name.

    Returns:
        The output, [N, H, V], in q's dtype.

    Raises:
        ValueError: shapes or devices that break the rules above, an unknown gate, a bad lower_bound or beta_scale.
        TypeError: a dtype outside the list.
        RuntimeError: grad mode is on and an input requires grad, unless ``impl="reference"`` is named, which
            differentiates when run eagerly. ``chunk_kda`` is the operator that trains.
    """
    op = "recurrent_kda_step"
    tensors = (q, k, v, raw_gate, beta_logits, A_log, dt_bias, state)
    settings = (state_indices, gate, *check_step(op, *tensors, state_indices, gate, lower_bound, beta_scale))
    chosen = resolve_impl(op, impl, q)
    if wants_grad(*tensors) and (impl != "reference" or not runs_eagerly()):
        raise RuntimeError(
            f"{op} is for inference and does not differentiate, but an input requires grad: use chunk_kda to train, "
            "or torch.no_grad() around the step; impl='reference', run eagerly, differentiates too"
        )
    if chosen == "reference" and runs_eagerly():
        return recurrent_kda_step_reference(*tensors, *settings)
    return _recurrent_kda_step_op(*tensors, *settings, chosen)
