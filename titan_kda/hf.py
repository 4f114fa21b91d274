"""torchtitan's loading and saving in Hugging Face form: ``checkpoint.initial_load_in_hf`` and ``last_save_in_hf``.

``KimiLinearAdapter`` renames and reshapes a state dict; sharded tensors go shard by shard, none is gathered.
``FolderReader`` shows DCP a folder that has been compared with the model, and ``extend_checkpoint_manager`` has
torchtitan write one that loads elsewhere as it is. The form itself is in ``titan_kda.hf_format``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torchtitan.components import checkpoint as torchtitan_checkpoint
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from .checkpoint import CheckpointError, CheckpointMismatchError, set_aside, unfinished_name
from .hf_format import (
    Folder,
    Slot,
    UnsupportedArchitectureError,
    check_exportable,
    is_copy,
    keeps_fp32,
    layout,
    listed,
    open_folder,
    plan_shards,
    shapes_of,
    token_ids,
    write_config,
)
from .model import ModelArgs


def check_settings(job_config: Any, args: ModelArgs) -> None:
    """Compares what ``[checkpoint]`` will load or save in Hugging Face form with the model, before anything starts.

    Raises:
        CheckpointError: one line that names the setting and lists what differs.
    """
    settings = job_config.checkpoint
    if not settings.enable:
        return
    if settings.last_save_in_hf and not (settings.load_only or settings.create_seed_checkpoint):
        try:
            check_exportable(args)
        except CheckpointError as error:
            raise UnsupportedArchitectureError(f"checkpoint.last_save_in_hf: {error}") from None
    folder = Path(job_config.job.dump_folder, settings.folder)
    if not settings.initial_load_in_hf or (folder.is_dir() and any(folder.iterdir())):
        return  # a job that goes on from its own checkpoints
    if not settings.initial_load_model_only:
        raise CheckpointMismatchError("checkpoint.initial_load_in_hf needs checkpoint.initial_load_model_only = true")
    if settings.initial_load_in_hf_quantized:
        raise CheckpointMismatchError("checkpoint.initial_load_in_hf_quantized: quantized weights are not read")
    try:
        with open_folder(settings.initial_load_path or job_config.model.hf_assets_path, args):
            pass
    except CheckpointError as error:
        raise CheckpointMismatchError(f"checkpoint.initial_load_in_hf: {error}") from None


class Piece(torch.Tensor):
    """This rank's part of a folder's tensor, as a DCP save or load sees it; it computes nothing.

    DTensor cannot say what becomes of a shard when one expert is taken out of a grouped parameter, or when [H, K]
    becomes [H K] with heads split unevenly; a part's offsets and sizes can.
    """

    local: Tensor
    origin: Tensor
    offsets: torch.Size

    @staticmethod
    def __new__(cls, slot: Slot, origin: DTensor) -> Piece:
        (chunk,) = origin.__create_chunk_list__()
        local = origin.to_local()
        offsets, sizes = list(chunk.offsets), list(chunk.sizes)
        piece = torch.Tensor._make_wrapper_subclass(cls, slot.shape, dtype=local.dtype, device=local.device)
        if slot.expert is not None:
            row = slot.expert - offsets.pop(0)
            present = 0 <= row < sizes.pop(0)
            local = local[row] if present else local[:0].flatten()
        if 0 in local.shape:
            piece.local, piece.offsets = local, torch.Size(())
        else:
            offsets, sizes = slot.place(offsets, sizes)
            piece.local, piece.offsets = local.view(sizes), torch.Size(offsets)
        piece.origin = origin
        return piece

    # What DCP asks of a tensor that knows its own parts.
    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offsets, self.local.shape)] if self.local.numel() else []

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self._chunks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{cls.__name__} computes nothing: {func}")


class FolderReader(HuggingFaceStorageReader):
    """DCP's view of a folder, under the released names whatever form the folder has."""

    def __init__(self, folder: Folder):
        super().__init__(str(folder.path))
        self._folder = folder

    def read_metadata(self) -> Metadata:
        tensors: dict[str, Any] = {}
        for key, slot in self._folder.slots.items():
            size = torch.Size(slot.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            tensors[key] = TensorStorageMetadata(TensorProperties(self._folder.dtypes[key]), size, [whole])
        return Metadata(tensors, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._folder as folder:
            for item in plan.items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(folder.read(item.storage_index.fqn, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class KimiLinearAdapter(StateDictAdapter):
    """torchtitan's state-dict adapter, for whole tensors and for any sharding (FSDP, HSDP, TP, EP) of them.

    Whole tensors come out as views. Sharded ones come out as ``Piece`` objects, which DCP writes from, and reads into,
    the model's own storage.

    Args:
        model_args: the model.
        hf_assets_path: ``model.hf_assets_path``; what its config.json and index say is not used here.
    """

    def __init__(self, model_args: ModelArgs, hf_assets_path: str | None):
        # Not the base's: it takes the files' layout from the index among the assets, whose names need not be ours.
        self.model_args = model_args
        self.hf_assets_path = hf_assets_path

    @property
    def fqn_to_index_mapping(self) -> dict[Any, int] | None:  # type: ignore[override]
        """The file, from 1, that each tensor is saved to; None if one will do."""
        slots = layout(shapes_of(self.model_args))
        sizes = {key: 4 * torch.Size(slot.shape).numel() for key, slot in slots.items()}
        shards = plan_shards(sizes)
        return {key: i for i, keys in enumerate(shards, 1) for key in keys} if len(shards) > 1 else None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the model, under the folder's names; nothing is copied.

        Raises:
            UnsupportedArchitectureError: a model that the form cannot hold.
        """
        check_exportable(self.model_args)
        slots = layout({name: tensor.shape for name, tensor in state_dict.items()})
        converted = {}
        for key, slot in slots.items():
            tensor = state_dict[slot.name]
            converted[key] = Piece(slot, tensor) if isinstance(tensor, DTensor) else slot.take(tensor)
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The inverse of ``to_hf``: whole tensors under the released names, or its own pieces once they are loaded.

        Raises:
            CheckpointMismatchError: names or shapes are not the model's.
        """
        slots = layout(shapes_of(self.model_args))
        problems = [f"{key} is missing" for key in slots if key not in hf_state_dict]
        problems += [f"{key} is unexpected" for key in hf_state_dict if key not in slots]
        for key in slots.keys() & hf_state_dict.keys():
            if tuple(hf_state_dict[key].shape) != slots[key].shape:
                problems.append(f"{key} is {list(hf_state_dict[key].shape)}, not {list(slots[key].shape)}")
        if problems:
            raise CheckpointMismatchError(f"a state dict of another model: {listed(problems, '; ')}")
        state_dict: dict[str, Any] = {}
        experts: dict[str, list[Tensor]] = {}
        for key, slot in slots.items():
            tensor = hf_state_dict[key]
            if isinstance(tensor, Piece):
                state_dict[slot.name] = tensor.origin
            elif slot.expert is not None:
                experts.setdefault(slot.name, []).append(tensor)
            elif not is_copy(key, slot):
                state_dict[slot.name] = tensor.reshape(slot.own_shape)
        return state_dict | {name: torch.stack(rows) for name, rows in experts.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """A reader of a folder, once its config.json and its tensors have been compared with the model.

        Raises:
            CheckpointError: one line that lists what differs.
        """
        if from_quantized:
            raise UnsupportedArchitectureError(
                "checkpoint.initial_load_in_hf_quantized: quantized weights are not read"
            )
        return FolderReader(open_folder(path, self.model_args))


def _save_last_step(manager: Any, save: Any, state_dict: dict[str, Any], target: Path, **kwargs: Any) -> None:
    """torchtitan's save in Hugging Face form, made a whole folder: config.json, FP32 where it matters, one rename."""
    adapter: KimiLinearAdapter = manager.sd_adapter
    rank = dist.get_rank() if dist.is_initialized() else 0

    def barrier() -> None:
        if dist.is_initialized():
            dist.barrier()

    growing = unfinished_name(target)
    if rank == 0 and growing.exists():
        shutil.rmtree(growing)  # of a save that was interrupted
    barrier()
    uncast = manager.states[torchtitan_checkpoint.MODEL].state_dict()
    state_dict = {name: uncast[name] if keeps_fp32(name) else tensor for name, tensor in state_dict.items()}
    save(manager, state_dict, checkpoint_id=str(growing), **kwargs)
    barrier()
    if rank == 0:
        shutil.rmtree(growing / "sharded", ignore_errors=True)
        trainer = manager.states.get(torchtitan_checkpoint.TRAIN_STATE)
        args, assets = adapter.model_args, adapter.hf_assets_path
        tokens = token_ids(args.vocab_size, getattr(trainer, "tokenizer", None), assets)
        named = getattr(getattr(trainer, "job_config", None), "data", None)
        write_config(
            growing,
            args,
            tokens,
            state_dict["norm.weight"].dtype,
            assets if named and named.tokenizer == "hf" else None,
        )
        with open_folder(growing, args):  # every tensor is there
            pass
        if target.exists():
            set_aside(target, f"{target} was saved before")
        growing.rename(target)
    barrier()


def extend_checkpoint_manager() -> None:
    """Has torchtitan's checkpoint manager write whole folders where it saves by ``KimiLinearAdapter``.

    torchtitan 0.2 writes weights and index alone, straight into the step's folder, and casts A_log and dt_bias with
    the rest. It offers no place for this, so its method is replaced; saves of other kinds and models go to the method
    as it was. Calling this again changes nothing.
    """
    manager = torchtitan_checkpoint.CheckpointManager
    save = manager.dcp_save
    if getattr(save, "writes_config", False):
        return

    def dcp_save(
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if to_hf and isinstance(self.sd_adapter, KimiLinearAdapter):
            kwargs = {"async_mode": async_mode, "enable_garbage_collection": enable_garbage_collection, "to_hf": True}
            return _save_last_step(self, save, state_dict, Path(checkpoint_id), **kwargs)
        return save(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)

    dcp_save.writes_config = True  # type: ignore[attr-defined]
    manager.dcp_save = dcp_save  # type: ignore[method-assign]
