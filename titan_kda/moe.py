"""The mixture of experts: torchtitan's own, with what Kimi Linear's router asks for.

    s = sigmoid(W_g x), FP32                            a score for each expert
    chosen = the top k of s + bias                      the bias only chooses
    w = scaling * s / sum of the chosen s
    y = sum over the chosen of w_e expert_e(x)  +  shared(x)        each a SwiGLU

The bias balances the load without a loss: before each optimizer step torchtitan lowers it for experts that got more
tokens than the mean and raises it for the others (arXiv 2408.15664). Experts, dispatch, expert parallelism and that
update are torchtitan's; here are the FP32 gate, counting that also works on a CPU, and initial values that do not
depend on the layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.moe import MoE, MoEArgs
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

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
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
        if torch.is_grad_enabled():
            return super().forward(x)
        counted = self.tokens_per_expert.clone()  # validation and samples must not move the bias
        out = super().forward(x)
        self.tokens_per_expert.copy_(counted)
        return out

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
