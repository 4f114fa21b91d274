"""Where the documents of a batch begin and end, so that states, convolutions and attention start anew with each."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate
from torchtitan.models.attention import VarlenMetadata

OFFSETS = "cu_seqlens"
"""The key under which a batch brings its documents' offsets."""


class DocumentMasks(VarlenMetadata):
    """Offsets whose last one is the stream's end: no token lies past it, and nothing has to be masked for that."""

    __slots__ = ()


def document_offsets(tokens: Tensor, eos_id: int) -> Tensor:
    """Packed offsets of the documents in a batch, laid end to end.

    A document ends after each end-of-sequence token and at each row's end. On a GPU the number of documents is not
    known to the host, so the offsets have a fixed capacity and are filled up with repeated ends: empty sequences, which
    cost their share of every kernel's launch. ``DocumentCollator`` finds them before the batch goes to the GPU.

    Args:
        tokens: [B, T].
        eos_id: the end-of-sequence token.

    Returns:
        int32 [N + 1], from 0 to B * T, on the tokens' device; made without a synchronisation.

    Raises:
        RuntimeError: (asynchronously, on a GPU) more documents than the capacity, one for every eight tokens a row.
    """
    rows, length = tokens.shape
    total = rows * length
    ends = tokens == eos_id
    ends[:, -1:].fill_(True)
    ends = ends.flatten()
    if not tokens.is_cuda:
        return F.pad(ends.nonzero().squeeze(1) + 1, (1, 0)).to(torch.int32)
    capacity = rows * (length // 8 + 1)
    message = "document_offsets: more documents than one for every eight tokens"
    torch.ops.aten._assert_async.msg(ends.sum() <= capacity, message)
    positions = torch.arange(1, total + 1, device=tokens.device, dtype=torch.int32)
    slots = torch.where(ends, ends.cumsum(0), capacity + 1)  # what ends nothing goes to one slot past the last
    slots = slots.clamp(max=capacity + 1)
    offsets = torch.full((capacity + 2,), total, device=tokens.device, dtype=torch.int32)
    offsets[:1].zero_()  # an assignment of a number would wait for the GPU
    return offsets.scatter(0, slots, positions)[: capacity + 1].contiguous()


@dataclass(frozen=True)
class DocumentCollator:
    """Batches torchtitan's samples, and adds their documents' offsets while the tokens are still on the host."""

    eos_id: int

    def __call__(self, samples: list[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Any], Tensor]:
        inputs, labels = default_collate(samples)
        return {**inputs, OFFSETS: document_offsets(inputs["input"], self.eos_id)}, labels
