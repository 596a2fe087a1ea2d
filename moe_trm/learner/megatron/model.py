"""A Hugging Face checkpoint as a Megatron-Core policy model: configuration, layers, weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_config import moe_layers, num_experts
from moe_trm.learner.megatron import convert
from moe_trm.learner.megatron.checkpoint import HfCheckpoint
from moe_trm.learner.megatron.cpu_spec import cpu_block_spec
from moe_trm.learner.megatron.layers import Layers
from moe_trm.learner.megatron.policy import PolicyModel


def transformer_config(hf: Mapping[str, Any], learner: LearnerConfig, layers: Layers) -> TransformerConfig:
    """Megatron's configuration of the model that `config.json` (`hf`) describes.

    `norm_topk_prob` true means the gate weights are a softmax over the chosen experts, which is Megatron's softmax after top-k.
    The router computes in float32 and has no auxiliary loss: in RL a load-balancing gradient would fight the replayed routes.
    """
    moe = moe_layers(hf)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[learner.dtype]
    is_fused = layers == "transformer_engine"
    experts: dict[str, Any] = {}
    if moe:
        experts = {
            "num_moe_experts": num_experts(hf),
            "moe_ffn_hidden_size": int(hf["moe_intermediate_size"]),
            "moe_router_topk": int(hf["num_experts_per_tok"]),
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
            "moe_layer_freq": [int(i in moe) for i in range(int(hf["num_hidden_layers"]))],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": is_fused,
            "moe_enable_routing_replay": True,
        }
    recompute = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if learner.recompute == "full"
        else {}
    )
    return TransformerConfig(
        num_layers=int(hf["num_hidden_layers"]),
        hidden_size=int(hf["hidden_size"]),
        ffn_hidden_size=int(hf.get("intermediate_size") or hf["moe_intermediate_size"]),
        num_attention_heads=int(hf["num_attention_heads"]),
        num_query_groups=int(hf["num_key_value_heads"]),
        kv_channels=_head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=float(hf["rms_norm_eps"]),
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
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
        bf16=learner.dtype == "bfloat16",
        expert_model_parallel_size=learner.parallel.expert,
        # Gradients are summed over data-parallel ranks, never averaged: the objective already carries its denominators.
        calculate_per_token_loss=True,
        **experts,
        **recompute,
    )


def build_model(hf: Mapping[str, Any], config: TransformerConfig, layers: Layers) -> PolicyModel:
    """The policy model of this rank, weights not yet loaded. Needs initialised Megatron parallel groups."""
    if layers == "cpu":
        spec = cpu_block_spec(config)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=layers == "transformer_engine", normalization="RMSNorm"
        )
    rope = hf.get("rope_parameters") or {}
    return PolicyModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=int(hf["vocab_size"]),
        max_sequence_length=int(hf["max_position_embeddings"]),
        position_embedding_type="rope",
        rotary_base=rope.get("rope_theta") or hf.get("rope_theta", 10000.0),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
    )


def heads(hf: Mapping[str, Any]) -> convert.Heads:
    """Attention shape of the model, for weight conversion."""
    return convert.Heads(groups=int(hf["num_key_value_heads"]), head_dim=_head_dim(hf))


def global_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters under names with global expert numbers."""
    first: int | None = None
    for name, parameter in model.named_parameters():
        if not convert.is_expert(name):
            yield name, parameter
            continue
        if first is None:
            first = _num_local_experts(model) * parallel_state.get_expert_model_parallel_rank()
        yield convert.with_expert(name, first + convert.expert_number(name)), parameter


@torch.no_grad()
def load_weights(model: torch.nn.Module, checkpoint: HfCheckpoint, hf: Mapping[str, Any]) -> None:
    """Fill this rank's parameters from the checkpoint; of the experts only its own are read.

    Raises:
        CheckpointError: a missing or unexpected tensor, or a shape that config.json does not announce.
    """
    expected = {name: list(_all_experts(name, hf)) for name, _ in global_parameters(model)}
    # A tied checkpoint may still carry its output weight, which is then the embedding a second time.
    unexpected = checkpoint.names - {n for links in expected.values() for n in links} - {"lm_head.weight"}
    if unexpected:
        raise CheckpointError(
            "checkpoint holds tensors the model has no place for",
            where=str(checkpoint.folder),
            got=sorted(unexpected)[:4],
            expected="the tensors of the model in config.json",
            fix="config.json and the weight files do not belong together.",
        )
    shape = heads(hf)
    for name, parameter in global_parameters(model):
        found = convert.link(name)
        tensor = convert.pack(found.packing, [checkpoint.read(n) for n in found.hf_names], shape)
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                "tensor has another shape than config.json announces",
                where=f"{checkpoint.folder}, {', '.join(found.hf_names)}",
                got=list(tensor.shape),
                expected=list(parameter.shape),
                fix=_shape_fix(found.hf_names[0]),
            )
        parameter.copy_(tensor)


def _head_dim(hf: Mapping[str, Any]) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def _num_local_experts(model: torch.nn.Module) -> int:
    return 1 + max(convert.expert_number(name) for name, _ in model.named_parameters() if convert.is_expert(name))


def _all_experts(name: str, hf: Mapping[str, Any]) -> Iterator[str]:
    numbers = range(num_experts(hf)) if convert.is_expert(name) else [0]
    for number in numbers:
        yield from convert.link(convert.with_expert(name, number) if convert.is_expert(name) else name).hf_names


def _shape_fix(hf_name: str) -> str:
    if re.search(r"embed_tokens|lm_head", hf_name):
        return "vocab_size in config.json and the embedding differ: use the config.json that belongs to these weights."
    return "Use the config.json that belongs to these weights."
