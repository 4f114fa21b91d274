"""What every operator file shares: argument checks, the choice of implementation, registration.

An operator file reads in this order: Triton kernel, launcher, registration, public function. The public function
checks its arguments on the host, picks an implementation, and calls either

- the reference in plain PyTorch (``impl="reference"``), differentiated by autograd as it stands; or
- the registered operator ``torch.ops.titan_kda.<name>``, opaque to ``torch.compile``.

While ``torch.compile`` traces, the reference too runs behind the registered operator, which takes ``impl`` as its last
argument: a graph then looks the same on every device. Operators have a fixed arity: an output that was not asked for is
an empty tensor, which the public function turns into None.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton import knobs

NAMESPACE = "titan_kda"
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = 1.4426950408889634
MIN_LOG2_DECAY = -256.0
"""A token's log2 decay is floored here: 2^-256 is zero to an FP32 state."""
MAX_KEY_WIDTH = 256
CHUNK_SIZE = 64


# Read once, as @triton.jit reads it; torch.compile cannot trace the look-up.
_INTERPRETED = bool(knobs.runtime.interpret)


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1), and so on CPU tensors."""
    return _INTERPRETED


def implementation(op: str, impl: str | None, device: torch.device | str) -> str:
    """What the public function ``op`` runs for tensors on ``device``: "triton" or "reference".

    Args:
        op: the public function's name, for messages.
        impl: None for "triton" on CUDA tensors and "reference" elsewhere, or one of the two.
        device: the inputs'.

    Raises:
        ValueError: an unknown name, or "triton" for tensors that Triton cannot reach.
    """
    if impl not in (None, "triton", "reference"):
        raise ValueError(f"{op}: impl must be None, 'triton' or 'reference', got {impl!r}")
    on_gpu = torch.device(device).type == "cuda"
    if impl is None:
        return "triton" if on_gpu else "reference"
    if impl == "triton" and not on_gpu and not interpreted():
        raise ValueError(
            f"{op}: impl='triton' needs CUDA tensors, got one on {device} (TRITON_INTERPRET=1, set before "
            "titan_kda.kernels is imported, runs the kernels on the CPU for debugging)"
        )
    return impl


def resolve_impl(op: str, impl: str | None, tensor: Tensor) -> str:
    """The implementation that a call runs, from any of its inputs: see ``implementation``."""
    return implementation(op, impl, tensor.device)


def runs_eagerly() -> bool:
    """Whether the reference may be called as plain PyTorch, rather than behind its registered operator."""
    return not torch.compiler.is_compiling()


def wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# ---- argument checks: each message names the operator, the argument, what it got and what it needs ----


def check_dtype(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {name} must be {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_rank(op: str, name: str, tensor: Tensor, form: str) -> None:
    """``form`` is the shape in words, as "[B, T, H, K]"; its commas give the rank."""
    rank = form.count(",") + 1
    if tensor.dim() != rank:
        raise ValueError(f"{op}: {name} must be {form}, got {tensor.dim()} dimension(s), shape {list(tensor.shape)}")


def check_shape(op: str, name: str, tensor: Tensor, form: str, shape: Sequence[int]) -> None:
    if tensor.dim() != len(shape) or any(have != want for have, want in zip(tensor.shape, shape)):
        raise ValueError(f"{op}: {name} must be {form} = {list(shape)}, got {list(tensor.shape)}")


def check_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like the first input, got {tensor.device}")


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{op}: {name} must be a floating tensor, got {got}")


def check_key_width(op: str, key_width: int) -> None:
    if not 1 <= key_width <= MAX_KEY_WIDTH:
        raise ValueError(f"{op}: K must be from 1 to {MAX_KEY_WIDTH}, got {key_width}")


def check_slots(op: str, state: Tensor, state_indices: Tensor | None, sequences: int, name: str = "state") -> None:
    """Checks that a step can write its N sequences' slots of ``state``, the argument called ``name`` (the indices'
    values stay on the device)."""
    if any(stride == 0 and size > 1 for stride, size in zip(state.stride(), state.shape)):
        raise ValueError(f"{op}: {name} is written to and must not be an expanded tensor, got stride {state.stride()}")
    if state_indices is not None:
        check_dtype(op, "state_indices", state_indices, (torch.int32,))
        check_shape(op, "state_indices", state_indices, "[N]", (sequences,))
        check_device(op, "state_indices", state_indices, state.device)
    elif state.shape[0] < sequences:
        raise ValueError(f"{op}: {name} must have a slot for each of {sequences} sequences, got {state.shape[0]}")


def check_slot_values(op: str, state: Tensor, state_indices: Tensor | None) -> None:
    """Checks that the indices are slots of ``state``; waits for a GPU, as the reference, for which it is, does."""
    highest = int(state_indices.max()) if state_indices is not None and state_indices.numel() else -1
    if highest >= state.shape[0]:
        raise ValueError(f"{op}: state_indices must be below the {state.shape[0]} slots, got {highest}")


def sequence_count(batch: int, cu_seqlens: Tensor | None) -> int:
    """N: the rows of a dense batch, or the packed sequences."""
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def check_cu_seqlens(op: str, cu_seqlens: Tensor, batch: int, device: torch.device) -> int:
    """Checks the form of packed offsets (their values stay on the device) and returns N, the number of sequences."""
    check_dtype(op, "cu_seqlens", cu_seqlens, (torch.int32,))
    check_rank(op, "cu_seqlens", cu_seqlens, "[N + 1]")
    check_device(op, "cu_seqlens", cu_seqlens, device)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens must hold at least the offset 0, got an empty tensor")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{op}: cu_seqlens must be contiguous, got stride {cu_seqlens.stride()}")
    if batch != 1:
        raise ValueError(f"{op}: B must be 1 with cu_seqlens (the sequences lie end to end along T), got B = {batch}")
    return cu_seqlens.shape[0] - 1


def check_lower_bound(op: str, name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a float, got {type(value).__name__}")
    if not -float("inf") < value < 0:
        raise ValueError(f"{op}: {name} must be negative and finite, got {value}")
    return float(value)


def check_core_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate_name: str,
) -> int:
    """Checks the inputs that chunk_kda and recurrent_kda share (CONTRACT sections 2 and 9); returns N."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dtype(op, name, tensor, FLOAT_DTYPES)
    check_dtype(op, gate_name, gate, (torch.float32,))
    check_floating(op, "beta", beta)
    check_rank(op, "q", q, "[B, T, H, K]")
    batch, tokens, heads, key_width = q.shape
    check_key_width(op, key_width)
    check_shape(op, "k", k, "[B, T, H, K]", q.shape)
    check_rank(op, "v", v, "[B, T, H, V]")
    check_shape(op, "v", v, "[B, T, H, V]", (batch, tokens, heads, v.shape[3]))
    if v.shape[3] < 1:
        raise ValueError(f"{op}: V must be at least 1, got {v.shape[3]}")
    check_shape(op, gate_name, gate, "[B, T, H, K]", q.shape)
    check_shape(op, "beta", beta, "[B, T, H]", (batch, tokens, heads))
    for name, tensor in (("k", k), ("v", v), (gate_name, gate), ("beta", beta)):
        check_device(op, name, tensor, q.device)
    sequences = batch if cu_seqlens is None else check_cu_seqlens(op, cu_seqlens, batch, q.device)
    if initial_state is not None:
        check_dtype(op, "initial_state", initial_state, (torch.float32,))
        check_shape(op, "initial_state", initial_state, "[N, H, K, V]", (sequences, heads, key_width, v.shape[3]))
        check_device(op, "initial_state", initial_state, q.device)
    return sequences


