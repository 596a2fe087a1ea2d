"""A Hugging Face checkpoint as a Megatron-Core policy model: configuration, layers, weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.megatron import convert, fp8
from moe_trm.learner.megatron.cpu_spec import cpu_block_spec
from moe_trm.learner.megatron.expert_biases import use_expert_biases
from moe_trm.learner.megatron.latent_attention import norm_keys_alone, set_latent_epsilon, use_whole_down_projections
from moe_trm.learner.megatron.layers import Layers
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.learner.megatron.stages import megatron_layout, virtual_stages
from moe_trm.learner.megatron.whole_norms import use_whole_norms
from moe_trm.models.family import Link
from moe_trm.models.hf_config import expert_width, head_dim, moe_layers, num_experts, rotary_share
from moe_trm.models.registry import family_of

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def transformer_config(
    hf: Mapping[str, Any], learner: LearnerConfig, layers: Layers, *, exact: bool = False
) -> TransformerConfig:
    """Megatron's configuration of the model that `config.json` (`hf`) describes.

    What differs between families is in `moe_trm.models`: for instance, gate weights that are normalised are Megatron's
    softmax after top-k. The router computes in float32 and has no auxiliary loss: in RL a load-balancing gradient would
    fight the replayed routes. `exact`: Megatron's batch-invariant mode, which it has for its flash attention alone.
    """
    moe = moe_layers(hf)
    dtype: torch.dtype = getattr(torch, learner.dtype)
    is_fused = layers == "transformer_engine"
    family = {"add_bias_linear": False, "activation_func": F.silu, **family_of(hf, "config.json").megatron(hf)}
    experts: dict[str, Any] = {}
    if moe:
        experts = {
            "num_moe_experts": num_experts(hf),
            "moe_ffn_hidden_size": expert_width(hf),
            "moe_router_topk": int(hf["num_experts_per_tok"]),
            "moe_layer_freq": [int(i in moe) for i in range(int(hf["num_hidden_layers"]))],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": is_fused,
            "moe_enable_routing_replay": True,
        }
    parallel, virtual = learner.parallel, virtual_stages(learner.parallel)
    kind = MLATransformerConfig if family.get("multi_latent_attention") else TransformerConfig
    config: TransformerConfig = kind(
        num_layers=int(hf["num_hidden_layers"]),
        hidden_size=int(hf["hidden_size"]),
        ffn_hidden_size=int(hf.get("intermediate_size") or hf["moe_intermediate_size"]),
        num_attention_heads=int(hf["num_attention_heads"]),
        num_query_groups=int(hf["num_key_value_heads"]),
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=float(hf["rms_norm_eps"]),
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=is_fused,
        perform_initialization=False,
        use_cpu_initialization=layers == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tensor_model_parallel_size=parallel.tensor,
        # MoE layers cannot do without it, dense ones gain from it.
        sequence_parallel=parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=megatron_layout(parallel, int(hf["num_hidden_layers"])),
        # Without overlap Megatron's interleaved schedule gives wrong gradients on two stages.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        # Micro-batches have the length of their longest row.
        variable_seq_lengths=parallel.pipeline > 1,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        # Gradients are summed over data-parallel ranks, never averaged: the objective already carries its denominators.
        calculate_per_token_loss=True,
        **experts,
        **family,
        **_recompute(learner.recompute),
        **({"batch_invariant_mode": True, "attention_backend": AttnBackend.flash} if exact else {}),
        **fp8.options(learner),
    )
    for name, value in family_of(hf, "config.json").yarn(hf).items():
        # Its rotary embedding looks for these attributes, which its configuration does not declare.
        setattr(config, f"yarn_{name}", value)
    return config


def _recompute(granularity: str) -> dict[str, Any]:
    if granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    # Each kind of layer heeds its own name only.
    return {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]} if granularity != "none" else {}


def build_model(hf: Mapping[str, Any], config: TransformerConfig, layers: Layers) -> list[PolicyModel]:
    """The policy model of this rank, one per virtual pipeline stage, weights not yet loaded.

    Needs initialised Megatron parallel groups.
    """
    stages = config.virtual_pipeline_model_parallel_size
    return [_build_chunk(hf, config, layers, stage) for stage in (range(stages) if stages else [None])]


def _build_chunk(hf: Mapping[str, Any], config: TransformerConfig, layers: Layers, stage: int | None) -> PolicyModel:
    if layers == "cpu":
        spec = cpu_block_spec(config, vp_stage=stage)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=layers == "transformer_engine", normalization="RMSNorm", vp_stage=stage
        )
    family = family_of(hf, "config.json")
    if config.multi_latent_attention and layers != "transformer_engine":
        use_whole_down_projections(spec)
    if config.multi_latent_attention and not config.q_lora_rank:
        norm_keys_alone(spec, is_fused=layers == "transformer_engine")
    if config.num_moe_experts and config.add_bias_linear and layers != "transformer_engine":
        use_expert_biases(spec)
    if family.whole_qk_norms:
        use_whole_norms(spec)
    chunk = PolicyModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(hf, config.tensor_model_parallel_size),
        real_vocab_size=int(hf["vocab_size"]),
        names=convert.Names(hf),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
        max_sequence_length=int(hf["max_position_embeddings"]),
        position_embedding_type="yarn" if family.yarn(hf) else "rope",
        rotary_base=rotary_base(hf),
        rotary_percent=rotary_share(hf),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
    )
    if config.multi_latent_attention:
        set_latent_epsilon(chunk)
    for local, parameter in chunk.named_parameters():
        name = convert.plain(local)
        dim = convert.split_dim(name)
        if dim is not None or convert.is_expert(name):
            # Megatron marks them when it initialises weights, which we do not let it: unmarked, the gradient norm would
            # count one rank's part only. It never marks an expert's last bias, although other ranks hold other experts.
            parameter.tensor_model_parallel, parameter.partition_stride = True, 1
            parameter.partition_dim = -1 if dim is None else dim
    return chunk


def rotary_base(hf: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies."""
    return float((hf.get("rope_parameters") or {}).get("rope_theta") or hf.get("rope_theta", 10000.0))


