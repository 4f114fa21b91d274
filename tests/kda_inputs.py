"""Inputs for KDA's core operators, and the gate's sums and differences, written without the code under test."""

import itertools

import torch

LOG2_E = 1.4426950408889634
NAMES = ("q", "k", "v", "gate", "beta", "initial_state")


def offsets(lengths):
    """Packed sequences' lengths -> cu_seqlens."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def core_inputs(
    batch,
    tokens,
    heads,
    key_width,
    value_width,
    *,
    sequences=None,
    dtype=torch.float32,
    gate="mixed",
    keys="random",
    seed=0,
):
    """q, k, v, gate (per token, log2, FP32), beta, initial_state (FP32) by name.

    Args:
        dtype: of q, k, v and beta; with float64 everything is.
        gate: nats a token, or "mixed": from almost none to about -5 nats, differing by channel.
        keys: "random" unit vectors, or "silu", the L2 norm of SiLU outputs, as a layer makes them.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(x):
        x = x * x.sigmoid() if keys == "silu" else x
        return torch.nn.functional.normalize(x, dim=-1)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (batch, tokens, heads)
    if gate == "mixed":
        nats = -5 * torch.rand(*shape, key_width, generator=generator, dtype=torch.float64) ** 6
    else:
        nats = torch.full((*shape, key_width), float(gate), dtype=torch.float64)
    return dict(
        q=unit(normal(*shape, key_width)).to(dtype),
        k=unit(normal(*shape, key_width)).to(dtype),
        v=normal(*shape, value_width).to(dtype),
        gate=(nats * LOG2_E).to(wide),
        beta=normal(*shape).sigmoid().to(dtype),
        initial_state=normal(batch if sequences is None else sequences, heads, key_width, value_width).to(wide),
    )


def chunks(shape, cu_seqlens=None, size=64):
    """(batch entry, slice of tokens) of every chunk."""
    if cu_seqlens is None:
        spans = [(b, 0, shape[1]) for b in range(shape[0])]
    else:
        spans = [(0, start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]
    for b, start, end in spans:
        for first in range(start, end, size):
            yield b, slice(first, min(first + size, end))


def cumulative(gate, cu_seqlens=None, size=64):
    """The per-token gate summed inside each chunk."""
    total = torch.zeros_like(gate)
    for b, rows in chunks(gate.shape, cu_seqlens, size):
        total[b, rows] = gate[b, rows].cumsum(0)
    return total


def per_token(grad, cu_seqlens=None, size=64):
    """From the gradient of the cumulative gate, that of the per-token gate: the reverse sum inside each chunk."""
    total = torch.zeros_like(grad)
    for b, rows in chunks(grad.shape, cu_seqlens, size):
        total[b, rows] = grad[b, rows].flip(0).cumsum(0).flip(0)
    return total


def differences(cumulative_gate, cu_seqlens=None, size=64):
    """The inverse of ``cumulative``."""
    gate = torch.zeros_like(cumulative_gate)
    for b, rows in chunks(gate.shape, cu_seqlens, size):
        gate[b, rows] = torch.diff(cumulative_gate[b, rows], dim=0, prepend=torch.zeros_like(gate[b, rows][:1]))
    return gate


def to_chunk(inputs, cu_seqlens=None):
    """The same inputs with the cumulative gate that the chunk form takes."""
    inputs = {"cumulative_gate" if name == "gate" else name: x for name, x in inputs.items()}
    inputs["cumulative_gate"] = cumulative(inputs["cumulative_gate"], cu_seqlens)
    return inputs


def results(function, inputs, cu_seqlens=None, grad_output=None, grad_state=None, wrt=None):
    """Output, final state, and by name the gradients of (output, final state) contracted with the two gradients given.

    A gradient that is None leaves its result out of the loss. ``wrt`` names the inputs to differentiate; None: all.
    """
    leaves = {name: x.detach().clone().requires_grad_(wrt is None or name in wrt) for name, x in inputs.items()}
    output, state = function(**leaves, cu_seqlens=cu_seqlens, output_final_state=True)
    pairs = [(x, grad) for x, grad in ((output, grad_output), (state, grad_state)) if grad is not None]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad([x for x, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True)
    found = {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), grads)}
    return output.detach(), state.detach(), found
