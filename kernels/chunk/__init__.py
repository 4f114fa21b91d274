"""chunk_kda: Kimi Delta Attention over chunks of 64 tokens, forward and backward, the operator that trains.

Source: Kimi Linear, arXiv 2510.26692; ``naive_chunk_kda`` in reference.py is the mathematics. Bytes are a token's
and head's, for K = V = 128 in bf16, each tensor counted once.

Forward, two launches:

    prepare.py   per (chunk, head)        reads q, k, v, the cumulative gate, beta               1,282
                 no state needed          writes q 2^G, k 2^(G_last - G), w, u, a_qk             1,152
    scan.py      per (sequence, head,     reads those and each chunk's last gate row             1,160
                 64 value columns)        carries the FP32 state, writes the output                256

A pipeline that wrote the state at every chunk and v_new for an output stage of its own would move 1,500 more. Backward,
five launches; nothing but the inputs is kept from the forward:

    prepare.py          as above, and A = (I + L)^-1 is kept                                     2,562
    backward_scan.py    the forward scan for the states and v_new, and beside it in the same
                        grid the reverse scan for the gradients of the states and dv_new         4,096
    backward_inputs.py  per (chunk, head): the gradients of the scores and of v                  1,932
                        per (chunk, head, 64 channels): those of q, k and the gate               4,112
                        beta's, from its parts in those programs                                    16

Intermediates are in the inputs' type, token-major at padded widths (64, 128, 256); sums, gates and the states carried
are FP32. scores.py tells how pairs of tokens are served without a positive exponent; tiles.py has what the stages
share: where a chunk lies (found on the device from ``cu_seqlens``) and the triangular inverse. ``naive_chunk_kda`` is
the reference, in FP32 whatever the inputs. Both directions are registered operators, so that ``torch.compile`` sees two
nodes.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from .._device import on_device
from .._operator import (
    check_core_inputs,
    check_lower_bound,
    empty_like_optional,
    grad_or_none,
    reference_vjp,
    register,
    resolve_impl,
    runs_eagerly,
    second_order_raises,
    sequence_count,
    wants_grad,
)
from ..reference import naive_chunk_kda, naive_l2norm
from .backward_inputs import input_gradients
from .backward_scan import backward_scan
from .prepare import prepare
from .scan import scan
from .tiles import operand_dtype

# ---- the reference path ----


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    fuse_q_l2norm: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """naive_chunk_kda in FP32, the output in q's type; differentiable."""
    output, final_state = naive_chunk_kda(
        naive_l2norm(q.float()) if fuse_q_l2norm else q.float(),
        k.float(),
        v.float(),
        cumulative_gate,
        beta.float(),
        initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
    )
    return output.to(q.dtype).contiguous(), final_state


def _reference_backward(
    grad_output: Tensor | None,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """The six gradients, from those of either result or of both; that of no initial state is empty."""

    def forward(q, k, v, cumulative_gate, beta, initial_state=None):
        results = _reference(
            q, k, v, cumulative_gate, beta, initial_state, cu_seqlens, output_final_state=grad_final_state is not None
        )
        return tuple(result for result, grad in zip(results, grads) if grad is not None)

    grads = (grad_output, grad_final_state)
    inputs = [x for x in (q, k, v, cumulative_gate, beta, initial_state) if x is not None]
    found = reference_vjp(forward, inputs, tuple(grad for grad in grads if grad is not None))
    found = [grad.contiguous() for grad in found]
    return (*found, q.new_empty(0, dtype=torch.float32)) if initial_state is None else tuple(found)


# ---- the Triton path ----


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    return sequence_count(q.shape[0], cu_seqlens), q.shape[2], q.shape[3], v.shape[3]  # [N, H, K, V]


def _nothing_to_do(v: Tensor, cu_seqlens: Tensor | None) -> bool:
    return v.numel() == 0 or (cu_seqlens is not None and cu_seqlens.shape[0] == 1)


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    fuse_q_l2norm: bool,
    gate_lower_bound: float | None,
) -> tuple[Tensor, Tensor | None]:
    if _nothing_to_do(v, cu_seqlens):
        no_state = cumulative_gate.new_zeros(_state_shape(q, v, cu_seqlens))
        state = no_state if initial_state is None else initial_state.clone()
        return q.new_zeros(v.shape), state if output_final_state else None
    q, k, v, cumulative_gate, beta, initial_state = _contiguous(q, k, v, cumulative_gate, beta, initial_state)
    with on_device(q):
        prepared = prepare(q, k, v, cumulative_gate, beta, cu_seqlens, gate_lower_bound, fuse_q_l2norm=fuse_q_l2norm)
        return scan(
            prepared,
            cumulative_gate,
            v.shape[3],
            initial_state,
            cu_seqlens,
            output_dtype=q.dtype,
            output_final_state=output_final_state,
        )


