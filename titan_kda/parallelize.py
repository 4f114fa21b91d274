"""How the decoder is spread over devices, in torchtitan's order: TP, activation checkpointing, compile, FSDP or DDP.

Tensor parallelism splits a KDA layer by heads: projections into heads are split by column with their convolutions,
A_log and dt_bias; the low-rank projections before them are replicated; the output projection is split by row. Full
attention is split by heads too, MLA's latent replicated. Between layers the stream is split along the sequence. Experts
are spread by torchtitan's own plans: whole experts over the ranks of an expert-parallel group, which borrows
data-parallel ranks, or every expert's width over the tensor-parallel ones.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_moe_ep_tp
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from .attention import KimiDeltaAttention
from .full_attention import GroupedQueryAttention, LatentAttention
from .model import Block, Decoder, TiedHead, unwrapped
from .moe import Experts

# FSDP's hooks on experts inside a checkpoint name what they do to the profiler, more often when it is run again. torch
# takes these for operators that must come in the same number, unless told to pass them by.
_PROFILER_OPERATORS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}

# What selective activation checkpointing keeps: products of matrices, the cores, what a collective brought, and which
# experts a token goes to and in what order. Computed again by other kernels of a graph, close scores may change places.
_SAVED_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.titan_kda.chunk_kda.default,
    torch.ops.titan_kda.document_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops.aten.max.default,
    torch.ops.aten.topk.default,
    torch.ops.aten.sort.stable,
}

# Those that divide a graph into forward and backward. Others may checkpoint a graph's inputs, and the experts' counts,
# which change, are among them.
_PARTITIONING_BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition")

_GRAPHS_A_KIND = 8  # torch.compile's own limit, here for each kind of layer: all layers are one code to it


class ShardHeads(ParallelStyle):
    """Splits a module's parameters along their first axis, heads or their channels; it computes on its shard."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = nn.Parameter(distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None))
            module.register_parameter(name, shard)
        return module


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: Any) -> nn.Module:
    """torchtitan's ``parallelize_fn``; the model is on the meta device."""
    decoder = cast(Decoder, model)
    blocks = [cast(Block, layer) for layer in decoder.layers.values()]
    experts = any(block.moe_enabled for block in blocks)
    if any(isinstance(block.mixer, KimiDeltaAttention) for block in blocks):
        for line in decoder.model_args.backends().describe(utils.device_type):
            logger.info(line)

    if parallel_dims.tp_enabled:
        mesh = parallel_dims.get_mesh("tp")
        apply_tp(decoder, mesh, loss_parallel=not job_config.parallelism.disable_loss_parallel)
        maybe_enable_async_tp(job_config, mesh)
    if experts and (parallel_dims.tp_enabled or parallel_dims.ep_enabled):
        apply_moe_ep_tp(
            decoder,
            tp_mesh=parallel_dims.get_optional_mesh("tp"),
            ep_mesh=parallel_dims.get_optional_mesh("ep"),
            etp_mesh=parallel_dims.get_optional_mesh("etp"),
            ep_etp_mesh=parallel_dims.get_optional_mesh(["ep", "etp"]),
        )
        logger.info(f"Spread the experts: expert parallel {parallel_dims.ep}, tensor parallel {parallel_dims.tp}")

    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        SAC_IGNORED_OPS.update(_PROFILER_OPERATORS)
        apply_ac(
            decoder,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=_SAVED_OPERATORS,
            base_folder=job_config.job.dump_folder,
        )
    against = parts_because(parallel_dims, job_config) if experts else None
    if compiled and against is not None:
        apply_compile(decoder, job_config.compile, parallel_dims.ep_enabled)
        logger.info(f"Compiling each layer with torch.compile, a mixture of experts in parts: {against}")
    elif compiled:
        compile_layers(decoder, job_config)
        logger.info(f"Compiling each layer with torch.compile{', experts in the same graph' if experts else ''}")
    if job_config.compile.enable and parallel_dims.tp_enabled:
        # Its key leaves out process groups' names, which a graph with collectives holds: a rank of one TP group, or a
        # later run, would take a graph that speaks to another group (torch 2.13).
        functorch_config.enable_autograd_cache = False

    if parallel_dims.fsdp_enabled:
        apply_fsdp(decoder, parallel_dims, job_config)
    elif parallel_dims.dp_replicate_enabled:
        mesh = parallel_dims.get_mesh("dp_replicate")
        if parallel_dims.world_size != mesh.size():
            raise RuntimeError("DDP (data_parallel_replicate_degree) does not combine with TP; use FSDP with TP")
        if compiled:
            torch._dynamo.config.optimize_ddp = "ddp_optimizer"
        # Buffers are counts and biases of the experts: each rank counts its own tokens, and all make the same bias.
        replicate(decoder, device_mesh=mesh, bucket_cap_mb=100, broadcast_buffers=False)
        cast(Any, decoder).register_comm_hook(mesh.get_group(), _average_gradients)
        logger.info("Applied DDP to the model")
    return decoder


