"""Replay under tensor and sequence parallelism and under a pipeline, in Megatron's own schedule with recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from routing import Layout, ReplayProofError, RouteError
from routing.megatron import MegatronReplayer
from routing.record.sources import Record, Recorded, ReplayRecorded, ReplayRecords, RouteSource
from tests.integration.replay_support import (
    FULL,
    LAYERS,
    LENGTHS,
    B,
    R,
    batch,
    build,
    forward,
    random_records,
    router_gradients,
    run_world,
)

NUM_MICRO_BATCHES = 4
WORLDS = {
    "one": (1, {}),
    "tensor+sequence": (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
}


def layout() -> Layout:
    from megatron.core import parallel_state

    shards = parallel_state.get_tensor_model_parallel_world_size()
    return Layout(B, R, sp_size=shards, sp_rank=parallel_state.get_tensor_model_parallel_rank())


def train(
    model: Any, replayer: MegatronReplayer, source_of: Callable[[int], RouteSource], *, forward_only: bool = False
) -> list[Recorded]:
    """All micro-batches through Megatron's schedule.

    It runs several forwards before the first backward on stage 0 of a pipeline.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    taken: list[Recorded] = []

    def step(seeds: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        seed = next(seeds)
        source = source_of(seed)
        with replayer.use(source, layout(), **batch(seed), model=chunk) as running:
            output = forward(chunk, batch(seed))
        if isinstance(source, Record):
            taken.append(running.recorded())
        return output, lambda out: (out.float().square().mean(), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(NUM_MICRO_BATCHES)),
        model=[model],
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=R,
        micro_batch_size=B,
        forward_only=forward_only,
    )
    return taken


def watch(layer: int, maps: dict[int, list[Tensor]], _router: Any, _args: Any, output: tuple[Tensor, Tensor]) -> None:
    if torch._C._current_graph_task_id() == -1:
        maps[layer].append(output[1].clone())


def forced_sets(_: Path) -> None:
    model = build(**FULL)
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    maps: dict[int, list[Tensor]] = {layer: [] for layer in replayer.layer_ids}
    for layer in model.decoder.layers:
        if layer.layer_number - 1 in maps:
            layer.mlp.router.register_forward_hook(partial(watch, layer.layer_number - 1, maps))
    train(model, replayer, lambda seed: random_records(batch(seed), seed))
    shard = R // layout().sp_size
    for layer, seen in maps.items():
        assert len(seen) == NUM_MICRO_BATCHES
        for seed, routing_map in enumerate(seen):
            for b, record in enumerate(random_records(batch(seed), seed).records):
                assert record is not None
                for r in range(LENGTHS[b]):
                    if r // shard == layout().sp_rank:
                        requested = sorted(record.experts[r, LAYERS.index(layer)].tolist())
                        assert routing_map[(r % shard) * B + b].nonzero().flatten().tolist() == requested
    report = replayer.report(dist.group.WORLD)
    assert report.replayed == report.matched == 2 * NUM_MICRO_BATCHES * sum(LENGTHS) * len(LAYERS)
    assert set(report.local_flips_by_layer) == set(LAYERS)


def recorded_routes_are_replayed(_: Path) -> None:
    model = build()
    replayer = MegatronReplayer(model)
    with torch.no_grad():
        taken = train(model, replayer, lambda _seed: Record(), forward_only=True)
    train(model, replayer, lambda seed: ReplayRecorded(taken[seed]))
    report = replayer.report(dist.group.WORLD)
    assert (report.replayed, report.local_flips) == (NUM_MICRO_BATCHES * sum(LENGTHS) * len(LAYERS), 0)


def one_deaf_router_stops_all_ranks(_: Path) -> None:
    model = build()
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    if dist.get_rank() == dist.get_world_size() - 1:
        tap = model.decoder.layers[-1].mlp.router.router_replay
        tap.get_replay_topk = lambda scores, topk, groups, group_topk, live: live(scores, topk, groups, group_topk)
    train(model, replayer, lambda seed: random_records(batch(seed), seed))
    with pytest.raises(ReplayProofError, match="layer 3"):
        replayer.report(dist.group.WORLD)


def pipeline_gradients_equal_one_process(folder: Path) -> None:
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        return
    model = build(**FULL)
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)

    def own_layers(seed: int) -> ReplayRecords:
        records = random_records(batch(seed), seed).records
        return ReplayRecords(tuple(record and record.select(replayer.layer_ids) for record in records))

    train(model, replayer, own_layers)
    gradients = dict(zip(replayer.layer_ids, router_gradients(model), strict=True))
    if dist.get_world_size() == 1:
        torch.save(gradients, folder / "gradients.pt")
    single = torch.load(folder / "gradients.pt", weights_only=True)
    for layer, gradient in gradients.items():
        torch.testing.assert_close(gradient, single[layer], rtol=1e-5, atol=1e-7)


def tokens_without_routes_stay_native(_: Path) -> None:
    model = build(**FULL)
    with torch.no_grad():
        native = [forward(model, batch(seed)) for seed in range(1)] if dist.get_world_size() == 1 else []
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0, missing="native")

    def without(rows: slice, seed: int) -> ReplayRecords:
        return ReplayRecords(tuple(r and r.uncover(rows) for r in random_records(batch(seed), seed).records))

    train(model, replayer, lambda seed: without(slice(0, 2), seed))
    report = replayer.report(dist.group.WORLD)
    each = 2 * NUM_MICRO_BATCHES * len(LAYERS)  # forward and recomputation
    assert report.native == each * 2 * B
    assert report.replayed == report.matched == each * (sum(LENGTHS) - 2 * B)
    assert 0 < report.native_fraction < 1
    for expected in native:
        with torch.no_grad(), replayer.use(without(slice(None), 0), layout(), **batch(0)):
            output = forward(model, batch(0))
        torch.testing.assert_close(output[batch(0)["valid"]], expected[batch(0)["valid"]], rtol=1e-5, atol=1e-5)
    replayer.report(dist.group.WORLD)
    strict = build()
    with pytest.raises(RouteError, match="no recorded routes"):
        MegatronReplayer(strict).use(without(slice(0, 2), 0), layout(), **batch(0)).__enter__()


SCENARIOS = [
    tokens_without_routes_stay_native,
    forced_sets,
    recorded_routes_are_replayed,
    one_deaf_router_stops_all_ranks,
    pipeline_gradients_equal_one_process,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """(world, scenario) -> one report per rank, empty when it passed."""
    folder, found = tmp_path_factory.mktemp("layouts"), {}
    for name, (world, parallel) in WORLDS.items():
        for scenario, reports in run_world(SCENARIOS, folder, world, **parallel).items():
            found[name, scenario] = reports
    return found


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
@pytest.mark.parametrize("world", list(WORLDS))
def test_layout(world: str, scenario: str, outcomes: dict[tuple[str, str], list[str]]) -> None:
    reports = outcomes[world, scenario]
    assert len(reports) == WORLDS[world][0]
    assert not any(reports), "\n".join(reports)