def _triton_backward(
    grad_output: Tensor | None,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate_lower_bound: float | None,
) -> tuple[Tensor, ...]:
    """The six gradients; that of no initial state is empty."""
    no_state = q.new_empty(0, dtype=torch.float32)
    inputs = (q, k, v, cumulative_gate, beta)
    if _nothing_to_do(v, cu_seqlens) or (grad_output is None and grad_final_state is None):
        if initial_state is not None:
            no_state = torch.zeros_like(initial_state) if grad_final_state is None else grad_final_state.clone()
        return (*(x.new_zeros(x.shape) for x in inputs), no_state)
    q, k, v, cumulative_gate, beta, initial_state = _contiguous(*inputs, initial_state)
    grad_output, grad_final_state = _contiguous(grad_output, grad_final_state)
    # FP16 cannot hold a factor such as 2^-72, and where every gate is strong the gradients of the gate and of the
    # initial state are made of nothing else: its backward runs on FP32 operands.
    dtype = operand_dtype(q, k, v)
    dtype = torch.float32 if dtype == torch.float16 else dtype
    with on_device(q):
        prepared = prepare(q, k, v, cumulative_gate, beta, cu_seqlens, gate_lower_bound, save_inverse=True, dtype=dtype)
        a_qk, a_inv = prepared.a_qk, prepared.a_inv
        h, v_new, dh, dv_new, grad_initial_state = backward_scan(
            prepared, cumulative_gate, v.shape[3], initial_state, cu_seqlens, grad_output, grad_final_state
        )
        del prepared  # the largest intermediates make room for the gradients
        grads = input_gradients(
            q, k, v, cumulative_gate, beta, cu_seqlens, gate_lower_bound, a_qk, a_inv, h, v_new, dh, dv_new, grad_output
        )
    return (*grads, no_state if grad_initial_state is None else grad_initial_state)


# ---- registration ----


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    fuse_q_l2norm: bool,
    gate_lower_bound: float | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    inputs = (q, k, v, cumulative_gate, beta, initial_state, cu_seqlens)
    if impl == "triton":
        output, final_state = _triton(*inputs, output_final_state, fuse_q_l2norm, gate_lower_bound)
    else:
        output, final_state = _reference(*inputs, output_final_state, fuse_q_l2norm)
    return output, q.new_empty(0, dtype=torch.float32) if final_state is None else final_state


def _forward_fake(
    q, k, v, cumulative_gate, beta, initial_state, cu_seqlens, output_final_state, fuse_q_l2norm, gate_lower_bound, impl
):
    state_shape = _state_shape(q, v, cu_seqlens)
    return q.new_empty(v.shape), empty_like_optional(q, output_final_state, state_shape, torch.float32)


def _backward(
    grad_output: Tensor | None,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate_lower_bound: float | None,
    impl: str,
) -> tuple[Tensor, ...]:
    inputs = (q, k, v, cumulative_gate, beta, initial_state, cu_seqlens)
    if impl == "triton":
        return _triton_backward(grad_output, grad_final_state, *inputs, gate_lower_bound)
    return _reference_backward(grad_output, grad_final_state, *inputs)


def _backward_fake(
    grad_output, grad_final_state, q, k, v, cumulative_gate, beta, initial_state, cu_seqlens, gate_lower_bound, impl
):
    inputs = (q, k, v, cumulative_gate, beta)
    grad_initial_state = q.new_empty(0 if initial_state is None else initial_state.shape, dtype=torch.float32)
    return (*(x.new_empty(x.shape) for x in inputs), grad_initial_state)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor cumulative_gate, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens"

_BACKWARD_OP = register(
    f"chunk_kda_backward(Tensor? grad_output, Tensor? grad_final_state, {_INPUTS}, float? gate_lower_bound, str impl) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=second_order_raises("chunk_kda"),
)


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7])
    ctx.gate_lower_bound, ctx.impl = inputs[-2:]


def _autograd(ctx, grad_output: Tensor | None, grad_final_state: Tensor | None):
    grads = _BACKWARD_OP(grad_output, grad_final_state, *ctx.saved_tensors, ctx.gate_lower_bound, ctx.impl)
    return (*grad_or_none(ctx.needs_input_grad[:6], grads), None, None, None, None, None)


