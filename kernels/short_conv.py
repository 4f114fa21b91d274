"""causal_conv1d and causal_conv1d_step: the depthwise causal convolution before q, k and v, and its decode step."""

import torch
from torch import Tensor

from ._operator import (
    FLOAT_DTYPES,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_rank,
    check_shape,
    grad_or_none,
    reference_vjp,
    register,
    resolve_impl,
    runs_eagerly,
    second_order_raises,
    wants_grad,
    without_autocast,
)
from .reference import naive_causal_conv1d, naive_causal_conv1d_step

ACTIVATIONS = ("silu", None)

# ---- registration ----


def _reference(x, weight, activation, cu_seqlens, initial_state, output_final_state):
    with without_autocast(x):
        output, final_state = naive_causal_conv1d(
            x.float(),
            weight.float(),
            activation=activation,
            cu_seqlens=cu_seqlens,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=output_final_state,
        )
    return output.to(x.dtype), None if final_state is None else final_state.to(x.dtype)


def _state_shape(x, weight, cu_seqlens):
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, weight.shape[1] - 1, x.shape[2]  # [N, W - 1, C]


def _forward(x, weight, activation, cu_seqlens, initial_state, output_final_state, impl):
    output, final_state = _reference(x, weight, activation, cu_seqlens, initial_state, output_final_state)
    return output.contiguous(), x.new_empty([0]) if final_state is None else final_state.contiguous()


def _forward_fake(x, weight, activation, cu_seqlens, initial_state, output_final_state, impl):
    return x.new_empty(x.shape), x.new_empty(_state_shape(x, weight, cu_seqlens) if output_final_state else [0])


