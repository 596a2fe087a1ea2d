"""From the run's configuration to a ready `MegatronLearner`: process groups, model, weights, optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import package_info, parallel_state, tensor_parallel
from torch import Tensor

from moe_trm.config.learning_rate import learning_rate
from moe_trm.config.schema import Config, LayerNoiseConfig, ParallelConfig
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.hf_form import ExportForm
from moe_trm.learner.hf_tensors import check_tensors
from moe_trm.learner.layer_noise import LayerNoise
from moe_trm.learner.lora.base import Identity, base_checksum
from moe_trm.learner.lora.requested import requested_adapters
from moe_trm.learner.loss_scale import loss_scale_of
from moe_trm.learner.megatron import cpu_shim, exact, fp8, layout
from moe_trm.learner.megatron.export import OwnedTensors
from moe_trm.learner.megatron.layers import layers_here
from moe_trm.learner.megatron.learner import MegatronLearner
from moe_trm.learner.megatron.lora import MegatronAdapters, add_adapters
from moe_trm.learner.megatron.model import build_model, load_weights, transformer_config
from moe_trm.learner.megatron.optimizer import MegatronGuardedOptimizer, freeze, wrap_model
from moe_trm.learner.megatron.packed import check_packed
from moe_trm.learner.megatron.parts import Parts
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.learner.megatron.stages import virtual_stages
from moe_trm.learner.megatron.state import MegatronState, base_parts
from moe_trm.learner.parameter_groups import check_groups
from moe_trm.models import hf_config
from moe_trm.sync.rounding import computes_in
from routing.megatron import MegatronReplayer


def build_megatron_learner(config: Config) -> MegatronLearner:
    """Build this rank's learner. Collective; call it once per process, under torchrun.

    Raises:
        ConfigError: a layout that is refused (see `layout.check_layout`), before anything is loaded.
        CheckpointError: a checkpoint that is missing, incomplete, unsupported, or does not fit its tokenizer; an
            adapter to start from that does not fit.
    """
    folder = config.model.checkpoint
    hf = hf_config.read_hf_config(folder)
    layout.check_layout(config, package_info.__version__, hf, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    hf_config.check_vocabulary(folder, int(hf["vocab_size"]))
    checkpoint = HfCheckpoint(folder)
    check_tensors(checkpoint, hf)
    adapter_settings = requested_adapters(config.learner, config.seed, hf, checkpoint)
    check_groups(config.optimizer, checkpoint.names if adapter_settings is None else adapter_settings.factor_names)
    layers, packed = layers_here(config.learner, hf), config.batch.layout == "packed"
    if packed:
        check_packed(layers, hf)
    device = _start_process_group()
    start_parallel_groups(config.learner.parallel, config.seed)
    model_config = transformer_config(hf, config.learner, layers, exact=config.exact)
    if config.exact:
        exact.install(device)
    chunks = [chunk.to(device) for chunk in build_model(hf, model_config, layers)]
    load_weights(chunks, checkpoint, hf)
    freeze(chunks, config.learner)
    leave_untrained(chunks, hf)
    adapters, identity = MegatronAdapters(), None
    if adapter_settings is not None:
        adapters = add_adapters(chunks, hf, adapter_settings)
        identity = Identity(base_checksum(base_parts(chunks, hf), device), adapter_settings.lora)
    # A single rank would copy its gradients and weights without sharing them. On a CPU all state is on the host.
    is_alone = parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
    is_offloaded = config.learner.offload_optimizer and device.type == "cuda"
    is_distributed = is_offloaded or (config.learner.distributed_optimizer and not is_alone)
    loss_scale = loss_scale_of(config.learner.dtype, config.learner.loss_scale)
    wrapped = wrap_model(chunks, model_config, loss_scale, distributed_optimizer=is_distributed)
    optimizer = MegatronGuardedOptimizer(
        chunks,
        wrapped,
        config.optimizer,
        learning_rate(config.optimizer, config.learner, config.train),
        loss_scale,
        bf16=model_config.bf16,
        distributed=is_distributed,
        offloaded=is_offloaded,
        factors=adapters.factors,
    )
    replayer = None
    if hf_config.moe_layers(hf):
        replayer = MegatronReplayer(
            wrapped, max_local_flip_rate=config.replay.stops_above, missing=config.replay.missing
        )
    adapters.merge_in_passes()
    return MegatronLearner(
        chunks,
        wrapped,
        optimizer,
        replayer,
        HfExporter(
            OwnedTensors(chunks, hf, adapters.merged),
            ExportForm(checkpoint, config.learner.dtype, config.train.export_form == "published"),
        ),
        MegatronState(chunks, optimizer, hf, adapters.factors, identity),
        Parts(fp8.alignment(config.learner), packed=packed),
        temperature=config.rollout.temperature,
        device=device,
        computes_in=computes_in(config.learner, config.rollout, config.train, config.seed),
        frozen_base=adapter_settings is not None,
        noise=_layer_noise(chunks, config.learner.layer_noise, config.seed, device),
    )


def _layer_noise(
    chunks: Sequence[PolicyModel], settings: LayerNoiseConfig, seed: int, device: torch.device
) -> LayerNoise | None:
    if not settings.sigma:
        return None
    layers = {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return LayerNoise(layers, chunks[0].config.num_layers, settings, seed, device, tracker)


def close_learner() -> None:
    """Tear the process groups down; the learner is unusable afterwards."""
    parallel_state.destroy_model_parallel()
    exact.remove()
    if dist.is_initialized():
        dist.destroy_process_group()


def _start_process_group() -> torch.device:
    """The device of this rank; joins the group that torchrun described unless the launcher already did."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        cpu_shim.define_router_gemm()
    else:
        cpu_shim.install()
        device = torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def start_parallel_groups(parallel: ParallelConfig, seed: int, *, with_gloo: bool = True) -> None:
    """Megatron's groups of ranks, and its generators. `with_gloo`: and the groups of gloo that it makes beside them."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages(parallel),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=with_gloo,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave_untrained(chunks: Sequence[PolicyModel], hf: Mapping[str, Any]) -> None:
    """Give the embedding of the padding id, if config.json `hf` names one, no gradient in this rank's `chunks`.

    transformers never trains it (`padding_idx` of `torch.nn.Embedding`), and Megatron-Core would. The row is zero in
    most models, and the gradient of RMSNorm at zero is divided by the root of its epsilon: a policy that samples the id
    once gives a gradient norm of thousands. Where embedding and output weight are tied, the row still learns as an
    output.
    """
    if (named := hf.get("pad_token_id")) is None:
        return
    # transformers counts negative ids from the end.
    padding_id = int(named) % int(hf["vocab_size"])
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.word_embeddings.register_forward_hook(partial(_without_gradient, padding_id))


def _without_gradient(padding_id: int, embedding: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output `[B, C, H]`, or this rank's part `[C / tp, B, H]` of it, with the rows of the padding id cut off."""
    is_padding = inputs[0] == padding_id
    if embedding.reduce_scatter_embeddings:
        group = embedding.tp_group
        is_padding = is_padding.t().chunk(group.size())[group.rank()]
    return torch.where(is_padding[..., None], output.detach(), output)