_FORWARD_OP = register(
    f"chunk_kda({_INPUTS}, bool output_final_state, bool fuse_q_l2norm, float? gate_lower_bound, str impl) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)


# ---- public function ----


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    fuse_q_l2norm: bool = False,
    gate_lower_bound: float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention in chunks of 64 tokens: for training, and for prompts of more than a few tokens.

    Per sequence and head, an FP32 state S [K, V] is decayed, corrected and read at each token:

        S <- diag(2^g_t) S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T q_t / sqrt(K)

    Source: Kimi Linear, arXiv 2510.26692. Differentiable with respect to the first six arguments.

    Args:
        q, k: [B, T, H, K], bf16, fp16 or fp32, K from 1 to 256; L2-normalised by the caller, not scaled.
        v: [B, T, H, V], bf16, fp16 or fp32.
        cumulative_gate: [B, T, H, K] fp32, the log2 decay summed from the start of each chunk of 64 and of each
            sequence, as ``bounded_gate_cumsum`` and ``softplus_gate_cumsum`` give it. Not the per-token gate that
            ``recurrent_kda`` takes. Any finite values that do not rise inside a chunk, from 0 down.
        beta: [B, T, H], any floating type, past its sigmoid.
        initial_state: [N, H, K, V] fp32, or None for zeros. N is B, or the number of packed sequences.
        cu_seqlens: [N + 1] int32, contiguous: B is 1, and sequence n holds the tokens from cu_seqlens[n] to
            cu_seqlens[n + 1]. From 0, never decreasing; a repeated offset is an empty sequence, whose state passes
            through. Tokens past the last offset are never read, and their outputs and gradients are unspecified.
        output_final_state: whether to return the states after the last tokens.
        fuse_q_l2norm: take raw q and L2-normalise it (eps 1e-6) on the way; for inference, in eager mode.
        gate_lower_bound: a promise that no token decays by more than this many nats (a negative number), and that k's
            entries lie in [-1, 1]; faster kernels may then be used. A broken promise gives unspecified numbers.
        impl: None, "triton" or "reference"; None picks Triton for CUDA tensors.

    Returns:
        The output [B, T, H, V] in q's type, and the final states [N, H, K, V] fp32 or None. A sequence gives the same
        bits in any batch or pack, and no token's depend on later finite values: for that, entries beyond 2^60 (beta:
        2^16) may count as so much. NaN stays NaN.

    Raises:
        ValueError: a shape, rank, head count, device or state of the wrong form; K above 256; B other than 1 with
            cu_seqlens; a gate_lower_bound that is not negative and finite; an unknown impl. On the reference path,
            offsets that do not start at 0, decrease, or end past T.
        TypeError: a wrong dtype.
        RuntimeError: fuse_q_l2norm with grad mode on and an input that requires grad; a second-order gradient through
            anything but the reference in eager mode.
    """
    inputs = (q, k, v, cumulative_gate, beta, initial_state, cu_seqlens)
    options = (output_final_state, fuse_q_l2norm, gate_lower_bound, impl)
    if not fuse_q_l2norm:
        return _checked_call(inputs, *options)
    if torch.compiler.is_compiling():
        torch._dynamo.skip_frame(msg="chunk_kda: fuse_q_l2norm is eager-only; under torch.compile, use l2norm(q)")
    # After the skip this frame runs as plain Python, but frames below it would be compiled. Only where the compiler has
    # been loaded, which takes seconds, can it be at work.
    dynamo = sys.modules.get("torch._dynamo")
    call = _checked_call if dynamo is None else dynamo.disable(_checked_call)
    return call(inputs, *options)


def _checked_call(
    inputs: tuple[Any, ...],
    output_final_state: bool,
    fuse_q_l2norm: bool,
    gate_lower_bound: float | None,
    impl: str | None,
) -> tuple[Tensor, Tensor | None]:
    check_core_inputs("chunk_kda", *inputs, gate_name="cumulative_gate")
    if gate_lower_bound is not None:
        gate_lower_bound = check_lower_bound("chunk_kda", "gate_lower_bound", gate_lower_bound)
    if fuse_q_l2norm and wants_grad(*inputs[:6]):
        raise RuntimeError("chunk_kda: fuse_q_l2norm has no backward, and an input requires grad; use l2norm(q)")
    impl = resolve_impl("chunk_kda", impl, inputs[0])
    if impl == "reference" and runs_eagerly():
        return _reference(*inputs, output_final_state=output_final_state, fuse_q_l2norm=fuse_q_l2norm)
    output, final_state = _FORWARD_OP(*inputs, output_final_state, fuse_q_l2norm, gate_lower_bound, impl)
    return output, final_state if output_final_state else None
