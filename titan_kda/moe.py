"""The mixture of experts: torchtitan's own, with what Kimi Linear's router asks for.

    s = sigmoid(W_g x), FP32                            a score for each expert
    chosen = the top k of s + bias                      the bias only chooses
    w = scaling * s / sum of the chosen s
    y = sum over the chosen of w_e expert_e(x)  +  shared(x)        each a SwiGLU

The bias balances the load without a loss: before each optimizer step torchtitan lowers it for experts that got more
tokens than the mean and raises it for the others (arXiv 2408.15664). Experts, expert parallelism and that update are
torchtitan's; here are the FP32 gate, counting that also works on a CPU, initial values that do not depend on the
layout, and how tokens get to the experts' rows and back: torchtitan's way (0.2.2) copies them three times, adds up
their gradients by indexed accumulation, and makes FP32 copies of what comes back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe import moe as torchtitan_moe
from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter, TokenReorderer

from .initialize import Initializer


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert stands in ``experts`` (int64): int64 [num_experts], without a synchronisation."""
    experts = experts.flatten()
    if experts.is_cuda:
        return torch.histc(experts, bins=num_experts, min=0, max=num_experts)
    return experts.new_zeros(num_experts).scatter_add(
        0, experts, torch.ones_like(experts)
    )  # a CPU's histc: floats only


