"""The training text among data-parallel ranks, dealt anew where a job goes on with another number of them.

Each rank reads its own part of the list of pieces, over and over. A checkpoint holds, for every rank that saved it, how
far it had read and the tokens that did not fill a row yet. As many ranks take up each its own. More ranks, or fewer,
lay end to end what each had still to read of its part and cut that anew; behind its share of it each goes on with its
part of the whole list, as if it had always been there. So no token is lost or read twice, and the next number of ranks
can do the same again.
"""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, cast

from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components import checkpoint as torchtitan_checkpoint
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset
from torchtitan.tools.logging import logger

from .checkpoint import data_parallel_ranks
from .job_config import JobError

_BEGIN_AGAIN = 'begin the text again with checkpoint.exclude_from_loading = ["dataloader"]'

Span = tuple[int, int]  # positions in the list of pieces, from the first up to but without the last


def part_of(length: int, rank: int, ranks: int) -> Span:
    """A rank's part of a list: as even as can be, the first ranks' one longer (``datasets.Dataset.shard``'s cut)."""
    even, longer = divmod(length, ranks)
    start = even * rank + min(rank, longer)
    return start, start + even + (rank < longer)


def cut(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """What lies from ``first`` up to ``last`` in spans laid end to end."""
    found = []
    for start, stop in spans:
        here = max(start + first, start), min(start + last, stop)
        if here[0] < here[1]:
            found.append(here)
        first, last = first - (stop - start), last - (stop - start)
    return found


def size_of(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def deal(states: Sequence[dict[str, Any]], length: int, rank: int, ranks: int) -> dict[str, Any]:
    """One rank's state out of those that any number of ranks saved.

    Args:
        states: of every rank that saved them, in order; see ``DealtTextDataset.state_dict``.
        length: of the whole list of pieces.
    """
    unread: list[Span] = []
    for old, state in enumerate(states):
        spans = state.get("spans")
        spans = [part_of(length, old, len(states))] if spans is None else spans
        unread += cut(spans, state["sample_idx"], size_of(spans))
    buffers = [state["token_buffer"] for state in states][rank::ranks]
    return {
        "token_buffer": [token for buffer in buffers for token in buffer],
        "sample_idx": 0,
        "spans": cut(unread, *part_of(size_of(unread), rank, ranks)),
        **({"pieces": states[0]["pieces"]} if "pieces" in states[0] else {}),
    }


class DealtTextDataset(HuggingFaceTextDataset):
    """torchtitan's text dataset, which can first read what other ranks left over."""

    def __init__(self, *, dp_rank: int, dp_world_size: int, **kwargs: Any) -> None:
        super().__init__(dp_rank=0, dp_world_size=1, **kwargs)
        self._whole = self._data
        self._spans: list[Span] | None = None  # what to read before the rank's own part; sample_idx counts in it
        if isinstance(self._whole, Dataset):
            pieces = len(self._whole)
            if pieces < dp_world_size:  # a rank with nothing to read would look for it for ever
                raise ValueError(f"{self.dataset_name}: {pieces} piece(s) for {dp_world_size} data-parallel rank(s)")
            self._data = self._whole.select(range(*part_of(pieces, dp_rank, dp_world_size)))
        else:
            self._data = split_dataset_by_node(self._whole, dp_rank, dp_world_size)

    def _get_data_iter(self) -> Iterator[Any]:
        return super()._get_data_iter() if self._spans is None else self._left_over_first(self._spans)

    def _left_over_first(self, spans: list[Span]) -> Iterator[Any]:
        pieces = len(self._whole)  # a text that was changed may end before a span does
        for start, stop in cut(spans, self._sample_idx, size_of(spans)):
            if start < pieces:
                yield from self._whole.select(range(start, min(stop, pieces)))
        self._spans, self._sample_idx = None, 0
        yield from super()._get_data_iter()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        # A worker goes on reading, into the same list, before its state has been written into the queue.
        state["token_buffer"] = list(state["token_buffer"])
        if isinstance(self._whole, Dataset):
            state["pieces"] = len(self._whole)
        return state if self._spans is None else {**state, "spans": self._spans}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._spans = state_dict.get("spans")


class DealtDataloader(ParallelAwareDataloader):
    """torchtitan's loader over a ``DealtTextDataset``, which can load what another number of ranks saved."""

    _saved_by: int | None = None  # while such a state is being loaded

    @property
    def _text(self) -> DealtTextDataset:
        return cast(DealtTextDataset, self.dataset)

    def expect(self, ranks: int, source: str) -> None:
        """Prepares the next ``load_state_dict`` for the states of so many ranks.

        Raises:
            JobError: there are none, or not as many as now and the text cannot be dealt anew.
        """
        self._saved_by = None if ranks == self.dp_world_size else ranks
        if ranks == 0:
            raise JobError(f"{source} does not say how far the training text was read: {_BEGIN_AGAIN}")
        if self._saved_by is not None and not isinstance(self._text._whole, Dataset):
            raise JobError(
                f"{source} was saved by {ranks} data-parallel rank(s), and this job has {self.dp_world_size}: "
                f"training.dataset = {self._text.dataset_name!r} is a stream, which is not dealt anew: go on with "
                f"{ranks}, or {_BEGIN_AGAIN}"
            )

    def state_dict(self) -> dict[str, Any]:
        if self._saved_by is None:
            return super().state_dict()
        # What a checkpoint is asked for.
        return {**{f"dp_rank_{rank}": b"" for rank in range(self._saved_by)}, "world_size": self._saved_by}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._saved_by is None:
            own = pickle.loads(state_dict[self._rank_id]) if self._rank_id in state_dict else None
            if own is not None:
                self._check_text(_dataset_states(own)[0])
            if own is None or _workers(own) == self.num_workers:
                super().load_state_dict(state_dict)
            elif self.num_workers > 1:
                raise JobError(
                    f"training.dataloader.num_workers is {self.num_workers}, and was {_workers(own)} when the "
                    f"checkpoint was saved: go on with as many, or {_BEGIN_AGAIN}"
                )
            else:  # saved by a loader that read by itself, loaded by one with a worker, or the other way round
                self._load_text(_dataset_state(own))
            return
        ranks, self._saved_by = self._saved_by, None
        states = [_dataset_state(pickle.loads(state_dict[f"dp_rank_{rank}"])) for rank in range(ranks)]
        self._check_text(states[0])
        # A text that was changed meanwhile is dealt as long as it was.
        length = states[0].get("pieces", len(self._text._whole))
        state = deal(states, length, self.dp_rank, self.dp_world_size)
        self._load_text(state)
        logger.info(
            f"Saved by {ranks} data-parallel rank(s), continued by {self.dp_world_size}: the text not yet read in this "
            f"pass is dealt anew, {size_of(state['spans'])} of {length} pieces to rank {self.dp_rank}"
        )

    def _check_text(self, state: dict[str, Any]) -> None:
        """Looks whether a place in the text can be one in this job's."""
        text = self._text
        if isinstance(text._whole, Dataset) != ("sample_idx" in state):
            kinds = ("a stream", "a list of pieces")
            saved, now = kinds["sample_idx" in state], kinds[isinstance(text._whole, Dataset)]
            raise JobError(
                f"the checkpoint's training text was {saved}, and training.dataset = {text.dataset_name!r} is {now}: "
                f"{_BEGIN_AGAIN}"
            )
        saved = state.get("pieces")  # not in a checkpoint by an earlier version
        if saved is not None and saved != len(text._whole):
            logger.warning(
                f"training.dataset = {text.dataset_name!r} has {len(text._whole)} pieces, and had {saved} when the "
                f"checkpoint was saved: this pass will leave some out or read them twice, unless you {_BEGIN_AGAIN}"
            )

    def _load_text(self, state: dict[str, Any]) -> None:
        StatefulDataLoader.load_state_dict(self, {})  # drops an iterator made for an earlier state
        self._text.load_state_dict(state)


def _workers(state: dict[str, Any]) -> int:
    """How many workers a loader had that saved this; 0: it read by itself."""
    return len(state["_snapshot"]["_worker_snapshots"]) if "_snapshot" in state else 0


def _dataset_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The dataset's own states in a loader's: one, or each worker's."""
    if "_snapshot" not in state:
        return [state["dataset_state"]]
    return [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]


def _dataset_state(state: dict[str, Any]) -> dict[str, Any]:
    """The dataset's own state in a loader's, whether it read by itself or through a worker."""
    states = _dataset_states(state)
    if len(states) > 1 or state.get("_steps_since_snapshot"):
        raise JobError(
            f"text that {len(states)} workers of training.dataloader have read is not dealt anew: go on with as many "
            f"workers and data-parallel ranks as before, or {_BEGIN_AGAIN}"
        )
    return states[0]


def extend_checkpoint_manager() -> None:
    """Has torchtitan's checkpoint manager tell a ``DealtDataloader`` how many ranks saved what it is about to load.

    It asks the loader for the names to load before anything has been read, and offers no other place for this. Calling
    this again changes nothing.
    """
    manager = torchtitan_checkpoint.CheckpointManager
    load = manager.dcp_load
    if getattr(load, "deals_text", False):
        return

    def dcp_load(
        self: Any, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        loader = state_dict.get(torchtitan_checkpoint.DATALOADER)
        if isinstance(loader, DealtDataloader):
            loader.expect(data_parallel_ranks(checkpoint_id), checkpoint_id)
        load(self, state_dict, checkpoint_id, from_hf, from_quantized)

    dcp_load.deals_text = True  # type: ignore[attr-defined]
    manager.dcp_load = dcp_load  # type: ignore[method-assign]
