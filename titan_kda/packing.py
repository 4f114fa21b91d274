"""Several products with one input as one, for decode: a token's products are too small to fill a GPU."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class PackedLinear:
    """Copies of layers' weights in one tensor, [sum of widths, in_features]; its products are views of one."""

    def __init__(self, weight: Tensor, widths: Sequence[int]):
        self.weight, self.widths = weight, list(widths)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., in_features] to each layer's [..., width]."""
        return F.linear(x, self.weight).split(self.widths, -1)


def pack(layers: Sequence[nn.Module]) -> PackedLinear | None:
    """The layers' weights as they are now, in the type that autocast gives products here.

    None where their products are not one tensor's: sharded or quantised weights, or layers with hooks of their own.
    Nor on a CPU, where a token's products are not bound by launches.
    """
    weights = []
    for layer in layers:
        if type(layer) is not nn.Linear or layer.bias is not None or isinstance(layer.weight, DTensor):
            return None
        if layer._forward_hooks or layer._forward_pre_hooks or not layer.weight.is_cuda:
            return None
        weights.append(layer.weight.detach())
    device = weights[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
    return PackedLinear(torch.cat([w.to(dtype) for w in weights]), [w.shape[0] for w in weights])