def padded_vocabulary(hf: Mapping[str, Any], tensor: int) -> int:
    """Rows of the embeddings: the vocabulary, padded so that `tensor` ranks share it evenly."""
    return -(-int(hf["vocab_size"]) // tensor) * tensor


def global_parameters(chunks: Sequence[PolicyModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters under plain names with global layer and expert numbers, without adapters' factors."""
    for chunk in chunks:
        config: TransformerConfig = chunk.config
        first_layer = _first_layer(chunk)
        first_expert = 0
        if config.num_moe_experts:
            size = parallel_state.get_expert_model_parallel_world_size()
            first_expert = config.num_moe_experts // size * parallel_state.get_expert_model_parallel_rank()
        for local, parameter in chunk.named_parameters():
            if ".lora_weight." in local:
                continue
            name = convert.with_layer(convert.plain(local), first_layer)
            if convert.is_expert(name):
                name = convert.with_expert(name, first_expert + convert.expert_number(name))
            yield name, parameter


def global_modules(chunks: Sequence[PolicyModel]) -> Iterator[tuple[str, torch.nn.Module]]:
    """This rank's modules under their names with global layer numbers."""
    for chunk in chunks:
        first_layer = _first_layer(chunk)
        for local, module in chunk.named_modules():
            yield convert.with_layer(local, first_layer), module


def _first_layer(chunk: PolicyModel) -> int:
    """0-based number in the whole model of the chunk's first layer; of a chunk without layers, any number does."""
    layers = chunk.decoder.layers
    return int(layers[0].layer_number) - 1 if len(layers) else 0


def global_tensors(chunks: Sequence[PolicyModel]) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors for a checkpoint: parameters, and the routers' selection biases, which are not trained."""
    yield from global_parameters(chunks)
    for chunk in chunks:
        first_layer = _first_layer(chunk)
        for local, buffer in chunk.named_buffers():
            if local.endswith("router.expert_bias"):
                yield convert.with_layer(local, first_layer), buffer


@torch.no_grad()
def load_weights(chunks: Sequence[PolicyModel], checkpoint: HfCheckpoint, hf: Mapping[str, Any]) -> None:
    """Fill this rank's parameters from the checkpoint; of other ranks' layers and experts nothing is read.

    Raises:
        CheckpointError: a shape that config.json does not announce, or a missing tensor.
    """
    tied = bool(hf.get("tie_word_embeddings", False))
    names = convert.Names(hf)
    shape = convert.heads(hf)
    for name, parameter in global_tensors(chunks):
        link = names.link(EMBEDDING if tied and name == OUTPUT else name)
        tensor = convert.pack(link.packing, _read(checkpoint, link, hf), shape)
        expected = whole_shape(name, parameter, hf)
        if list(tensor.shape) != expected:
            raise CheckpointError(
                "tensor has another shape than config.json announces",
                where=f"{checkpoint.folder}, {', '.join(link.hf_names)}",
                got=list(tensor.shape),
                expected=expected,
                fix=_shape_fix(link.hf_names[0]),
            )
        dim, group = convert.split_dim(name), tensor_group(name)
        if dim is not None and group.size() > 1:
            if name in (EMBEDDING, OUTPUT):
                tensor = F.pad(tensor, (0, 0, 0, padded_vocabulary(hf, group.size()) - len(tensor)))
            tensor = convert.part(name, tensor, dim, group.size(), group.rank())
        parameter.copy_(tensor)


def _read(checkpoint: HfCheckpoint, link: Link, hf: Mapping[str, Any]) -> list[Tensor]:
    if link.row is None:
        return [checkpoint.read(name) for name in link.hf_names]
    return [checkpoint.read_row(name, link.row, num_experts(hf)) for name in link.hf_names]


def tensor_group(name: str) -> ProcessGroup:
    """Ranks that together hold the parameter `name`."""
    group: ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if convert.is_expert(name)
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


def whole_shape(name: str, parameter: Tensor, hf: Mapping[str, Any]) -> list[int]:
    """Shape of the parameter `name` with the parts of all ranks, without padding of the vocabulary."""
    shape, dim = list(parameter.shape), convert.split_dim(name)
    if dim is not None:
        shape[dim] *= tensor_group(name).size()
    if name in (EMBEDDING, OUTPUT):
        shape[0] = int(hf["vocab_size"])
    return shape


def _shape_fix(hf_name: str) -> str:
    if re.search(r"embed_tokens|lm_head", hf_name):
        return "vocab_size in config.json and the embedding differ: use the config.json that belongs to these weights."
    return "Use the config.json that belongs to these weights."
