"""Several products with one input as one, for decode: a token's products are too small to fill a GPU."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedLinear:
    """Copies of layers' weights in one tensor, [sum of widths, in_features]; its products are views of one.

    A copy of a model, or a model read back from a pickle, comes without: nobody would unpack it.
    """

    def __init__(self, weight: Tensor, widths: Sequence[int]):
        self.weight, self.widths = weight, list(widths)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., in_features] to each layer's [..., width]."""
        return F.linear(x, self.weight).split(self.widths, -1)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _unpacked, ()


def _unpacked() -> None:
    """What a PackedLinear is copied and pickled as."""


def pack(layers: Sequence[nn.Module]) -> PackedLinear | None:
    """The layers' weights as they are now, in the type that autocast gives products here.

    None where their products are not one tensor's: weights sharded, quantised or of several types or devices, or layers
    with hooks or a forward of their own. Nor on a CPU, where a token's products are not bound by launches.
    """
    weights = []
    for layer in layers:
        if type(layer) is not nn.Linear or layer.bias is not None or type(layer.weight) is not nn.Parameter:
            return None
        if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer) or not layer.weight.is_cuda:
            return None
        weights.append(layer.weight.detach())
    if len({(weight.dtype, weight.device) for weight in weights}) > 1:
        return None
    device = weights[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
    return PackedLinear(torch.cat([w.to(dtype) for w in weights]), [w.shape[0] for w in weights])