class Gate(nn.Linear):
    """The router's projection in FP32, whatever the model runs in: two close scores round to one in 16 bits.

    Under tensor parallelism each rank weighs its own part of the experts' output, so that it has its own part of the
    scores' gradient. torchtitan's plan takes that for the whole (0.2.2); here it is summed over the ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float())
        if isinstance(scores, DTensor):
            mesh, placements = scores.device_mesh, scores.placements
            local = scores.to_local(grad_placements=[Partial()] * mesh.ndim)
            scores = DTensor.from_local(local, mesh, placements, run_check=False)
        return scores


class Router(TokenChoiceTopKRouter):
    """torchtitan's router; its forward is written anew for the CPU, which cannot count integers as it does."""

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, dim] to weights [T, k], the experts they belong to [T, k], and each expert's tokens [E]."""
        scores = torch.sigmoid(self.gate(x).float())
        choice = scores if expert_bias is None else scores + expert_bias
        experts = torch.topk(choice, self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, experts, count_tokens(experts, self.num_experts)


class Reorderer(TokenReorderer):
    """Sorts (token, expert) pairs by expert; as the router, anew for the CPU."""

    def forward(self, top_scores: Tensor, selected_experts_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = torch.argsort(selected_experts_indices.flatten(), stable=True)
        return top_scores.flatten()[order], order, count_tokens(selected_experts_indices, self.num_experts)


# ---- to the experts' rows and back ----

_ALIGNMENT = 8
"""Rows: a group of 16-bit rows begins at a multiple of 16 bytes along them too, as the grouped products ask."""


class Places(NamedTuple):
    """Pairs of a token and one of its k experts, and the rows of the experts' input, each as the other's."""

    row_of: Tensor  # [T k]; -1: the pair is another rank's
    pair_of: Tensor  # [rows]; -1: a row that fills up a group
    top_k: int
    whole: bool  # no pair is another rank's


def _to_rows(x: Tensor, places: Places) -> Tensor:
    """x [T, dim] to [rows, dim]; zeros in rows that fill up."""
    rows = places.pair_of.shape[0]
    if not x.shape[0]:
        return x.new_zeros(rows, x.shape[1])
    taken = x[places.pair_of.clamp(min=0) // places.top_k]
    if rows == places.row_of.shape[0] and places.whole:
        return taken
    return torch.where((places.pair_of >= 0)[:, None], taken, 0)


class _ToRows(torch.autograd.Function):
    """x [T, dim] to the experts' rows [rows, dim]. A token's gradient is the sum of its pairs', each read once."""

    @staticmethod
    def forward(x: Tensor, places: Places) -> Tensor:
        return _to_rows(x, places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Places], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1].row_of, inputs[1].pair_of)
        ctx.rest = inputs[1][2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _of_pairs(grad, Places(*ctx.saved_tensors, *ctx.rest)).sum(1), None


def _of_pairs(rows: Tensor, places: Places) -> Tensor:
    """[rows, dim] to [T, k, dim]; zeros for other ranks' pairs."""
    pairs = rows[places.row_of if places.whole else places.row_of.clamp(min=0)]
    if not places.whole:
        pairs = torch.where((places.row_of >= 0)[:, None], pairs, 0)
    return pairs.unflatten(0, (-1, places.top_k))


class _FromRows(torch.autograd.Function):
    """The experts' rows [rows, dim] and weights [T, k], FP32, to each token's weighted sum, FP32 [T, dim]."""

    @staticmethod
    def forward(rows: Tensor, weights: Tensor, places: Places) -> Tensor:
        return (_of_pairs(rows, places).float() * weights[..., None]).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Places], output: Tensor) -> None:
        rows, weights, places = inputs
        ctx.save_for_backward(rows, weights, places.row_of, places.pair_of)
        ctx.rest = places[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, *saved = ctx.saved_tensors
        places = Places(*saved, *ctx.rest)
        if not weights.numel():
            return torch.zeros_like(rows), torch.zeros_like(weights), None
        of_row = weights.flatten()[places.pair_of.clamp(min=0)]  # rows that fill up have no gradient to weigh
        d_rows = (_to_rows(grad, places) * of_row[:, None]).to(rows.dtype)
        d_weights = (_of_pairs(rows, places).float() * grad[:, None]).sum(-1)
        return d_rows, d_weights, None


class Dispatch(nn.Module):
    """Tokens to the experts' rows, expert after expert. ``aligned``: each expert's rows are filled up to a multiple of
    8, and the counts are those; no count is read by the host."""

    def __init__(self, top_k: int):
        super().__init__()
        self.top_k = top_k

    def forward(
        self, x: Tensor, experts: Tensor, order: Tensor, counts: Tensor, aligned: bool
    ) -> tuple[Tensor, Tensor, Places]:
        """x [T, dim], experts [T, k], their flattened order by expert, and each expert's number of pairs in it."""
        pairs, rows = experts.numel(), order.numel()
        row_of_sorted = torch.arange(rows, device=x.device)
        if aligned:
            filled = (counts.long() + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
            moved = (filled - counts.long()).cumsum(0) - (filled - counts.long())
            row_of_sorted = row_of_sorted + moved[experts.flatten()[order]]
            rows += _ALIGNMENT * counts.numel()
            counts = filled
        row_of = torch.full((pairs,), -1, device=x.device).scatter(0, order, row_of_sorted)
        pair_of = torch.full((rows,), -1, device=x.device).scatter(0, row_of_sorted, order)
        places = Places(row_of, pair_of, self.top_k, order.numel() == pairs)
        return _ToRows.apply(x, places), counts, places  # pyright: ignore[reportReturnType]


class Combine(nn.Module):
    """The experts' rows, weighted, back to their tokens, on top of what the shared experts made of them."""

    def forward(self, rows: Tensor, weights: Tensor, places: Places, shared: Tensor | None) -> Tensor:
        out = _FromRows.apply(rows, weights, places).to(rows.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        return out if shared is None else shared + out


# ---- the experts and the layer ----

_GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities that torch has a kernel of grouped products for."""


class Experts(GroupedExperts):
    """torchtitan's experts, [E, ...] weights.

    Its grouped products are in bf16, so bf16 on a GPU takes them; all else takes one product an expert, which waits for
    the device.
    """

    @staticmethod
    def grouped(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether tokens like these take the grouped products."""
        return device.type == "cuda" and dtype == torch.bfloat16

    def sent_away(self) -> bool:
        """Whether tokens are sent to other ranks' experts, which aligns their rows there."""
        mesh = self.w1.device_mesh if isinstance(self.w1, DTensor) else None
        return mesh is not None and "ep" in (mesh.mesh_dim_names or ())

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, aligned: bool = False) -> Tensor:
        """x [rows, dim], each expert's rows after another's; ``aligned``: they are as the grouped products ask."""
        if aligned:
            w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
            return torchtitan_moe._run_experts_grouped_mm(w1, w2, w3, x, num_tokens_per_expert)
        self.use_grouped_mm = self.grouped(x.device, x.dtype)
        return super().forward(x, num_tokens_per_expert)


class MixtureOfExperts(MoE):
    """One layer's feed-forward.

    Args:
        dim: width of the residual stream.
        width: hidden width of each expert.
        num_experts: E, routed.
        top_k: how many of them a token goes to.
        num_shared: shared experts, as one of ``num_shared * width``; 0: none.
        scaling: of the routed experts' weights.
        renormalize: whether a token's weights are divided by their sum.
        load_balance_coeff: how far a step moves the bias; 0: it stays as it is.

    Attributes:
        expert_bias: FP32 [E], a persistent buffer; stays FP32 whatever the model is cast to.
        tokens_per_expert: FP32 [E], since the last optimizer step, counted in training alone.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        num_experts: int,
        top_k: int,
        num_shared: int = 1,
        scaling: float = 1.0,
        renormalize: bool = True,
        load_balance_coeff: float = 1e-3,
    ):
        args = MoEArgs(
            num_experts=num_experts,
            num_shared_experts=num_shared,
            score_func="sigmoid",
            route_norm=renormalize,
            route_scale=scaling,
            score_before_experts=False,
            top_k=top_k,
            load_balance_coeff=load_balance_coeff or 1.0,  # None would leave out the bias
        )
        super().__init__(args, dim, width)
        self.load_balance_coeff = load_balance_coeff or None
        self.experts = Experts(dim, width, num_experts, use_grouped_mm=False)
        self.router = Router(dim, num_experts, None, None, top_k, "sigmoid", renormalize, scaling, gate_bias=False)
        self.router.gate = Gate(dim, num_experts, bias=False)
        self.reorderer = Reorderer(num_experts, top_k)
        self.dispatch = Dispatch(top_k)
        self.combine = Combine()

    def _apply(self, fn, recurse: bool = True):
        kept = {name: getattr(self, name) for name in ("expert_bias", "tokens_per_expert")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            if getattr(self, name).dtype != torch.float32:
                setattr(self, name, buffer.to(getattr(self, name).device))  # moved, not cast
        return self

    def waits_for(self, device: torch.device) -> str | None:
        """Why a forward on this device, under autocast as it is now, waits for it; None: it does not."""
        kind = device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.experts.w1.dtype
        if not Experts.grouped(device, dtype):
            return f"experts count their tokens on the host in {str(dtype).removeprefix('torch.')}"
        # Elsewhere torch multiplies group by group, and reads on the host where they end.
        if torch.cuda.get_device_capability(device)[0] not in _GROUPED_CAPABILITIES:
            return "experts count their tokens on the host on this GPU"
        return None

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, dim] to [B, T, dim], in autocast's dtype where it is on: tokens are sent to experts in it."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        rows, tokens, dim = x.shape
        x = x.reshape(-1, dim)
        weights, experts, counts = self.router(x, self.expert_bias)
        if torch.is_grad_enabled():  # validation and samples must not move the bias
            self.tokens_per_expert.add_(counts)
        _, order, counts = self.reorderer(weights, experts)
        aligned = Experts.grouped(x.device, x.dtype) and not self.experts.sent_away()
        routed, counts, places = self.dispatch(x, experts, order, counts, aligned)
        routed = self.experts(routed, counts, aligned=aligned)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        return self.combine(routed, weights, places, shared).view(rows, tokens, dim)

    def init_weights(  # type: ignore[override]
        self, init: Initializer, name: str, output_std: float, buffer_device: torch.device | None = None
    ) -> None:
        """Fills every parameter and buffer; ``output_std`` is the depth-scaled deviation of the way out."""
        std = self.router.gate.in_features**-0.5
        init.trunc_normal(self.router.gate.weight, f"{name}.router.gate.weight", std)
        for part, deviation in (("w1", std), ("w2", output_std), ("w3", std)):
            init.trunc_normal(getattr(self.experts, part), f"{name}.experts.{part}", deviation)
            if self.shared_experts is not None:
                weight = getattr(self.shared_experts, part).weight
                init.trunc_normal(weight, f"{name}.shared_experts.{part}.weight", deviation)
        for buffer in ("expert_bias", "tokens_per_expert"):
            device = buffer_device or getattr(self, buffer).device
            setattr(self, buffer, torch.zeros(self.experts.num_experts, dtype=torch.float32, device=device))
