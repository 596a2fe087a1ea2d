"""Tiny Megatron models, micro-batches and routes for the replay tests.

They run inside ranks, after the CPU shim is installed.

The second decoder layer is dense and rows have different lengths. Weights depend only on parameter names, so expert and
pipeline parallel ranks build parts of one model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from routing import Layout, RouteRecord, token_digest
from routing.megatron import MegatronReplayer
from routing.record.sources import Record, Recorded, ReplayRecords
from tests.integration.ranks import fork_ranks
from tests.integration.rows import Rows

LAYERS, E, K, VOCAB, B, R = (0, 2, 3), 8, 2, 64, 3, 8
LENGTHS = (8, 5, 3)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def config(**changes: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 16, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 8, "normalization": "RMSNorm", "qk_layernorm": True,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False, "persist_layer_norm": False, "num_moe_experts": E, "moe_router_topk": K,
        "moe_layer_freq": [1, 0, 1, 1], "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32", "use_cpu_initialization": True,
        "params_dtype": torch.float32, "pipeline_dtype": torch.float32,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }  # fmt: skip
    return TransformerConfig(**(options | changes))


def build(**changes: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from moe_trm.learner.megatron.cpu import cpu_block_spec

    settings = config(**changes)
    model = GPTModel(
        settings,
        cpu_block_spec(settings),
        VOCAB,
        R,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    experts = (
        parallel_state.get_expert_model_parallel_rank() * E // parallel_state.get_expert_model_parallel_world_size()
    )
    first = {"local_experts": experts, "layers": model.decoder.layers[0].layer_number - 1}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        for place in [i + 1 for i, part in enumerate(parts) if part in first]:
            parts[place] = str(int(parts[place]) + first[parts[place - 1]])
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def batch(seed: int = 0) -> Rows:
    tokens = torch.randint(1, VOCAB, (B, R + 1), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(R)[None] < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": tokens[:, :-1].contiguous(), "target_ids": tokens[:, 1:].contiguous(), "valid": valid}


def sequences(data: Rows) -> list[np.ndarray]:
    return [np.append(data["input_ids"][b, :n], data["target_ids"][b, n - 1]) for b, n in enumerate(LENGTHS)]


def random_records(data: Rows, seed: int = 0, layers: tuple[int, ...] = LAYERS) -> ReplayRecords:
    rng = np.random.default_rng(seed)
    draw = [np.argsort(rng.random((n, len(layers), E)), axis=-1)[..., :K].astype(np.uint8) for n in LENGTHS]
    return ReplayRecords(
        tuple(RouteRecord(d, layers, E, token_digest(t)) for d, t in zip(draw, sequences(data), strict=True))
    )


def natural_records(replayer: MegatronReplayer, model: Any, data: Rows) -> ReplayRecords:
    taken = record(replayer, model, data)
    whole = (
        torch.stack([Layout(B, R).from_router(taken.experts[layer]) for layer in LAYERS], dim=2)
        .numpy()
        .astype(np.uint8)
    )
    return ReplayRecords(
        tuple(
            RouteRecord(whole[b, :n].copy(), LAYERS, E, token_digest(t))
            for (b, n), t in zip(enumerate(LENGTHS), sequences(data), strict=True)
        )
    )


def forward(model: Any, data: Rows) -> torch.Tensor:
    positions = torch.arange(R).expand(B, R)
    return model(data["input_ids"], positions, None)


def run(replayer: MegatronReplayer, model: Any, source: Any, data: Rows) -> torch.Tensor:
    with replayer.use(source, Layout(B, R), **data):
        return forward(model, data)


def record(replayer: MegatronReplayer, model: Any, data: Rows) -> Recorded:
    with torch.no_grad(), replayer.use(Record(), Layout(B, R), **data) as running:
        forward(model, data)
    return running.recorded()


def edit(source: ReplayRecords, change: Callable[[np.ndarray], np.ndarray]) -> ReplayRecords:
    return ReplayRecords(
        tuple(replace(r, experts=np.ascontiguousarray(change(r.experts))) for r in source.records if r is not None)
    )


def router_gradients(model: Any) -> list[torch.Tensor]:
    return [layer.mlp.router.weight.grad.clone() for layer in model.decoder.layers if layer.layer_number - 1 in LAYERS]


Scenario = Callable[[Path], None]


def run_world(scenarios: Sequence[Scenario], folder: Path, world: int, **parallel: int) -> dict[str, list[str]]:
    """Run all scenarios, by their names in the module of the first, on `world` fresh ranks.

    Returns by scenario name one report per rank, empty when it passed.
    """
    names = [scenario.__name__ for scenario in scenarios]
    program = [
        "-m",
        "tests.integration.replay_rank",
        str(folder),
        json.dumps(parallel),
        scenarios[0].__module__,
        *names,
    ]
    done = fork_ranks(program, world)
    assert done.ok, f"{done.statuses}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    found: dict[str, list[str]] = {name: [] for name in names}
    for rank in range(world):
        for name, text in json.loads((folder / f"reports-{rank}.json").read_text()).items():
            found[name].append(text and f"rank {rank} of {world}:\n{text}")
    return found