def parts_because(parallel_dims: ParallelDims, job_config: Any) -> str | None:
    """What stands against a layer with experts as one graph, so that torchtitan's way compiles its parts around the
    dispatch; None: nothing does."""
    if parallel_dims.ep_enabled:
        return "expert parallelism reads on the host how many tokens it sends"
    if parallel_dims.tp_enabled:
        return "tensor parallelism spreads experts by hooks between them"
    if job_config.activation_checkpoint.mode == "memory_budget":
        # Beside rows that it keeps in the experts' order, it may choose the experts again, and others where scores are
        # close.
        return "a memory budget does not say what is computed again"
    backend = job_config.compile.backend
    if isinstance(backend, str) and backend not in _PARTITIONING_BACKENDS:
        return f"the backend {backend!r} may not divide a graph into forward and backward"
    # FSDP's type or autocast's: one of them brings it to the experts, whatever type the weights are kept in.
    precision = job_config.training.mixed_precision_param
    if not Experts.grouped(torch.device(utils.device_type), TORCH_DTYPE_MAP[precision]):
        return f"experts count their tokens on the host in {precision} on this device"
    return None


def compile_layers(decoder: Decoder, job_config: Any) -> None:
    """Each layer as one graph, its activation checkpointing with it.

    A layer with experts that is checkpointed as a whole is compiled inside of the checkpoint. Both passes then run the
    same kernels and choose the same experts; as part of a graph the second one is other kernels, whose rounding sends a
    token elsewhere where two scores are close. By operators, the choice is kept.
    """
    checkpointing = job_config.activation_checkpoint
    by_operator = checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op"
    blocks = [cast(Block, layer) for layer in decoder.layers.values()]
    kinds = {(type(block.mixer), block.moe_enabled) for block in blocks}
    limit = _GRAPHS_A_KIND * len(kinds)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    options: dict[str, Any] = dict(backend=job_config.compile.backend, fullgraph=True)
    for name, layer in decoder.layers.named_children():
        if isinstance(layer, CheckpointWrapper) and cast(Block, layer).moe_enabled:
            if not by_operator:
                # In place: a wrapper's name inside of another would end up in checkpoints.
                layer._checkpoint_wrapped_module.compile(**options)
                continue
            # torchtitan halves the experts' counts of a layer that says it is checkpointed; a graph counts but once.
            cast(Any, layer).checkpoint_impl = None
        decoder.layers.register_module(name, cast(nn.Module, torch.compile(layer, **options)))


