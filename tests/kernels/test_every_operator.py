"""Rules that hold for every operator alike, on tiny inputs: bad input, autocast, the tensors' own device."""

import dataclasses

import pytest
import torch
import triton.runtime.interpreter as interpreter
from kda_inputs import core_inputs, offsets, to_chunk
from output_inputs import stage_inputs
from yardstick import check

import titan_kda.kernels as kernels
from titan_kda.kernels import _operator

ON_GPU = torch.cuda.is_available()
LENGTHS = [2, 0, 3]
TOKENS = sum(LENGTHS)
WRITTEN = ("state", "q_cache", "k_cache", "v_cache")
DIFFERENTIABLE = ("chunk_kda", "bounded_gate_cumsum", "softplus_gate_cumsum", "l2norm", "causal_conv1d")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_inputs(name):
    """A packed call's arguments but ``cu_seqlens``, by name."""
    sequences = len(LENGTHS)
    if name in ("chunk_kda", "recurrent_kda"):
        inputs = core_inputs(1, TOKENS, 1, 12, 9, sequences=sequences)
        inputs = to_chunk(inputs, offsets(LENGTHS)) if name == "chunk_kda" else inputs
        return inputs | {"output_final_state": True}
    if name.endswith("gate_cumsum"):
        return dict(raw_gate=normal(1, TOKENS, 1, 4), A_log=normal(1, seed=1), dt_bias=normal(1, 4, seed=2))
    if name == "causal_conv1d":
        states = normal(sequences, 3, 4, seed=2)
        return dict(x=normal(1, TOKENS, 4), weight=normal(4, 4, seed=1), initial_state=states, output_final_state=True)
    inputs, _ = stage_inputs(TOKENS, lengths=LENGTHS, form="g", heads=1, key_width=12, value_width=9)
    if name == "chunk_output":
        return inputs
    assert name == "chunk_fwd_o_vk"
    v_new, g = inputs.pop("v_new"), inputs.pop("g").transpose(1, 2)
    return inputs | dict(v=v_new.transpose(1, 2), o=torch.zeros_like(v_new), h=inputs["h"].mT, g=g)


PACKED = ("chunk_kda", "recurrent_kda", "bounded_gate_cumsum", "causal_conv1d", "chunk_output", "chunk_fwd_o_vk")
STEPS = ("recurrent_kda_step", "recurrent_kda_conv_step", "causal_conv1d_step")
OPERATORS = (*PACKED, *STEPS, "softplus_gate_cumsum", "l2norm")  # both gates are one kernel


def arguments(name, device="cpu"):
    if name in PACKED or name.endswith("gate_cumsum"):
        found = packed_inputs(name) | {"cu_seqlens": offsets(LENGTHS)}
    elif name == "l2norm":
        found = dict(x=normal(3, 12))
    else:
        indices = torch.tensor([2, -1, 0], dtype=torch.int32)
        if name == "causal_conv1d_step":
            found = dict(x=normal(3, 4), weight=normal(4, 4, seed=1), state=normal(4, 3, 4, seed=2))
        elif name == "recurrent_kda_conv_step":
            widths = dict(q=12, k=12, v=9)
            found = {x: normal(3, width, seed=1) for x, width in widths.items()}
            found |= {f"{x}_weight": normal(width, 4, seed=2) for x, width in widths.items()}
            found |= {f"{x}_cache": normal(4, 3, width, seed=3) for x, width in widths.items()}
            found |= dict(raw_gate=normal(3, 1, 12, seed=4), beta_logits=normal(3, 1, seed=5), A_log=normal(1, seed=6))
            found |= dict(dt_bias=normal(1, 12, seed=7), state=normal(4, 1, 12, 9, seed=8))
        else:
            rows = {x: normal(3, 1, 12, seed=i) for i, x in enumerate(("q", "k", "raw_gate"))}
            found = rows | dict(v=normal(3, 1, 9, seed=3), beta_logits=normal(3, 1, seed=4), A_log=normal(1, seed=5))
            found |= dict(dt_bias=normal(1, 12, seed=6), state=normal(4, 1, 12, 9, seed=7))
        found["state_indices"] = indices
    return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in found.items()}


def tensors(result):
    """What a call returned, without what was not asked for."""
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def call(name, impl, backward=False, **arguments):
    """The results of a call, what it writes in place, and with ``backward`` the gradients of its floating inputs."""
    if backward:
        for x in arguments.values():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
    results = tensors(getattr(kernels, name)(**arguments, impl=impl))
    written = [arguments[key] for key in WRITTEN if key in arguments]
    if not backward:
        return results + written
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return results + list(torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results]))


