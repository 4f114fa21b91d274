"""The Kimi Delta Attention (KDA) layer: projections, short convolutions, forget gate, core, output gate.

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      depthwise causal convolutions, width 4
    q, k    = l2norm(q), l2norm(k)                                          per head
    gate    = forget gate of (W_fb W_fa x), A_log, dt_bias                  one log decay per key channel
    beta    = sigmoid(W_b x)                                                times 2 with allow_neg_eigval
    o       = KDA(q, k, v, gate, beta)
    y       = W_o [rmsnorm(o) * sigmoid(W_gb W_ga x)]

The core runs as ``chunk_kda`` (differentiable, parallel over a chunk's tokens) or as ``recurrent_kda`` (inference only,
token by token); ``Backends`` says which, by phase. Source: Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_kda.kernels import (
    bounded_gate_cumsum,
    causal_conv1d,
    chunk_kda,
    implementation,
    l2norm,
    recurrent_kda,
    recurrent_kda_conv_step,
    softplus_gate_cumsum,
)

from .cache import KDACache
from .initialize import Initializer
from .packing import PackedLinear, pack

Backend = Literal["auto", "chunk", "recurrent"]
Impl = Literal["auto", "triton", "reference"]
Gate = Literal["bounded", "softplus"]
OutputGate = Literal["low_rank", "full"]
Phase = Literal["train", "eval", "prefill", "decode"]

CHUNK_SIZE = 64


@dataclass(frozen=True)
class Backends:
    """Which form of the core each phase runs, and on which implementation.

    Attributes:
        train: forwards with gradients on; "recurrent" is refused, since it does not differentiate.
        eval: forwards without gradients and without a cache, as in validation.
        prefill: forwards that fill a cache from a prompt.
        recurrent_max_tokens: "auto" is recurrent for sequences up to this many tokens, chunk for longer ones.
        fuse_q_l2norm: chunk_kda normalises q itself in prefill, without a pass of its own over q; the numbers are the
            same up to q's rounding. Training and validation never do, so that a validation's arithmetic is training's.
        impl: "auto" is Triton on a GPU and the PyTorch reference elsewhere.
    Decode, one token a sequence with a cache, is always recurrent.
    """

    train: Backend = "chunk"
    eval: Backend = "recurrent"
    prefill: Backend = "auto"
    recurrent_max_tokens: int = 64
    fuse_q_l2norm: bool = True
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        for name in ("train", "eval", "prefill"):
            value = getattr(self, name)
            if value not in get_args(Backend):
                raise ValueError(f"{name}_backend must be one of {', '.join(get_args(Backend))}, got {value!r}")
        if self.train == "recurrent":
            raise ValueError(
                "train_backend must be 'chunk' (or 'auto', which means it): recurrent_kda is inference only "
                "and does not differentiate"
            )
        if self.impl not in get_args(Impl):
            raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {self.impl!r}")
        if isinstance(self.recurrent_max_tokens, bool) or not isinstance(self.recurrent_max_tokens, int):
            raise ValueError(f"recurrent_max_tokens must be an integer, got {self.recurrent_max_tokens!r}")
        if self.recurrent_max_tokens < 0:
            raise ValueError(f"recurrent_max_tokens must be at least 0, got {self.recurrent_max_tokens}")
        if not isinstance(self.fuse_q_l2norm, bool):
            raise ValueError(f"fuse_q_l2norm must be true or false, got {self.fuse_q_l2norm!r}")

    def choose(self, phase: Phase, tokens: int) -> Literal["chunk", "recurrent"]:
        """The form of the core for a phase; ``tokens`` is the length of the longest sequence, or a bound on it."""
        if phase == "train":
            return "chunk"
        if phase == "decode":
            return "recurrent"
        choice = self.eval if phase == "eval" else self.prefill
        if choice == "auto":
            return "recurrent" if tokens <= self.recurrent_max_tokens else "chunk"
        return choice

    def ran(self, phase: Phase, tokens: int, device: torch.device | str) -> str:
        """The line that the log gets the first time a phase runs."""
        op = "recurrent_kda_conv_step" if phase == "decode" else f"{self.choose(phase, tokens)}_kda"
        return f"KDA {phase} runs {op} ({implementation(op, self.operator_impl, device)})"

    @property
    def operator_impl(self) -> str | None:
        """``impl`` as the operators take it."""
        return None if self.impl == "auto" else self.impl

    def describe(self, device: torch.device | str) -> list[str]:
        """One line a phase: its backend and the implementation that the operators run on ``device``."""

        def line(phase: str, choice: str) -> str:
            if choice == "auto":
                limit = self.recurrent_max_tokens
                used = {f"recurrent_kda up to {limit} tokens": "recurrent_kda", "chunk_kda above": "chunk_kda"}
            else:
                used = {f"{choice}_kda": f"{choice}_kda"}
            forms = ", ".join(f"{name} ({implementation(op, self.operator_impl, device)})" for name, op in used.items())
            return f"KDA {phase}: {forms}"

        step = implementation("recurrent_kda_conv_step", self.operator_impl, device)
        return [
            line("train", "chunk"),
            line("eval", self.eval),
            line("prefill", self.prefill),
            f"KDA decode: recurrent_kda_conv_step ({step})",
        ]


def _local(tensor: Tensor) -> Tensor:
    """A parameter's shard on this rank, under tensor parallelism; the parameter itself elsewhere."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ForgetGate(nn.Module):
    """A_log [H] and dt_bias [H, K], and the log2 decay that they make of the gate's logits.

    The two stay FP32 whatever the model is cast to: a decay of 0.999 a token is far below bf16's resolution at 1. They
    sit in a module of their own so that FSDP can give it an FP32 policy. They take no weight decay.

    Initialisation. softplus: A = exp(A_log) ~ U(1, 16) and dt_bias = softplus^-1(dt), dt log-uniform in [1e-3, 1e-1],
    as the field does it, so that a fresh channel decays by A dt nats a token, from 1e-3 to 1.6. bounded: A_log = 0 and
    dt_bias = logit(A dt / |lower_bound|) with A and dt drawn in the same way, so that both gates start from the same
    decays and the same slope in the logits; with A up to 16 inside the sigmoid, a fresh gate would be a switch.
    """

    def __init__(self, num_heads: int, key_width: int, gate: Gate = "bounded", lower_bound: float = -5.0):
        super().__init__()
        if gate not in get_args(Gate):
            raise ValueError(f"gate must be one of {', '.join(get_args(Gate))}, got {gate!r}")
        self.gate: Gate = gate
        self.lower_bound = lower_bound
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, key_width, dtype=torch.float32))

    def _apply(self, fn, recurse: bool = True):
        def keep_fp32(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if tensor.dtype == torch.float32 and out.is_floating_point() and out.dtype != torch.float32:
                return tensor.to(device=out.device)  # moved, not cast
            return out

        return super()._apply(keep_fp32, recurse)

    def init_weights(self, init: Initializer, name: str) -> None:
        heads, key_width = self.dt_bias.shape

        def decay(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
            a = torch.empty(heads, 1, device=device).uniform_(1, 16, generator=generator)
            dt = torch.empty(heads, key_width, device=device)
            dt.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            return a, dt

        def draw_A_log(full: Tensor, generator: torch.Generator) -> None:
            a, _ = decay(generator, full.device)
            full.copy_(a.squeeze(1).log() if self.gate == "softplus" else torch.zeros_like(full))

        def draw_dt_bias(full: Tensor, generator: torch.Generator) -> None:
            a, dt = decay(generator, full.device)
            if self.gate == "softplus":
                full.copy_(dt + torch.log(-torch.expm1(-dt)))
            else:
                fraction = (a * dt / -self.lower_bound).clamp(max=0.9)
                full.copy_(torch.logit(fraction))

        # One key for both: a head's A and dt are drawn together, whichever of the two uses them.
        init.draw(self.A_log, f"{name}.decay", draw_A_log)
        init.draw(self.dt_bias, f"{name}.decay", draw_dt_bias)

    def forward(self) -> tuple[Tensor, Tensor]:
        """A_log [H] and dt_bias [H, K] as plain FP32 tensors: gathered by FSDP, this rank's heads under TP."""
        return _local(self.A_log), _local(self.dt_bias)

    def log2_decay(
        self,
        raw_gate: Tensor,
        decay: tuple[Tensor, Tensor],
        chunk_size: int,
        cu_seqlens: Tensor | None,
        impl: str | None,
    ) -> Tensor:
        """raw_gate [B, T, H, K] to the log2 decay, FP32, summed inside chunks of ``chunk_size`` (1: per token)."""
        if self.gate == "bounded":
            return bounded_gate_cumsum(
                raw_gate,
                *decay,
                chunk_size=chunk_size,
                lower_bound=self.lower_bound,
                cu_seqlens=cu_seqlens,
                impl=impl,
            )
        return softplus_gate_cumsum(raw_gate, *decay, chunk_size=chunk_size, cu_seqlens=cu_seqlens, impl=impl)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution of width W with SiLU; weight [C, W], its last tap the current token."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))

    def init_weights(self, init: Initializer, name: str) -> None:
        bound = self.weight.shape[1] ** -0.5  # what nn.Conv1d gives a depthwise filter
        init.uniform(self.weight, f"{name}.weight", -bound, bound)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        output_final_state: bool,
        impl: str | None,
    ) -> tuple[Tensor, Tensor | None]:
        return causal_conv1d(
            x,
            _local(self.weight).to(x.dtype),
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            output_final_state=output_final_state,
            impl=impl,
        )


class KimiDeltaAttention(nn.Module):
    """One KDA layer.

    Args:
        dim: width of the residual stream.
        num_heads: H.
        key_width, value_width: K and V of each head.
        conv_width: taps of the short convolutions.
        gate: the forget gate, "bounded" (``lower_bound`` nats a token at the least) or "softplus".
        lower_bound: of the bounded gate, nats a token, negative.
        allow_neg_eigval: beta in (0, 2) rather than (0, 1).
        output_gate: "low_rank" (through ``value_width`` channels) or "full".
        norm_eps: of the output's RMSNorm.
        backends: which form of the core each phase runs.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        key_width: int = 128,
        value_width: int = 128,
        *,
        conv_width: int = 4,
        gate: Gate = "bounded",
        lower_bound: float = -5.0,
        allow_neg_eigval: bool = False,
        output_gate: OutputGate = "low_rank",
        norm_eps: float = 1e-5,
        backends: Backends | None = None,
    ):
        super().__init__()
        if output_gate not in get_args(OutputGate):
            raise ValueError(f"output_gate must be one of {', '.join(get_args(OutputGate))}, got {output_gate!r}")
        self.key_width, self.value_width = key_width, value_width
        self.num_heads = num_heads
        self.beta_scale = 2.0 if allow_neg_eigval else 1.0
        self.backends = backends or Backends()
        self.may_pad = True  # whether there may be rows past the last offset; the model can know better
        keys, values = num_heads * key_width, num_heads * value_width
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, values, bias=False)
        self.q_conv = ShortConvolution(keys, conv_width)
        self.k_conv = ShortConvolution(keys, conv_width)
        self.v_conv = ShortConvolution(values, conv_width)
        self.f_a_proj = nn.Linear(dim, key_width, bias=False)
        self.f_b_proj = nn.Linear(key_width, keys, bias=False)
        self.forget_gate = ForgetGate(num_heads, key_width, gate, lower_bound)
        self.b_proj = nn.Linear(dim, num_heads, bias=False)
        if output_gate == "low_rank":
            self.g_a_proj = nn.Linear(dim, value_width, bias=False)
            self.g_b_proj = nn.Linear(value_width, values, bias=False)
        else:
            self.g_proj = nn.Linear(dim, values, bias=False)
        self.o_norm = nn.RMSNorm(value_width, eps=norm_eps)
        self.o_proj = nn.Linear(values, dim, bias=False)
        self._packed: PackedLinear | None = None

    def init_weights(self, init: Initializer, name: str, output_std: float) -> None:
        """Fills every parameter; ``output_std`` is the depth-scaled deviation of the output projection."""
        for child, module in self.named_children():
            if isinstance(module, nn.Linear):
                std = output_std if child == "o_proj" else self.q_proj.in_features**-0.5
                init.trunc_normal(module.weight, f"{name}.{child}.weight", std)
            elif isinstance(module, (ShortConvolution, ForgetGate)):
                module.init_weights(init, f"{name}.{child}")
        self.o_norm.reset_parameters()

    def gather(self) -> tuple[Tensor, Tensor]:
        """The FP32 parameters, gathered. FSDP gathers in hooks, which must run outside a compiled block."""
        return self.forget_gate()

    def new_cache(self) -> KDACache:
        return KDACache()

    def pack(self) -> None:
        """Until ``unpack()``, decode takes copies of the weights that read the layer's input, as one product."""
        gate = self.g_a_proj if hasattr(self, "g_a_proj") else self.g_proj
        self._packed = pack([self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, gate])

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def unpack(self) -> None:
        self._packed = None

    def core_flops_per_token(self, seq_len: int = CHUNK_SIZE) -> int:
        """Operations of the chunked forward per token beside the parameters' products; the same for any seq_len."""
        K, V = self.key_width, self.value_width
        conv_width = self.q_conv.weight.shape[1]
        core = 2 * CHUNK_SIZE * (3 * K + 2 * V) + 6 * K * V
        return self.num_heads * (core + 2 * conv_width * (2 * K + V))

    def phase(self, cache: KDACache | None, max_tokens: int) -> Phase:
        if torch.is_grad_enabled():
            return "train"
        if cache is None:
            return "eval"
        return "decode" if max_tokens == 1 and cache.state is not None else "prefill"

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: KDACache | None = None,
        max_tokens: int | None = None,
        backend: Literal["chunk", "recurrent"] | None = None,
        decay: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x [B, T, dim] to [B, T, dim].

        Args:
            x: the input, sequences along B; with ``cu_seqlens`` the B rows are one stream of B * T tokens.
            cu_seqlens: int32 [N + 1], where the stream's sequences begin and end; None: each row is a sequence. Rows
                past the last offset are padding, and come out as zero.
            cache: what the N sequences carry; advanced in place. An empty one is filled.
            max_tokens: a bound on the sequences' lengths, for backend "auto"; T if not given. 1 with a filled cache is
                a decode step: one token for each of its sequences, in order, and padding after them.
            backend: overrides what ``backends`` chooses.
            decay: what ``gather()`` gave, for a caller that compiles this layer; None: gathered here.

        Raises:
            RuntimeError: gradients are on, and a cache or backend "recurrent" was given.
        """
        rows, tokens, _ = x.shape
        decay = self.gather() if decay is None else decay
        max_tokens = tokens if max_tokens is None else max_tokens
        phase = self.phase(cache, max_tokens)
        if phase == "train":
            if cache is not None:
                raise RuntimeError("KimiDeltaAttention: a cache is for inference; call it under torch.no_grad()")
            if backend == "recurrent":
                raise RuntimeError(
                    "KimiDeltaAttention: backend 'recurrent' (recurrent_kda) is inference only and gradients are on; "
                    "use backend 'chunk' (chunk_kda), or call it under torch.no_grad()"
                )
        if backend is None:
            backend = self.backends.choose(phase, max_tokens)
        if phase == "decode":
            assert cache is not None
            return self._decode(x, cache, decay)

        impl = self.backends.operator_impl
        layer_input = x
        if cu_seqlens is not None:
            x = x.reshape(1, rows * tokens, -1)
        live = None
        if cu_seqlens is not None and self.may_pad:
            # Past the last offset the operators leave outputs and gradients unspecified: neither may reach a product.
            live = (torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1])[None, :, None]

        def masked(y: Tensor) -> Tensor:
            return y if live is None or not torch.is_grad_enabled() else torch.where(live, y, 0)

        keep = cache is not None
        tails = (cache.conv_q, cache.conv_k, cache.conv_v) if cache is not None else (None, None, None)
        q, conv_q = self.q_conv(masked(self.q_proj(x)), cu_seqlens, tails[0], keep, impl)
        k, conv_k = self.k_conv(masked(self.k_proj(x)), cu_seqlens, tails[1], keep, impl)
        v, conv_v = self.v_conv(masked(self.v_proj(x)), cu_seqlens, tails[2], keep, impl)
        q = q.unflatten(-1, (-1, self.key_width))  # [B, T, H, K]; H is this rank's
        fused = phase == "prefill" and backend == "chunk" and self.backends.fuse_q_l2norm
        if not fused:
            q = l2norm(q, impl=impl)
        k = l2norm(k.unflatten(-1, (-1, self.key_width)), impl=impl)
        v = v.unflatten(-1, (-1, self.value_width))
        raw_gate = masked(self.f_b_proj(self.f_a_proj(x))).unflatten(-1, (-1, self.key_width))
        beta = torch.sigmoid(masked(self.b_proj(x)).float()) * self.beta_scale
        state = None if cache is None else cache.state
        if backend == "chunk":
            cumulative_gate = self.forget_gate.log2_decay(raw_gate, decay, CHUNK_SIZE, cu_seqlens, impl)
            bound = self.forget_gate.lower_bound if self.forget_gate.gate == "bounded" else None
            o, final_state = chunk_kda(
                q,
                k,
                v,
                cumulative_gate,
                beta,
                state,
                cu_seqlens=cu_seqlens,
                output_final_state=keep,
                fuse_q_l2norm=fused,
                gate_lower_bound=bound,
                impl=impl,
            )
        else:
            gate = self.forget_gate.log2_decay(raw_gate, decay, 1, cu_seqlens, impl)
            o, final_state = recurrent_kda(
                q, k, v, gate, beta, state, cu_seqlens=cu_seqlens, output_final_state=keep, impl=impl
            )
        if cache is not None:
            cache.state, cache.conv_q, cache.conv_k, cache.conv_v = final_state, conv_q, conv_k, conv_v
        if live is not None:
            o = torch.where(live[..., None], o, 0)
        return self._output(o.reshape(rows, tokens, *o.shape[2:]), layer_input)

    def _decode(self, x: Tensor, cache: KDACache, decay: tuple[Tensor, Tensor]) -> Tensor:
        """One token for each of the cache's N sequences: the first N rows of x [B, T, dim]; the rest is padding."""
        assert cache.state is not None and cache.conv_q is not None
        assert cache.conv_k is not None and cache.conv_v is not None
        impl = self.backends.operator_impl
        live = cache.state.shape[0]
        token = x.flatten(0, 1)[:live]
        if self._packed is None:
            projections = (self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj)
            q, k, v, low_rank, beta_logits = (projection(token) for projection in projections)
            output_gate = None
        else:
            *parts, output_gate = self._packed(x)
            q, k, v, low_rank, beta_logits = (part.flatten(0, 1)[:live] for part in parts)
        o = recurrent_kda_conv_step(
            q,
            k,
            v,
            _local(self.q_conv.weight).to(q.dtype),
            _local(self.k_conv.weight).to(k.dtype),
            _local(self.v_conv.weight).to(v.dtype),
            cache.conv_q,
            cache.conv_k,
            cache.conv_v,
            self.f_b_proj(low_rank).unflatten(-1, (-1, self.key_width)),
            beta_logits,
            *decay,
            cache.state,
            state_indices=cache.slots,
            gate=self.forget_gate.gate,
            lower_bound=self.forget_gate.lower_bound,
            beta_scale=self.beta_scale,
            impl=impl,
        )
        if padding := x.shape[0] * x.shape[1] - live:
            o = nn.functional.pad(o, (0, 0, 0, 0, 0, padding))
        return self._output(o.reshape(*x.shape[:2], *o.shape[1:]), x, output_gate)

    def _output(self, o: Tensor, x: Tensor, output_gate: Tensor | None = None) -> Tensor:
        """The gated norm and the output projection: o [B, T, H, V] and the layer's input [B, T, dim] to [B, T, dim].
        ``output_gate`` is the gate's first product, where it was made with the others."""
        low_rank = hasattr(self, "g_a_proj")
        gate = output_gate
        if gate is None:
            gate = self.g_a_proj(x) if low_rank else self.g_proj(x)
        if low_rank:
            gate = self.g_b_proj(gate)
        o = self.o_norm(o).flatten(-2) * torch.sigmoid(gate)
        return self.o_proj(o)