def read_offsets(op: str, cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Packed offsets on the host, checked by value: for the reference path alone, since it synchronises.

    Raises:
        ValueError: offsets that do not start at 0, decrease, or end past ``tokens``.
    """
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{op}: cu_seqlens must start at 0, got {offsets[0]}")
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            raise ValueError(f"{op}: cu_seqlens must not decrease, got {offsets[i - 1]} then {offsets[i]} at {i}")
    if offsets[-1] > tokens:
        raise ValueError(f"{op}: cu_seqlens must end at or before T = {tokens}, got {offsets[-1]}")
    return offsets


# ---- registration ----


def register(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Registers ``torch.ops.titan_kda.<name>`` on CPU and CUDA and returns its overload.

    Args:
        schema: the operator's schema, as ``"name(Tensor x, float eps, str impl) -> Tensor"``.
        kernel: the implementation; it must neither return nor alias an input.
        fake: the same outputs as empty tensors, from shapes alone.
        backward, setup_context: as ``torch.library.register_autograd`` takes them; without them the operator does not
            differentiate.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, schema[len(name) :])
    torch.library.impl(qualified, ("cpu", "cuda"), kernel)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def grad_or_none(needed: Sequence[bool], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients in the order of a schema's inputs, None where none was asked for."""
    return [grad if need else None for need, grad in zip(needed, grads)]


def empty_like_optional(tensor: Tensor, wanted: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An output that is empty, [0], unless it was asked for."""
    return torch.empty(list(shape) if wanted else [0], dtype=dtype, device=tensor.device)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """A context in which autocast does nothing on ``tensor``'s device: operators fix their own arithmetic."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):  # meta tensors
        return nullcontext()
    return torch.autocast(device, enabled=False)


def reference_vjp(function: Callable[..., Any], inputs: Sequence[Tensor], grads: Any) -> tuple[Tensor, ...]:
    """Gradients of a reference function for a backward operator, inside which autograd's own recording is off.

    Args:
        function: takes ``inputs`` and returns a tensor or a tuple of tensors.
        inputs: the tensors to differentiate with respect to, in the type to compute in.
        grads: the gradient of the output, or a tuple of them.
    """
    # The guard takes autograd's keys out of those that the dispatcher skips below a registered operator; torch.func.vjp
    # records there too, but not under the modes of torch.library.opcheck.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for key in (
        torch._C.DispatchKey.AutogradCPU,
        torch._C.DispatchKey.AutogradCUDA,
        torch._C.DispatchKey.AutogradOther,
    ):
        keys = keys | torch._C.DispatchKeySet(key)
    skipped = torch._C._dispatch_tls_local_exclude_set() - keys
    recording = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), skipped)
    with without_autocast(inputs[0]), recording, torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grads, allow_unused=True, materialize_grads=True)


def second_order_raises(op: str) -> Callable[..., Any]:
    """The ``backward`` to register on a backward operator: a second-order request fails instead of giving zeros."""

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{op} differentiates once; for higher orders use impl='reference' in eager mode")

    return backward
