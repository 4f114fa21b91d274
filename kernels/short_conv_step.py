"""causal_conv1d_step: a decode step of the short convolution, on a pool of caches updated in place.

Source: Kimi Linear, arXiv 2510.26692. For each sequence the W - 1 rows of its cache and the token's own make the window
of causal_conv1d (short_conv.py), whose bits the output has; then the oldest row leaves the cache, the token's enters. A
program owns a sequence and BLOCK channels, each thread channels of its own, so that a thread stores only where it
alone has loaded. The token and the W - 1 rows are read, the output and as many rows written: 2 W rows of C.
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)

import triton
import triton.language as tl
from torch import Tensor

from ._device import Launch, logistic, mask_if, on_device, power_of_2
from ._operator import (
    LOG2_E,
    check_device,
    check_dtype,
    check_rank,
    check_shape,
    check_slot_values,
    check_slots,
    register,
    resolve_impl,
    runs_eagerly,
    wants_grad,
    without_autocast,
)
from .reference import naive_causal_conv1d_step
from .short_conv import check_convolution, check_taps, in_words, load_taps_by_channel

_LOG2_E = tl.constexpr(LOG2_E)

# ---- Triton kernel ----


@triton.jit
def load_taps(weight_ptr, channels, in_channels, W: tl.constexpr, W_PAD: tl.constexpr):
    """The weight as W blocks of channels in FP32; read as one tile, since a channel's taps lie side by side."""
    columns = tl.arange(0, W_PAD)
    ptrs = weight_ptr + channels[:, None] * W + columns[None, :]
    tile = tl.load(ptrs, mask=in_channels[:, None] & (columns < W)[None, :], other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.sum(tl.where(columns[None, :] == w, tile, 0.0), axis=1),)
    return taps


@triton.jit
def load_window(x_ptrs, state_ptrs, state_stride_w, live, W: tl.constexpr):
    """The W rows that a decode step's convolution sees, oldest first: the state's W - 1 and the token's own."""
    run = ()
    stride = tl.cast(state_stride_w, tl.int64)
    for w in tl.static_range(W - 1):
        run = run + (tl.load(state_ptrs + w * stride, mask=live, other=0.0),)
    return run + (tl.load(x_ptrs, mask=live, other=0.0),)


@triton.jit
def filter_window(run, taps, SILU: tl.constexpr, W: tl.constexpr):
    """A window's convolution and activation, in FP32."""
    y = taps[0] * run[0].to(tl.float32)
    for w in tl.static_range(1, W):
        y = tl.fma(taps[w], run[w].to(tl.float32), y)
    if SILU:
        y = y * logistic(y * _LOG2_E)
    return y


@triton.jit
def advance_window(state_ptrs, state_stride_w, run, live, W: tl.constexpr):
    """The window without its oldest row, into the state. Loads of the state by other threads must be over."""
    stride = tl.cast(state_stride_w, tl.int64)
    for w in tl.static_range(W - 1):
        tl.store(state_ptrs + w * stride, run[w + 1], mask=live)


