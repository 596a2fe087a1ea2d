"""Replay on real Megatron-Core models, on one process and expert parallel over two: forced routes and refusals.

Each world runs once, in processes of its own; every scenario reports by itself. Routes are random valid ones, unlike
the natural ones.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from routing import Layout, ReplayRefusedError, RouteError
from routing.megatron import MegatronReplayer
from routing.record.sources import Native, Record, ReplayRecorded
from tests.integration.replay_faults import (
    a_source_serves_its_own_micro_batch_alone,
    deleted_call_stops,
    forwards_that_escape_stop,
    gates_without_a_gradient_stop,
    live_gate_weights_stop,
    recompute_that_escapes_stops,
    shifted_rows_stop,
    swapped_and_stale_samples_stop,
    swapped_layers_stop,
    swapped_targets_stop,
    wrong_map_stops,
)
from tests.integration.replay_support import (
    FULL,
    LAYERS,
    LENGTHS,
    SELECTIVE,
    B,
    E,
    R,
    batch,
    build,
    forward,
    natural_records,
    random_records,
    record,
    router_gradients,
    run,
    run_world,
)


def use_expected_sets(_: Path, dispatcher: str) -> None:
    model, data = build(moe_token_dispatcher_type=dispatcher), batch()
    replayer, source = MegatronReplayer(model, max_local_flip_rate=1.0), random_records(data)
    maps: dict[int, torch.Tensor] = {}
    for layer in LAYERS:
        moe = model.decoder.layers[layer].mlp
        moe.router.register_forward_hook(lambda _m, _a, out, layer=layer: maps.__setitem__(layer, out[1].clone()))
    natural = run(replayer, model, Native(), data)
    assert not torch.allclose(run(replayer, model, source, data), natural)
    for place, layer in enumerate(LAYERS):
        for b, n in enumerate(LENGTHS):
            for r in range(n):
                assert maps[layer][r * B + b].nonzero().flatten().tolist() == sorted(
                    source.records[b].experts[r, place].tolist()
                )
    report = replayer.report(dist.group.WORLD)
    assert report.replayed == report.matched == sum(LENGTHS) * len(LAYERS) * dist.get_world_size()
    assert report.applied_fraction == 1.0
    assert (report.local_flip_rate or 0.0) > 0.8
    assert set(report.local_flips_by_layer) == set(LAYERS)
    assert replayer.report(dist.group.WORLD).replayed == 0


def chunks_use_the_routes_of_their_own_layers(_: Path) -> None:
    """As virtual pipeline stages: the same source serves one after the other, and the first again."""
    layers, data = (0, 2, 3, 4, 6, 7), batch()
    chunks = [build(num_layers=8, moe_layer_freq=[1, 0, 1, 1] * 2) for _ in range(2)]
    for place, chunk in enumerate(chunks):
        chunk.decoder.layers = chunk.decoder.layers[4 * place : 4 * place + 4]
        chunk.decoder.num_layers_per_pipeline_rank = 4
    replayer, source = MegatronReplayer(chunks, max_local_flip_rate=1.0), random_records(data, layers=layers)
    maps: dict[int, torch.Tensor] = {}
    for place, chunk in enumerate(chunks):
        for number in (0, 2, 3):
            hook = partial(lambda layer, _m, _a, out: maps.__setitem__(layer, out[1].clone()), 4 * place + number)
            chunk.decoder.layers[number].mlp.router.register_forward_hook(hook)
    for chunk in (*chunks, chunks[0]):
        maps.clear()
        with replayer.use(source, Layout(B, R), **data, model=chunk):
            forward(chunk, data)
        assert set(maps) == set(layers[:3] if chunk is chunks[0] else layers[3:])
        for layer, used in maps.items():
            for b, n in enumerate(LENGTHS):
                for r in range(n):
                    expected = source.records[b].experts[r, layers.index(layer)].tolist()
                    assert used[r * B + b].nonzero().flatten().tolist() == sorted(expected)
    assert replayer.report(dist.group.WORLD).applied_fraction == 1.0


def forced_sets_alltoall(folder: Path) -> None:
    use_expected_sets(folder, "alltoall")


def forced_sets_allgather(folder: Path) -> None:
    use_expected_sets(folder, "allgather")


def natural_records_change_nothing(_: Path) -> None:
    for changes in (
        {},
        {"moe_router_pre_softmax": True},
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
        },
    ):
        model, data = build(**changes), batch()
        if changes.get("moe_router_enable_expert_bias"):
            for layer in LAYERS:
                model.decoder.layers[layer].mlp.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, E))
        stock = forward(model, data).detach()
        replayer = MegatronReplayer(model)
        margins = record(replayer, model, data).margins
        # Probabilities before and after the choice alike; routers that choose groups of experts first have no margin.
        assert set(margins) == (set() if "moe_router_num_groups" in changes else set(LAYERS))
        assert all(0 < margin.mean() < 1 and margin.shape == (B * R,) for margin in margins.values())
        source = natural_records(replayer, model, data)
        real = data["valid"]
        assert torch.equal(run(replayer, model, Native(), data), stock)
        # Padding goes to other experts, so their matrix products have other shapes: equal to rounding, not to the bit.
        torch.testing.assert_close(run(replayer, model, source, data)[real], stock[real], rtol=1e-5, atol=1e-5)
        report = replayer.report(dist.group.WORLD)
        assert (report.local_flips, report.applied_fraction) == (0, 1.0)
        assert report.replayed > 0
        replayer.detach()
        assert torch.equal(forward(model, data), stock)


def gates_come_from_live_logits(_: Path) -> None:
    model, data = build(), batch()
    replayer, source = MegatronReplayer(model, max_local_flip_rate=1.0), random_records(data)
    seen: list[Any] = []
    router = model.decoder.layers[2].mlp.router
    router.register_forward_hook(lambda module, args, out: seen.append((module.gating(args[0]).flatten(0, 1), out[0])))
    run(replayer, model, source, data).sum().backward()
    logits, probs = seen[0]
    ids = torch.from_numpy(source.records[1].experts[4, 1].astype(np.int64))
    row = 4 * B + 1
    torch.testing.assert_close(probs[row, ids], logits[row, ids].softmax(0))
    assert all(gradient.abs().sum() > 0 for gradient in router_gradients(model))


def r2_is_bit_identical(_: Path) -> None:
    model, data = build(), batch()
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    with torch.inference_mode(), replayer.use(Record(), Layout(B, R), **data) as running:
        first = forward(model, data)
    source = ReplayRecorded(running.recorded())
    replayed = run(replayer, model, source, data)
    assert torch.equal(replayed, first)
    replayed.sum().backward()
    assert replayer.report(dist.group.WORLD).local_flips == 0
    with torch.no_grad():
        for layer in LAYERS:
            model.decoder.layers[layer].mlp.router.weight.neg_()
    run(replayer, model, source, data)
    report = replayer.report(dist.group.WORLD)
    assert (report.local_flip_rate or 0.0) > 0.5
    assert report.applied_fraction == 1.0
    with pytest.raises(RouteError) as error:
        run(replayer, model, source, batch(seed=1))
    assert error.value.reason == "digest"


def frozen_routers_need_no_gradient(_: Path) -> None:
    model, data = build(), batch()
    for layer in LAYERS:
        model.decoder.layers[layer].mlp.router.weight.requires_grad_(False)
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    run(replayer, model, random_records(data), data).sum().backward()
    assert replayer.report(dist.group.WORLD).applied_fraction == 1.0


def two_models_do_not_meet(_: Path) -> None:
    actor, reference, data = build(), build(), batch()
    stock = forward(reference, data).detach()
    one, two = MegatronReplayer(actor, max_local_flip_rate=1.0), MegatronReplayer(reference, max_local_flip_rate=1.0)
    with one.use(random_records(data), Layout(B, R), **data):
        inner = run(two, reference, Native(), data)
        forced = forward(actor, data)
    assert torch.equal(inner, stock)
    assert not torch.allclose(forced, stock)
    assert two.report(dist.group.WORLD).replayed == 0
    assert one.report(dist.group.WORLD).replayed == sum(LENGTHS) * len(LAYERS) * dist.get_world_size()


def recompute_uses_the_same_routes(_: Path) -> None:
    """Four micro-batches are forwarded before any backward; backwards come in both orders."""
    gradients = []
    for changes, reverse in (({}, False), (FULL, False), (FULL, True), (SELECTIVE, True)):
        model = build(**changes)
        replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
        outputs = [run(replayer, model, random_records(batch(i), seed=i), batch(i)) for i in range(4)]
        for output in reversed(outputs) if reverse else outputs:
            output.float().square().mean().backward()
        gradients.append([*router_gradients(model), model.embedding.word_embeddings.weight.grad])
        report = replayer.report(dist.group.WORLD)
        passes = 2 if changes else 1
        assert report.replayed == passes * 4 * sum(LENGTHS) * len(LAYERS) * dist.get_world_size()
        assert replayer._running.backward is None
    for other in gradients[1:]:
        for left, right in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def nothing_is_left_behind(_: Path) -> None:
    model, data = build(**FULL), batch()
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    with replayer.use(random_records(data), Layout(B, R), **data) as running:
        output = forward(model, data)
    alive = weakref.ref(running)
    output.sum().backward()
    del running, output
    gc.collect()
    assert alive() is None


def inside_megatron_schedule(_: Path) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = build(**FULL)
    replayer = MegatronReplayer([model], max_local_flip_rate=1.0)

    def step(batches: Any, chunk: Any) -> Any:
        seed = next(batches)
        data = batch(seed)
        return run(replayer, chunk, random_records(data, seed), data), lambda out: (out.float().square().mean(), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(3)),
        model=[model],
        num_microbatches=3,
        seq_length=R,
        micro_batch_size=B,
        forward_only=False,
    )
    assert replayer.report(dist.group.WORLD).replayed == 2 * 3 * sum(LENGTHS) * len(LAYERS) * dist.get_world_size()


def parallel_equals_one_process(folder: Path) -> None:
    """Every rank forwards the same micro-batch: gradients of one process are those of each rank over the world size."""
    for dispatcher in ("alltoall", "allgather"):
        model, data = build(moe_token_dispatcher_type=dispatcher, **FULL), batch()
        replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
        output = run(replayer, model, random_records(data), data)
        output.float().square().mean().backward()
        replayer.report(dist.group.WORLD)
        result = [output.detach()[data["valid"]], *router_gradients(model)]
        if dist.get_world_size() == 1:
            torch.save(result, folder / f"{dispatcher}.pt")
        else:
            for mine, single in zip(result, torch.load(folder / f"{dispatcher}.pt", weights_only=True), strict=True):
                torch.testing.assert_close(mine, single, rtol=1e-5, atol=1e-6)


def refusals(_: Path) -> None:
    for changes, match in (
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_expert_capacity_factor": 1.0}, "capacity"),
        (
            {
                "num_moe_experts": None,
                "moe_layer_freq": 1,
                "moe_ffn_hidden_size": None,
                "expert_model_parallel_size": 1,
            },
            "dense",
        ),
    ):
        with pytest.raises(ReplayRefusedError, match=match):
            MegatronReplayer(build(**changes))
    model = build()
    for name, value in (
        ("moe_router_fusion", True),
        ("mtp_num_layers", 1),
        ("cuda_graph_impl", "local"),
        ("moe_token_dispatcher_type", "flex"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.config, name, value)
            with pytest.raises(ReplayRefusedError):
                MegatronReplayer(model)


SCENARIOS = [
    forced_sets_alltoall, forced_sets_allgather, natural_records_change_nothing, gates_come_from_live_logits,
    chunks_use_the_routes_of_their_own_layers,
    r2_is_bit_identical, live_gate_weights_stop, gates_without_a_gradient_stop,
    frozen_routers_need_no_gradient, deleted_call_stops, wrong_map_stops, swapped_targets_stop, shifted_rows_stop,
    swapped_layers_stop, swapped_and_stale_samples_stop, forwards_that_escape_stop, two_models_do_not_meet,
    recompute_uses_the_same_routes, recompute_that_escapes_stops, nothing_is_left_behind, inside_megatron_schedule,
    parallel_equals_one_process, refusals, a_source_serves_its_own_micro_batch_alone,
]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[str]]:
    """(world size, scenario) -> one report per rank, empty when it passed."""
    folder = tmp_path_factory.mktemp("replay")
    found = {}
    for world in (1, 2):
        for name, reports in run_world(SCENARIOS, folder, world, expert_model_parallel_size=world).items():
            found[world, name] = reports
    return found


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
@pytest.mark.parametrize("world", [1, 2])
def test_replay(world: int, scenario: str, outcomes: dict[tuple[int, str], list[str]]) -> None:
    reports = outcomes[world, scenario]
    assert len(reports) == world
    assert not any(reports), "\n".join(reports)