@pytest.mark.parametrize("name", [*OPERATORS, "naive_recurrent_kda", "naive_chunk_kda"])
def test_an_unknown_keyword_is_refused(name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        getattr(kernels, name)(**arguments(name.removeprefix("naive_")), scales=1.0)


@pytest.mark.parametrize("name", OPERATORS)
def test_triton_on_tensors_out_of_its_reach_says_why(name, monkeypatch):
    """And is never swapped for the reference, which is what the same call gets if it names no implementation."""
    monkeypatch.setattr(_operator, "interpreted", lambda: False)
    with pytest.raises(ValueError, match=f"{name}: impl='triton' needs CUDA tensors, got one on cpu"):
        call(name, "triton", **arguments(name))
    with pytest.raises(ValueError, match=f"{name}: impl must be None, 'triton' or 'reference', got 'cuda'"):
        call(name, "cuda", **arguments(name))
    for found, want in zip(call(name, None, **arguments(name)), call(name, "reference", **arguments(name))):
        assert torch.equal(found, want)


def test_implementation_by_device():
    for device, want in (("cuda", "triton"), ("cuda:1", "triton"), ("cpu", "reference"), ("meta", "reference")):
        assert kernels.implementation("chunk_kda", None, device) == want
    assert kernels.implementation("chunk_kda", "reference", "cuda") == "reference"
    assert kernels.implementation("chunk_kda", "triton", "cuda") == "triton"


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", [*STEPS, "chunk_kda", "chunk_output", "chunk_fwd_o_vk"])  # the others' own files
def test_autocast_does_not_reach_inside(name, impl):
    device = "cuda" if ON_GPU else "cpu"
    want = call(name, impl, **arguments(name, device))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = call(name, impl, **arguments(name, device))
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, want))


# ---- offsets and slots that break the rules ----

# Below 0, past T, falling, and so far apart that the difference does not fit 32 bits.
BAD_OFFSETS = ([-3, 2, 99, 1], [2**31 - 1, -(2**31), 4, 2**31 - 1])
BAD_PACKS = [(name, bad) for name in PACKED for bad in BAD_OFFSETS]


class Guarded:
    """Makes new tensors in the middle of larger storages; ``check`` says that nothing wrote to what is around them."""

    def __init__(self, monkeypatch):
        self.made = []
        empty, new_empty = torch.empty, torch.Tensor.new_empty

        def guarded(*shape, dtype=None, device=None, **kwargs):
            shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
            size, pad = torch.Size(shape).numel(), 4096
            storage = empty(size + 2 * pad, dtype=dtype or torch.float32, device=device, **kwargs)
            storage.fill_(77)
            self.made.append((storage, pad, size))
            return storage[pad : pad + size].view(shape)

        def like(tensor, dtype=None, **kwargs):
            return guarded(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)

        def new(tensor, *shape, dtype=None, device=None, **kwargs):
            if tensor.device.type == "meta":
                return new_empty(tensor, *shape, dtype=dtype, device=device, **kwargs)
            return guarded(*shape, dtype=dtype or tensor.dtype, device=device or tensor.device)

        monkeypatch.setattr(torch, "empty", guarded)
        monkeypatch.setattr(torch, "empty_like", like)
        monkeypatch.setattr(torch.Tensor, "new_empty", new)

    def check(self):
        assert self.made
        for storage, pad, size in self.made:
            assert (storage[:pad] == 77).all() and (storage[pad + size :] == 77).all()


@pytest.mark.skipif(ON_GPU, reason="looks at the memory around the results, in the interpreter")
@pytest.mark.parametrize("name, bad", BAD_PACKS)
def test_bad_offsets_write_nothing_outside(name, bad, monkeypatch):
    """Forward and backward, wherever offsets point; what is inside is unspecified."""
    inputs = arguments(name) | {"cu_seqlens": torch.tensor(bad, dtype=torch.int32)}
    guarded = Guarded(monkeypatch)
    if name == "chunk_fwd_o_vk":
        inputs["o"] = torch.empty(inputs["o"].shape)
    call(name, "triton", backward=name in DIFFERENTIABLE, **inputs)
    guarded.check()


@pytest.mark.skipif(ON_GPU, reason="a device assert takes the CUDA context with it")
@pytest.mark.parametrize("name", [*PACKED, *STEPS])
def test_a_debug_run_asserts(name, monkeypatch):
    """What TRITON_DEBUG=1 switches on, switched on in the interpreter."""
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    inputs = arguments(name)
    call(name, "triton", **inputs)
    if name in STEPS:
        bad, message = ("state_indices", torch.tensor([2, 4, 0])), "state_indices must be below the number of slots"
    else:
        bad, message = ("cu_seqlens", torch.tensor([0, 3, 2, 5])), "cu_seqlens must rise from 0"
    with pytest.raises(Exception, match=message):
        call(name, "triton", **inputs | {bad[0]: bad[1].int()})


@pytest.mark.parametrize("name", STEPS)
def test_an_index_past_the_slots_is_refused_by_name(name):
    inputs = arguments(name)
    before = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    inputs["state_indices"] = torch.tensor([2, 4, 0], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{name}: state_indices must be below the 4 slots, got 4"):
        call(name, "reference", **inputs)
    assert all(torch.equal(inputs[key], value) for key, value in before.items() if key != "state_indices")


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_gpu_launches_on_the_tensors_device(name):
    """With another device current, forward and backward."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    backward = name in DIFFERENTIABLE
    want = call(name, "reference", backward, **arguments(name))
    with torch.cuda.device(0):
        found = call(name, "triton", backward, **arguments(name, "cuda:1"))
    for x, y in zip(found, want):
        assert x.device == torch.device("cuda:1")
        check(name, x.cpu(), y, "fp32_chunk", "gate_grad")
