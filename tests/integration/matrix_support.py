"""One model cut for any parallel layout, and one training step on it under replay. Runs inside ranks, after the CPU shim is installed.

Weights depend on global parameter names only and are cut here as Megatron cuts them, so every layout holds parts of one model. Context
parallelism runs on `context_attention`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from routing import Layout
from routing.megatron import MegatronReplayer
from routing.replay import Record, Recorded, ReplayRecorded, RouteSource
from tests.integration.replay_support import FULL, LENGTHS, VOCAB, B, E, R, batch, config, random_records

NUM_MICRO_BATCHES = 4
CASES = [(mode, recompute) for mode in ("R3", "R2") for recompute in ("none", "full")]


def layout() -> Layout:
    from megatron.core import parallel_state as ps

    tensor, context = ps.get_tensor_model_parallel_world_size(), ps.get_context_parallel_world_size()
    return Layout(
        B, R, context, ps.get_context_parallel_rank(), tensor, ps.get_tensor_model_parallel_rank() if tensor > 1 else 0
    )


def whole_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.3


def own_part(name: str, parameter: Tensor) -> Tensor:
    """This rank's part of the weight called `name` in the whole model."""
    from megatron.core import parallel_state as ps

    if ".local_experts." in name:
        size, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
    else:
        size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    columns = any(part in name for part in ("linear_qkv", "word_embeddings", "output_layer", "linear_fc1"))
    rows = any(part in name for part in ("linear_proj", "linear_fc2"))
    if size == 1 or not (columns or rows):
        return whole_weight(name, tuple(parameter.shape))
    if rows:
        return whole_weight(name, (parameter.shape[0], size * parameter.shape[1])).chunk(size, 1)[rank]
    whole = whole_weight(name, (size * parameter.shape[0], *parameter.shape[1:]))
    if "linear_fc1" in name:  # gate and up projection are cut one by one
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size)[rank]


def shifted(name: str, what: str, first: int) -> str:
    """`name` with the number behind `what` counted over the whole model."""
    return re.sub(rf"({re.escape(what)}\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + first}", name)


