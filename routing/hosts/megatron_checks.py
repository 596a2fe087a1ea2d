"""Refusal of Megatron-Core models on which replay would do nothing or could not be proved, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from routing.errors import ReplayRefusedError


def unwrap(model: Any) -> Any:
    """The model inside DDP, Float16Module and their like."""
    while hasattr(model, "module"):
        model = model.module
    return model


def moe_layers(chunk: Any) -> list[tuple[int, Any]]:
    """(0-based decoder layer, MoE layer module) of one model chunk, in order.

    `layer_number` counts over the whole model.
    """
    layers = []
    for layer in chunk.decoder.layers:
        mlp = getattr(layer, "mlp", None)
        if getattr(mlp, "router", None) is not None:
            layers.append((int(layer.layer_number) - 1, mlp))
    return layers


def all_moe_layer_ids(config: Any) -> tuple[int, ...]:
    """0-based MoE layers of the whole model, whichever this rank holds: what a record must cover."""
    freq = config.moe_layer_freq
    pattern = freq if isinstance(freq, list) else [int(layer % freq == 0) for layer in range(config.num_layers)]
    return tuple(layer for layer, is_moe in enumerate(pattern) if is_moe)


def check_config(config: Any) -> None:
    """Raise `ReplayRefusedError` when a setting of `TransformerConfig` takes routing out of replay's hands."""
    for setting, reason, fix in _refusals(config):
        raise ReplayRefusedError(f"routing replay cannot be used with {setting}: {reason}. {fix}")


def _refusals(config: Any) -> Iterator[tuple[str, str, str]]:
    def get(name: str) -> Any:
        return getattr(config, name, None)

    if not get("num_moe_experts"):
        yield "a dense model", "it has no routers", "Set replay.mode=none."
    if get("moe_router_fusion"):
        yield (
            "moe_router_fusion",
            "the fused kernel selects experts itself and never asks for recorded ones",
            "Set moe_router_fusion=False.",
        )
    if "sinkhorn" in (get("moe_router_load_balancing_type") or ""):
        yield (
            "sinkhorn load balancing",
            "it selects experts itself and never asks for recorded ones",
            "Choose another load balancing type.",
        )
    if get("moe_expert_capacity_factor") is not None:
        yield "moe_expert_capacity_factor", "tokens would be dropped after replay", "Set it to None (dropless)."
    if get("moe_router_padding_for_quantization") or get("moe_router_padding_for_fp8"):
        yield "router padding for quantisation", "it adds experts to tokens after replay", "Switch it off."
    if get("moe_router_force_load_balancing"):
        yield "moe_router_force_load_balancing", "it replaces the router's logits by random ones", "Switch it off."
    if get("mtp_num_layers"):
        yield (
            "multi-token-prediction layers",
            "their routers have no recorded routes",
            "Use a model without MTP layers.",
        )
    if get("overlap_moe_expert_parallel_comm"):
        yield (
            "overlap_moe_expert_parallel_comm",
            "forward and backward of different micro-batches interleave inside a layer",
            "Switch it off.",
        )
    if (get("cuda_graph_impl") or "none") != "none":
        yield (
            "CUDA graphs",
            "a replayed graph would keep the routes it was captured with",
            "Set cuda_graph_impl='none'.",
        )
    if get("moe_token_dispatcher_type") not in ("alltoall", "allgather"):
        yield (
            f"the {get('moe_token_dispatcher_type')} dispatcher",
            "its routing map cannot be read back for the proof",
            "Use alltoall or allgather.",
        )
    if (get("tensor_model_parallel_size") or 1) > 1 and not get("sequence_parallel"):
        yield (
            "tensor parallelism without sequence parallelism",
            "Megatron's MoE layers need both",
            "Set sequence_parallel=True.",
        )
    yield from _wrong_layouts(get)


def _wrong_layouts(get: Callable[[str], Any]) -> Iterator[tuple[str, str, str]]:
    """Layouts that Megatron-Core accepts and computes wrongly, with or without replay."""
    pipeline, chunks = get("pipeline_model_parallel_size") or 1, get("virtual_pipeline_model_parallel_size") or 1
    if pipeline == 2 and chunks > 1 and not get("overlap_p2p_comm"):
        yield (
            "two pipeline stages of several chunks without overlapped communication",
            "Megatron-Core then exchanges the wrong activations without an error",
            "Set overlap_p2p_comm=True and batch_p2p_comm=False.",
        )
    tensor, experts = get("tensor_model_parallel_size") or 1, get("expert_model_parallel_size") or 1
    if tensor > 1 and experts == 1 and (get("expert_tensor_parallel_size") or 1) == 1 and _megatron_version() < (0, 17):
        yield (
            "tensor parallelism with whole experts on every rank",
            "Megatron-Core before 0.17 does not sum the experts' gradients over tensor-parallel ranks",
            "Set expert_tensor_parallel_size to the tensor parallel size, or use expert parallelism.",
        )


def _megatron_version() -> tuple[int, int]:
    major, minor = version("megatron-core").split(".")[:2]
    return int(major), int(minor)
