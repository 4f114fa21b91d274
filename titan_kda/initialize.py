"""Initial values that do not depend on how a model is sharded.

Each parameter is drawn in full from a generator of its own, keyed by the run's seed and the parameter's name, and each
rank keeps its shard. One GPU, FSDP and tensor parallelism then start from the same model, and a mesh without a random
tracker (the CPU's) cannot start two shards alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

Draw = Callable[[Tensor, torch.Generator], object]
"""Fills a full FP32 tensor in place from a generator on its device."""


class Initializer:
    """Draws parameters.

    Args:
        seed: the run's seed; ``torch.initial_seed()`` if not given, which torchtitan sets alike on every rank.
    """

    def __init__(self, seed: int | None = None):
        self.seed = torch.initial_seed() if seed is None else seed

    @torch.no_grad()
    def draw(self, parameter: Tensor, name: str, fill: Draw) -> None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        full = torch.empty(parameter.shape, dtype=torch.float32, device=local.device)
        if full.is_meta:
            return
        key = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(full.device)
        generator.manual_seed(int.from_bytes(key[:8], "little", signed=True))
        fill(full, generator)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            shard = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
            full = shard.redistribute(placements=parameter.placements).to_local()
        local.copy_(full)

    def trunc_normal(self, parameter: Tensor, name: str, std: float) -> None:
        """Normal, mean 0, cut at three deviations."""
        self.draw(parameter, name, lambda full, g: _trunc_normal(full, std, g))

    def normal(self, parameter: Tensor, name: str, std: float) -> None:
        self.draw(parameter, name, lambda full, g: full.normal_(0.0, std, generator=g))

    def uniform(self, parameter: Tensor, name: str, low: float, high: float) -> None:
        self.draw(parameter, name, lambda full, g: full.uniform_(low, high, generator=g))


def _trunc_normal(full: Tensor, std: float, generator: torch.Generator) -> None:
    torch.nn.init.trunc_normal_(full, 0.0, std, -3 * std, 3 * std, generator=generator)