def build_chunks(recompute: str) -> list[Any]:
    """The model chunks of this rank."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel

    from moe_trm.learner.megatron.cpu import cpu_block_spec

    virtual, context = ps.get_virtual_pipeline_model_parallel_world_size(), ps.get_context_parallel_world_size()
    settings = config(
        context_parallel_size=context,
        virtual_pipeline_model_parallel_size=virtual,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        **(FULL if recompute == "full" else {}),
    )
    chunks = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        spec = cpu_block_spec(settings, vp_stage=vp_stage)
        if context > 1:
            from tests.integration.context_attention import ContextAttention

            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = ContextAttention
        chunk = GPTModel(
            settings,
            spec,
            VOCAB,
            R,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
        )
        first_layer = chunk.decoder.layers[0].layer_number - 1
        first_expert = ps.get_expert_model_parallel_rank() * E // ps.get_expert_model_parallel_world_size()
        for name, parameter in chunk.named_parameters():
            if parameter.ndim > 1:
                whole_name = shifted(shifted(name, "decoder.layers", first_layer), "local_experts", first_expert)
                parameter.data.copy_(own_part(whole_name, parameter))
        chunks.append(chunk)
    return chunks


def step(
    chunks: list[Any],
    replayer: MegatronReplayer,
    source_of: Callable[[int, int], RouteSource],
    taken: dict[tuple[int, int], Recorded],
    *,
    forward_only: bool = False,
) -> list[Tensor]:
    """All micro-batches through Megatron's schedule. Returns the log-probs `[B, R]` of each, on the ranks that compute them."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    cut, found = layout(), {}

    def loss(seed: int, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found[seed] = cut.uncut_tokens(-losses.detach().clone())
        valid = cut.cut_tokens(batch(seed)["valid"])
        # The schedule multiplies by the size of the context parallel group.
        return (losses * valid).square().sum() / ps.get_context_parallel_world_size(), {}

    def one(seeds: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        seed, data = next(seeds), None
        data = batch(seed)
        place = next(i for i, known in enumerate(chunks) if known is chunk)
        positions = torch.arange(R).expand(B, R)
        source = source_of(place, seed)
        with replayer.use(source, cut, **data, model=chunk) as running:
            output = chunk(
                cut.cut_tokens(data["input_ids"]),
                cut.cut_tokens(positions),
                None,
                labels=cut.cut_tokens(data["target_ids"]),
            )
        if isinstance(source, Record):
            taken[place, seed] = running.recorded()
        return output, partial(loss, seed)

    seeds = [iter(range(NUM_MICRO_BATCHES)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=one,
        data_iterator=seeds if len(chunks) > 1 else seeds[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=R,
        micro_batch_size=B,
        forward_only=forward_only,
    )
    return [found[seed] for seed in sorted(found)]


def routers(chunks: list[Any]) -> dict[int, Any]:
    return {
        layer.layer_number - 1: layer.mlp.router
        for chunk in chunks
        for layer in chunk.decoder.layers
        if hasattr(layer.mlp, "router")
    }


def result(mode: str, recompute: str) -> tuple[dict[str, Tensor], int]:
    """One training step: what this rank knows of log-probs and router gradients, and the proved token-layers of all ranks."""
    from megatron.core import parallel_state as ps

    chunks = build_chunks(recompute)
    replayer, taken = MegatronReplayer(chunks, max_local_flip_rate=1.0), {}
    if mode == "R2":
        with torch.no_grad():
            step(chunks, replayer, lambda _place, _seed: Record(), taken, forward_only=True)
            for router in routers(chunks).values():
                router.weight.neg_()  # the live routers now choose otherwise
        logprobs = step(chunks, replayer, lambda place, seed: ReplayRecorded(taken[place, seed]), taken)
    else:
        logprobs = step(chunks, replayer, lambda _place, seed: random_records(batch(seed), seed), taken)
    report = replayer.report(dist.group.WORLD)
    assert report.applied_fraction == 1.0
    assert report.local_flip_rate > 0.5
    known: dict[str, Tensor] = {}
    for seed, values in enumerate(logprobs):
        if layout().cp_size > 1:
            dist.all_reduce(values, group=ps.get_context_parallel_group())
        known[f"logprobs.{seed}"] = values[batch(seed)["valid"]]
    for layer, router in sorted(routers(chunks).items()):
        gradient = router.weight.grad
        for size, group in (
            (layout().sp_size, ps.get_tensor_model_parallel_group),
            (layout().cp_size, ps.get_context_parallel_group),
        ):
            if size > 1:
                dist.all_reduce(gradient, group=group())
        known[f"router.{layer}"] = gradient
    return known, report.replayed


def check(mode: str, recompute: str, folder: Path) -> None:
    """The single process writes its results; every other layout must agree with them."""
    from megatron.core import parallel_state as ps

    known, replayed = result(mode, recompute)
    path = folder / f"{mode}-{recompute}.pt"
    if dist.get_world_size() == 1:
        torch.save(known, path)
        assert len(known) == NUM_MICRO_BATCHES + 3
    whole = torch.load(path, weights_only=True)
    copies = ps.get_data_parallel_world_size()
    passes = 2 if recompute == "full" else 1
    assert replayed == copies * passes * NUM_MICRO_BATCHES * sum(LENGTHS) * 3
    for name, value in known.items():
        scale = float(whole[name].abs().max())
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def r3(folder: Path) -> None:
    check("R3", "none", folder)


def r3_recompute(folder: Path) -> None:
    check("R3", "full", folder)


def r2(folder: Path) -> None:
    check("R2", "none", folder)


def r2_recompute(folder: Path) -> None:
    check("R2", "full", folder)


SCENARIOS = [r3, r3_recompute, r2, r2_recompute]
