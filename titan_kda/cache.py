"""What a sequence carries from one token to the next.

A KDA layer carries its FP32 state and the last W - 1 inputs of its three convolutions: the same number of bytes however
long the sequence is. A model's cache is one such object a layer, in the order of its layers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LayerCache(Protocol):
    """What any mixer's cache can do; a class whose objects FSDP passes on as they are, so no dataclass."""

    def select(self, rows: Tensor) -> LayerCache:
        """A copy that holds these sequences alone, in this order; a row may stand more than once. rows: int64 [M]."""
        ...


class KDACache:
    """One KDA layer's cache for N sequences. Empty (None) until the first prefill.

    Not a dataclass: FSDP copies those among a forward's arguments, and the layer would advance the copy.

    Attributes:
        state: FP32 [N, H, K, V].
        conv_q, conv_k: [N, W - 1, H * K], the inputs that the next token's convolution still sees, oldest first.
        conv_v: [N, W - 1, H * V].
    """

    def __init__(
        self,
        state: Tensor | None = None,
        conv_q: Tensor | None = None,
        conv_k: Tensor | None = None,
        conv_v: Tensor | None = None,
    ):
        self.state = state
        self.conv_q, self.conv_k, self.conv_v = conv_q, conv_k, conv_v

    def select(self, rows: Tensor) -> KDACache:
        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, rows.to(tensor.device))

        return KDACache(pick(self.state), pick(self.conv_q), pick(self.conv_k), pick(self.conv_v))


ModelCache = list[LayerCache]


def select(cache: ModelCache, rows: list[int]) -> ModelCache:
    """The cache of these sequences alone, in this order."""
    index = torch.tensor(rows, dtype=torch.int64)
    return [layer.select(index) for layer in cache]
