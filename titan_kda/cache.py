"""What a sequence carries from one token to the next.

A KDA layer carries its FP32 state and the last W - 1 inputs of its three convolutions: the same number of bytes however
long the sequence is. A full-attention layer carries a row for each token that it has seen. A model's cache is one such
object a layer, in the order of its layers.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
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
        slots: int32 [N], for decode alone: which row of the tensors above a sequence has; a negative one marks a place
            that holds no sequence, whose output is zero and of which nothing is read or written. None: its own.
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
        self.slots: Tensor | None = None

    def select(self, rows: Tensor) -> KDACache:
        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, rows.to(tensor.device))

        return KDACache(pick(self.state), pick(self.conv_q), pick(self.conv_k), pick(self.conv_v))


class TokenCache:
    """One full-attention layer's cache for N sequences: what it keeps of each token. Empty until the first prefill.

    It grows in pieces, an eighth over what is needed. No step reads a length on the host: ``bound`` is kept there
    instead, and what lies past a sequence's length is finite and masked.

    Attributes:
        rows: [N, groups, capacity, width]; a group is what some of the query heads share.
        lengths: int64 [N], how many tokens each sequence has.
        bound: no sequence is longer, tokens.
        slots: int32 [N], for decode alone, of which the sign counts: where it is negative a row holds no sequence, and
            ``append`` neither lengthens it nor changes what it holds. Making room is then up to the caller, and
            ``bound`` its own: a captured step can do neither. None: every row is a sequence.
    """

    PIECE = 256
    """Capacities are multiples of this, tokens."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.lengths = torch.empty(0, dtype=torch.int64)
        self.bound = 0
        self.slots: Tensor | None = None

    def reserve(self, tokens: int) -> bool:
        """Makes room for so many further tokens a sequence; whether ``rows`` moved. An empty cache has nothing to move.

        For a caller that replays a captured decode step, which cannot grow the cache: its ``append`` advances
        ``lengths`` and not ``bound``.
        """
        needed = self.bound + tokens + 1  # what a padding row writes, goes to the last place
        if self.rows is None or needed <= self.rows.shape[2]:
            return False
        capacity = -(-(needed + needed // 8) // self.PIECE) * self.PIECE
        self.rows = F.pad(self.rows, (0, 0, 0, capacity - self.rows.shape[2]))
        return True

    def extend(self, new: Tensor, cu_seqlens: Tensor, max_tokens: int) -> None:
        """Adds packed tokens, new [T, groups, width]; none of them, or more, for each sequence."""
        sequences = cu_seqlens.shape[0] - 1
        if self.rows is None:
            self.rows = new.new_zeros(sequences, new.shape[1], 0, new.shape[2])
            self.lengths = torch.zeros(sequences, dtype=torch.int64, device=new.device)
        self.reserve(max_tokens)
        if new.shape[0] and sequences:
            token = torch.arange(new.shape[0], device=new.device)
            live = token < cu_seqlens[-1]
            row = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(cu_seqlens.dtype), right=True)
            row = row.clamp(max=sequences - 1)
            place = torch.where(live, self.lengths[row] + token - cu_seqlens[row], self.rows.shape[2] - 1)
            self.rows[row, :, place] = torch.where(live[:, None, None], new, 0)
        self.lengths = self.lengths + cu_seqlens.diff()
        self.bound += max_tokens

    def append(self, new: Tensor) -> None:
        """Adds one token to every sequence, new [N, groups, width]."""
        assert self.rows is not None
        row = torch.arange(new.shape[0], device=new.device)
        if self.slots is None:
            self.reserve(1)
            self.rows[row, :, self.lengths] = new
            self.lengths.add_(1)
            self.bound += 1
            return
        live = self.slots >= 0
        place = torch.where(live, self.lengths, self.rows.shape[2] - 1)
        self.rows[row, :, place] = torch.where(live[:, None, None], new, 0)
        self.lengths.add_(live)

    def room(self) -> int:
        """How many single tokens fit in before ``rows`` must move."""
        return 0 if self.rows is None else max(0, self.rows.shape[2] - 1 - self.bound)

    def put(self, target: Tensor, other: TokenCache) -> None:
        """Takes all of another cache's sequences in place of the rows target, int64 [M]; ``bound`` is the caller's.

        Raises:
            ValueError: longer sequences than there is room for.
        """
        assert self.rows is not None and other.rows is not None
        width = min(self.rows.shape[2], other.rows.shape[2])
        if other.bound >= self.rows.shape[2]:
            raise ValueError(f"the cache has room for {self.rows.shape[2] - 1} tokens, not for {other.bound}")
        self.rows.index_fill_(0, target, 0)  # nothing of an earlier sequence, finite or not, may lie past the new one
        self.rows[:, :, :width].index_copy_(0, target, other.rows[:, :, :width])
        self.lengths.index_copy_(0, target, other.lengths)

    def packed(self) -> tuple[Tensor, Tensor, int]:
        """The tokens end to end [T, groups, width], their int32 offsets [N + 1], the longest; waits for the device."""
        assert self.rows is not None
        lengths = self.lengths.tolist()
        ends = F.pad(self.lengths.cumsum(0), (1, 0))
        row = torch.arange(len(lengths), device=ends.device).repeat_interleave(self.lengths, output_size=sum(lengths))
        place = torch.arange(sum(lengths), device=ends.device) - ends[row]
        self.bound = max(lengths, default=0)
        return self.rows[row, :, place], ends.to(torch.int32), self.bound

    def select(self, rows: Tensor) -> TokenCache:
        chosen = TokenCache()
        if self.rows is not None:
            index = rows.to(self.rows.device)
            chosen.rows, chosen.lengths = self.rows.index_select(0, index), self.lengths.index_select(0, index)
            chosen.bound = self.bound
        return chosen


ModelCache = list[LayerCache]


def select(cache: ModelCache, rows: list[int]) -> ModelCache:
    """The cache of these sequences alone, in this order."""
    index = torch.tensor(rows, dtype=torch.int64)
    return [layer.select(index) for layer in cache]