@triton.jit(do_not_specialize=["slots"])
def _causal_conv1d_step_kernel(
    x_ptr,  # [N, C]
    weight_ptr,  # [C, W]
    state_ptr,  # [slots, W - 1, C]
    state_indices_ptr,  # [N]
    output_ptr,  # [N, C]
    x_stride_n,
    x_stride_c,
    state_stride_n,
    state_stride_w,
    state_stride_c,
    indices_stride,
    slots,
    C,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    WORDS: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(C, BLOCK)
    sequence = (pid // blocks).to(tl.int64)
    channels = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_channels = channels < C
    wide_channels = channels.to(tl.int64)
    if WORDS:  # asked for first: the rows wait for the slot
        taps = load_taps_by_channel(weight_ptr, channels, in_channels, W, WORDS)
    if HAS_INDICES:
        slot = tl.load(state_indices_ptr + sequence * indices_stride).to(tl.int64)
        tl.device_assert(slot < slots, "causal_conv1d_step: state_indices must be below the number of slots")
    else:
        slot = sequence
    live = mask_if(in_channels, (slot >= 0) & (slot < slots))
    state_ptrs = state_ptr + slot * state_stride_n + wide_channels * state_stride_c
    x_ptrs = x_ptr + sequence * x_stride_n + wide_channels * x_stride_c
    run = load_window(x_ptrs, state_ptrs, state_stride_w, live, W)
    if not WORDS:
        taps = load_taps(weight_ptr, channels, in_channels, W, W_PAD)
    y = tl.where(live, filter_window(run, taps, SILU, W), 0.0).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + sequence * C + channels, y, mask=in_channels)
    advance_window(state_ptrs, state_stride_w, run, live, W)


# ---- launcher ----

# Four channels a thread: 8-byte accesses in bf16.
_STEP = Launch(rows=1, warps=4, per_thread=4, span=1)


def _step_triton(x, weight, state, activation, state_indices, launch=_STEP):
    sequences, channels = x.shape
    width = weight.shape[1]
    output = x.new_empty(x.shape)
    if x.numel() == 0:
        return output
    block, blocks, warps = launch.over(channels, width)
    weight = weight.contiguous()
    with on_device(x):
        _causal_conv1d_step_kernel[(sequences * blocks,)](
            x,
            weight,
            state,
            state_indices,
            output,
            *x.stride(),
            *state.stride(),
            0 if state_indices is None else state_indices.stride(0),
            state.shape[0],
            channels,
            W=width,
            W_PAD=power_of_2(width),
            BLOCK=block,
            SILU=activation == "silu",
            HAS_INDICES=state_indices is not None,
            WORDS=in_words(weight),
            num_warps=warps,
            maxnreg=launch.registers,
        )
    return output


# ---- registration ----


def convolution_step_reference(x, weight, state, activation, state_indices, op="causal_conv1d_step"):
    check_slot_values(op, state, state_indices)
    with without_autocast(x):
        wide_state = state.float()  # state itself if it is FP32
        output = naive_causal_conv1d_step(
            x.float(), weight.float(), wide_state, activation=activation, state_indices=state_indices
        )
        if wide_state is not state:
            state.copy_(wide_state)  # every entry is one of x's or state's own: the round trip is exact
    return output.to(x.dtype)


def _step(x, weight, state, activation, state_indices, impl):
    if impl == "triton":
        return _step_triton(x, weight, state, activation, state_indices)
    return convolution_step_reference(x, weight, state, activation, state_indices).contiguous()


_STEP_OP = register(
    "causal_conv1d_step(Tensor x, Tensor weight, Tensor(a!) state, str? activation, Tensor? state_indices, str impl) "
    "-> Tensor",
    _step,
    lambda x, *_: x.new_empty(x.shape),
)

# ---- public function ----


def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    activation: str | None = "silu",
    state_indices: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """One token of :func:`causal_conv1d` for each of N sequences, with a pool of their states updated in place.

    Args:
        x: the new rows, [N, C], bf16, fp16 or fp32.
        weight: [C, W], x's dtype.
        state: [slots, W - 1, C], x's dtype, oldest row first; each named slot drops its oldest row and takes x's.
        activation: "silu" or None.
        state_indices: the slot of each sequence, [N], int32, unique; without it sequence i has slot i. A negative index
            marks a padding row: its output is zero, and nothing of it is read or written. One at or past ``slots`` is a
            device assert in debug runs (TRITON_DEBUG=1), and a padding row otherwise.
        impl: None, "triton" or "reference".

    Returns:
        The output, [N, C], x's dtype.

    Raises:
        ValueError: a shape, device, activation or impl that breaks the above.
        TypeError: a dtype that does.
        RuntimeError: an input requires grad with grad mode on: train with causal_conv1d, as with chunk_kda. Only an
            explicit impl="reference", in eager mode, differentiates.
    """
    op = "causal_conv1d_step"
    check_convolution(op, x, "[N, C]", weight, activation)
    check_dtype(op, "state", state, (x.dtype,))
    check_rank(op, "state", state, "[slots, W - 1, C]")
    check_shape(op, "state", state, "[slots, W - 1, C]", (state.shape[0], weight.shape[1] - 1, x.shape[1]))
    check_device(op, "state", state, x.device)
    check_slots(op, state, state_indices, x.shape[0])
    if wants_grad(x, weight, state) and not (impl == "reference" and runs_eagerly()):
        raise RuntimeError(
            f"{op} is for inference and an input requires grad: train with causal_conv1d (and chunk_kda), or call it "
            "under torch.no_grad(); only impl='reference', in eager mode, differentiates"
        )
    impl = resolve_impl(op, impl, x)
    if impl == "triton":
        check_taps(op, weight)
    if impl == "reference" and runs_eagerly():
        return convolution_step_reference(x, weight, state, activation, state_indices)
    return _STEP_OP(x, weight, state, activation, state_indices, impl)