# DDP checks the annotations, so they are objects here and not strings.
def _average_gradients(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own reduction, which also runs on a fake backend. See ``build_loss``."""
    buffer = bucket.buffer().div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def reduced(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what the reduction did; it holds the same buffer, but nothing on a fake backend
        return buffer

    return work.get_future().then(reduced)


def build_loss(job_config: Any, parallel_dims: ParallelDims, **_: Any) -> Callable[..., torch.Tensor]:
    """torchtitan's ``build_loss_fn``: cross-entropy in nats, summed over a rank's tokens, of logits [B, T, V] and
    labels [B, T].

    The trainer divides it by the global number of tokens, so ranks' gradients are to be added up. DDP averages instead,
    and a step's later micro-batches average again what the earlier ones left, which only an average leaves as it was.
    So a rank's gradient is multiplied by the number of ranks before DDP sees it.
    """
    loss_fn = build_cross_entropy_loss(job_config)
    if parallel_dims.fsdp_enabled or not parallel_dims.dp_replicate_enabled:
        return loss_fn

    def loss_under_ddp(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(pred, labels)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * parallel_dims.dp_replicate)
        return loss

    return loss_under_ddp


def apply_tp(decoder: Decoder, mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Tensor parallelism by heads, with sequence parallelism between layers."""
    head_layout: dict[str, Any] = {
        "output_layouts": Shard(-1) if loss_parallel else Replicate(),
        "use_local_output": not loss_parallel,
    }
    if isinstance(decoder.output, TiedHead):
        # The embedding's weight is split along the vocabulary, so the product with it is the split head's.
        output: ParallelStyle = PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_input=False,
            output_layouts=Shard(-1),
            desired_output_layouts=head_layout["output_layouts"],
            use_local_output=head_layout["use_local_output"],
        )
    else:
        output = ColwiseParallel(input_layouts=Shard(1), **head_layout)
    parallelize_module(
        decoder,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": output,
        },
    )
    # The embedding's output is still on its way. A compiled layer waits for such an input by dropping what autograd
    # knows of it (torch 2.13: the embedding's gradient then fails, or is wrong), so wait where autograd sees it.
    decoder.tok_embeddings.register_forward_hook(
        lambda module, args, output: torch.ops._c10d_functional.wait_tensor(output)
    )
    for layer in decoder.layers.values():
        block = cast(Block, layer)
        plan: dict[str, ParallelStyle] = {
            "mixer_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
        }
        if not block.moe_enabled:
            plan |= {
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            }
        if isinstance(block.mixer, KimiDeltaAttention):
            mixer_plan = kda_plan(block.mixer)
        elif isinstance(block.mixer, LatentAttention):
            mixer_plan = latent_plan()
        elif isinstance(block.mixer, GroupedQueryAttention):
            mixer_plan = grouped_query_plan()
        else:
            raise NotImplementedError(f"tensor parallelism has no plan for {type(block.mixer).__name__}")
        plan |= {f"mixer{name}": style for name, style in mixer_plan.items()}
        parallelize_module(block, mesh, plan)
    decoder.sequence_width = mesh.size()
    logger.info("Applied tensor parallelism to the model, attention layers by heads")


def _mixer_input() -> ParallelStyle:
    """Gathers what a mixer reads along the sequence; the other arguments are no tensors, or whole on every rank."""
    return PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
    )


def latent_plan() -> dict[str, ParallelStyle]:
    """The plan of one MLA layer; "" is the layer itself."""
    return {
        "": _mixer_input(),
        ".wq": ColwiseParallel(),
        ".wkv_a": NoParallel(use_local_output=False),
        ".kv_norm": NoParallel(use_local_output=False),
        ".wkv_b": ColwiseParallel(),
        ".wo": RowwiseParallel(output_layouts=Shard(1)),
    }