def _backward(grad, grad_final_state, x, weight, activation, cu_seqlens, initial_state, output_final_state, impl):
    def function(x, weight, initial_state=None):
        output, final_state = naive_causal_conv1d(
            x,
            weight,
            activation=activation,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
        return (output, final_state) if output_final_state else (output,)

    inputs = (x, weight) if initial_state is None else (x, weight, initial_state)
    grads = (grad, grad_final_state) if output_final_state else (grad,)
    dx, dweight, *rest = reference_vjp(function, [t.float() for t in inputs], tuple(g.float() for g in grads))
    dinitial = rest[0].to(x.dtype).contiguous() if rest else x.new_empty([0])
    return dx.to(x.dtype).contiguous(), dweight.to(x.dtype).contiguous(), dinitial


def _backward_fake(grad, grad_final_state, x, weight, activation, cu_seqlens, initial_state, *_):
    state_shape = [0] if initial_state is None else initial_state.shape
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(state_shape)


_BACKWARD_OP = register(
    "causal_conv1d_backward(Tensor grad, Tensor grad_final_state, Tensor x, Tensor weight, str? activation, "
    "Tensor? cu_seqlens, Tensor? initial_state, bool output_final_state, str impl) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=second_order_raises("causal_conv1d"),
)


def _setup_context(ctx, inputs, output):
    x, weight, ctx.activation, cu_seqlens, initial_state, ctx.output_final_state, ctx.impl = inputs
    ctx.save_for_backward(x, weight, cu_seqlens, initial_state)


def _autograd_backward(ctx, grad, grad_final_state):
    x, weight, cu_seqlens, initial_state = ctx.saved_tensors
    dx, dweight, dinitial = _BACKWARD_OP(
        grad, grad_final_state, x, weight, ctx.activation, cu_seqlens, initial_state, ctx.output_final_state, ctx.impl
    )
    dinitial = dinitial if ctx.needs_input_grad[4] else None
    return *grad_or_none(ctx.needs_input_grad[:2], (dx, dweight)), None, None, dinitial, None, None


_OP = register(
    "causal_conv1d(Tensor x, Tensor weight, str? activation, Tensor? cu_seqlens, Tensor? initial_state, "
    "bool output_final_state, str impl) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_autograd_backward,
    setup_context=_setup_context,
)


def _step_reference(x, weight, state, activation, state_indices):
    with without_autocast(x):
        wide_state = state.float()  # state itself if it is FP32
        output = naive_causal_conv1d_step(
            x.float(), weight.float(), wide_state, activation=activation, state_indices=state_indices
        )
        if wide_state is not state:
            state.copy_(wide_state)  # every entry is one of x's or state's own: the round trip is exact
    return output.to(x.dtype)


def _step(x, weight, state, activation, state_indices, impl):
    return _step_reference(x, weight, state, activation, state_indices).contiguous()


_STEP_OP = register(
    "causal_conv1d_step(Tensor x, Tensor weight, Tensor(a!) state, str? activation, Tensor? state_indices, str impl) "
    "-> Tensor",
    _step,
    lambda x, *_: x.new_empty(x.shape),
)

# ---- public functions ----


def _check(op, x, form, weight, activation) -> None:
    check_dtype(op, "x", x, FLOAT_DTYPES)
    check_rank(op, "x", x, form)
    check_dtype(op, "weight", weight, (x.dtype,))
    check_rank(op, "weight", weight, "[C, W]")
    check_shape(op, "weight", weight, "[C, W]", (x.shape[-1], weight.shape[1]))
    check_device(op, "weight", weight, x.device)
    if weight.shape[1] < 1:
        raise ValueError(f"{op}: weight must have at least one tap, got shape {list(weight.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None = "silu",
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution along T: ``y[t] = act(sum_w weight[:, w] * x[t - (W - 1) + w])``.

    The rows before a sequence's first are its ``initial_state``, or zero; no sequence sees another. Part of KDA's
    layer (Kimi Linear, arXiv 2510.26692).

    Args:
        x: [B, T, C], bf16, fp16 or fp32. The arithmetic is FP32.
        weight: [C, W], x's dtype; the last tap meets the current token.
        activation: "silu" or None.
        cu_seqlens: offsets of packed sequences, [N + 1], int32, contiguous; B is then 1, and rows past the last offset
            are neither read nor defined in the output.
        initial_state: the W - 1 rows before each sequence, oldest first, [N, W - 1, C], x's dtype; N is B, or
            len(cu_seqlens) - 1.
        output_final_state: whether to return the same of each sequence's end.
        impl: None, "triton" or "reference".

    Returns:
        The output, [B, T, C] in x's dtype, and the final state, [N, W - 1, C] (storage of its own), or None.
        Differentiates with respect to x, weight and initial_state.

    Raises:
        ValueError: a shape, device, activation or impl that breaks the above.
        TypeError: a dtype that does.
    """
    op = "causal_conv1d"
    _check(op, x, "[B, T, C]", weight, activation)
    sequences = x.shape[0] if cu_seqlens is None else check_cu_seqlens(op, cu_seqlens, x.shape[0], x.device)
    if initial_state is not None:
        check_dtype(op, "initial_state", initial_state, (x.dtype,))
        check_shape(op, "initial_state", initial_state, "[N, W - 1, C]", (sequences, weight.shape[1] - 1, x.shape[2]))
        check_device(op, "initial_state", initial_state, x.device)
    impl = resolve_impl(op, impl, x, triton_ready=False)
    if impl == "reference" and runs_eagerly():
        return _reference(x, weight, activation, cu_seqlens, initial_state, output_final_state)
    output, final_state = _OP(x, weight, activation, cu_seqlens, initial_state, output_final_state, impl)
    return output, final_state if output_final_state else None


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
    _check(op, x, "[N, C]", weight, activation)
    check_dtype(op, "state", state, (x.dtype,))
    check_rank(op, "state", state, "[slots, W - 1, C]")
    check_shape(op, "state", state, "[slots, W - 1, C]", (state.shape[0], weight.shape[1] - 1, x.shape[1]))
    check_device(op, "state", state, x.device)
    if state_indices is not None:
        check_dtype(op, "state_indices", state_indices, (torch.int32,))
        check_shape(op, "state_indices", state_indices, "[N]", (x.shape[0],))
        check_device(op, "state_indices", state_indices, x.device)
    elif x.shape[0] > state.shape[0]:
        raise ValueError(f"{op}: state must have a slot for each of {x.shape[0]} sequences, got {state.shape[0]}")
    if wants_grad(x, weight, state) and not (impl == "reference" and runs_eagerly()):
        raise RuntimeError(
            f"{op} is for inference and an input requires grad: train with causal_conv1d (and chunk_kda), or call it "
            "under torch.no_grad(); only impl='reference', in eager mode, differentiates"
        )
    impl = resolve_impl(op, impl, x, triton_ready=False)
    if impl == "reference" and runs_eagerly():
        return _step_reference(x, weight, state, activation, state_indices)
    return _STEP_OP(x, weight, state, activation, state_indices, impl)