def grouped_query_plan() -> dict[str, ParallelStyle]:
    """The plan of one GQA layer; "" is the layer itself."""
    into_heads: dict[str, ParallelStyle] = {f".{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    return {"": _mixer_input(), **into_heads, ".wo": RowwiseParallel(output_layouts=Shard(1))}


def kda_plan(layer: KimiDeltaAttention) -> dict[str, ParallelStyle]:
    """The plan of one KDA layer, by submodule; "" is the layer itself."""
    into_heads: dict[str, ParallelStyle] = {
        f".{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "b_proj")
    }
    low_rank: dict[str, ParallelStyle] = {
        ".f_a_proj": NoParallel(use_local_output=False),
        ".f_b_proj": ColwiseParallel(),
    }
    if hasattr(layer, "g_a_proj"):
        low_rank |= {".g_a_proj": NoParallel(use_local_output=False), ".g_b_proj": ColwiseParallel()}
    else:
        low_rank[".g_proj"] = ColwiseParallel()
    return {
        "": _mixer_input(),
        **into_heads,
        **low_rank,
        ".q_conv": ShardHeads(),
        ".k_conv": ShardHeads(),
        ".v_conv": ShardHeads(),
        ".forget_gate": ShardHeads(),
        ".o_norm": SequenceParallel(sequence_dim=2, use_local_output=True),  # [B, T, H, V] is split along H
        ".o_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def apply_fsdp(decoder: Decoder, parallel_dims: ParallelDims, job_config: Any) -> None:
    """FSDP2, or HSDP with a replicate degree: one unit a layer, and an FP32 unit for each forget gate.

    Under expert parallelism a layer's experts are a unit of their own, over the ranks that hold the same ones.
    """
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(names)
    training = job_config.training
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param], reduce_dtype=reduce_dtype
    )
    # A layer's stream has that type already, and the gathered A_log and dt_bias beside it must keep theirs.
    layer_policy = replace(policy, cast_forward_inputs=False)
    shared: dict[str, Any] = {"mesh": mesh}
    if training.enable_cpu_offload:
        shared["offload_policy"] = CPUOffloadPolicy()
    match job_config.parallelism.fsdp_reshard_after_forward:
        case "always" | "default":
            reshard = True
        case "never":
            reshard = False
        case other:
            raise ValueError(f"parallelism.fsdp_reshard_after_forward must be default, always or never, got {other!r}")
    always = job_config.parallelism.fsdp_reshard_after_forward == "always"

    tied = isinstance(decoder.output, TiedHead)
    if not tied:  # a tied embedding stays in the root's unit, which is gathered from the first use to the last
        fully_shard(decoder.tok_embeddings, mp_policy=policy, reshard_after_forward=reshard, **shared)
    for layer in decoder.layers.values():
        mixer = unwrapped(cast(Block, layer).mixer)
        if isinstance(mixer, KimiDeltaAttention):
            # Gathered by the model before the layer's own unit, and kept: 4 (1 + K) bytes a head.
            fp32 = MixedPrecisionPolicy(
                param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            fully_shard(mixer.forget_gate, mp_policy=fp32, reshard_after_forward=False, **shared)
        moe = cast(Block, layer).moe
        if moe is not None and parallel_dims.ep_enabled:
            names = ["dp_replicate", "efsdp"] if parallel_dims.dp_replicate_enabled else ["efsdp"]
            expert_mesh = parallel_dims.get_mesh(names)
            few = parallel_dims.get_mesh("efsdp").size() * parallel_dims.ep > moe.experts.num_experts
            beside: dict[str, Any] = shared | {"mesh": expert_mesh}
            fully_shard(
                moe.experts,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=(lambda parameter: Shard(1)) if few else None,  # fewer experts than shards
                **beside,
            )
        fully_shard(layer, mp_policy=layer_policy, reshard_after_forward=reshard, **shared)
    if not tied:
        fully_shard([decoder.norm, decoder.output], mp_policy=policy, reshard_after_forward=always, **shared)
    fully_shard(decoder, mp_policy=policy, **shared)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            # torchtitan divides the loss by the global number of tokens itself.
            module.set_gradient_divide_factor(1.0)
            if utils.device_type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging
    if parallel_dims.ep_enabled:
        _prefetch(decoder)
    logger.info("Applied %s to the model", "HSDP" if parallel_dims.dp_replicate_enabled else "FSDP")


def _prefetch(decoder: Decoder) -> None:
    """Says which unit is gathered next: dispatching tokens waits for the host, and FSDP's own guess with it."""

    def units(layer: nn.Module) -> list[Any]:
        moe = cast(Block, layer).moe
        return [layer] if moe is None else [layer, moe.experts]

    layers = list(decoder.layers.values())
    for layer, following in pairwise(layers):
        cast(FSDPModule, layer).set_modules_to_forward_prefetch(units(following))
        cast(FSDPModule, following).set_modules_to_backward_prefetch(units(layer))
