"""Broken replays that must stop: scenarios of the replay tests on Megatron-Core.

They run inside ranks, after the CPU shim is installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from routing import Layout, ReplayProofError, ReplayRefusedError, RouteError, RouteRecord, token_digest
from routing.megatron import MegatronReplayer
from routing.record.sources import ReplayRecords
from tests.integration.replay_support import (
    FULL,
    LAYERS,
    LENGTHS,
    VOCAB,
    B,
    E,
    R,
    batch,
    build,
    edit,
    forward,
    natural_records,
    random_records,
    record,
    run,
)
from tests.integration.rows import Rows


def stops(check: Callable[[MegatronReplayer, Any, Rows], object], match: str, **options: Any) -> None:
    """`check` runs a replay that is broken; the report must refuse it on every rank."""
    model, data = build(), batch()
    replayer = MegatronReplayer(model, **options)
    check(replayer, model, data)
    with pytest.raises(ReplayProofError, match=match):
        replayer.report(dist.group.WORLD)


def deleted_call_stops(_: Path) -> None:
    def check(replayer: MegatronReplayer, model: Any, data: Rows) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:  # on one rank only: all ranks must stop
            tap = model.decoder.layers[2].mlp.router.router_replay
            tap.get_replay_topk = lambda scores, topk, groups, group_topk, live: live(scores, topk, groups, group_topk)
        run(replayer, model, random_records(data), data)

    stops(check, "layer 2", max_local_flip_rate=1.0)


def wrong_map_stops(_: Path) -> None:
    def check(replayer: MegatronReplayer, model: Any, data: Rows) -> None:
        with pytest.MonkeyPatch.context() as patch:
            cut = Layout.router_index
            patch.setattr(Layout, "router_index", lambda self: cut(self).roll(B))
            run(replayer, model, random_records(data), data)

    stops(check, "the dispatcher used exactly them for", max_local_flip_rate=1.0)


GATES: dict[str, dict[str, Any]] = {
    "softmax after": {},
    "softmax before": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "recomputed": FULL,
}


def other_gates_stop(change: Callable[..., Any], match: str, *, later: bool = False) -> None:
    """`change` takes the scores, the chosen ids and the live ones of layer 2; ids are right, what they weigh is not.

    With weights of the live experts, a step before was clean: gates are proved in every pass.
    """
    for kind, options in GATES.items():
        model, data = build(**options), batch()
        replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
        if later:
            run(replayer, model, random_records(data), data).sum().backward()
            assert replayer.report(dist.group.WORLD).applied_fraction == 1.0, kind
        tap = model.decoder.layers[2].mlp.router.router_replay
        ask = tap.get_replay_topk

        def wrong(scores: torch.Tensor, *rest: Any, ask: Any = ask) -> Any:
            _, chosen = ask(scores, *rest)
            with torch.no_grad():
                live = rest[-1](scores, *rest[:-1])[1]
            return change(scores, chosen, live), chosen

        tap.get_replay_topk = wrong
        run(replayer, model, random_records(data), data).sum().backward()
        with pytest.raises(ReplayProofError, match=match):
            replayer.report(dist.group.WORLD)
        # The same model without the fault.
        tap.get_replay_topk = ask
        run(replayer, model, random_records(data), data).sum().backward()
        assert replayer.report(dist.group.WORLD).applied_fraction == 1.0, kind


def live_gate_weights_stop(_: Path) -> None:
    for later in (False, True):
        other_gates_stop(
            lambda scores, _chosen, live: scores.gather(1, live), "layer 2: .* not those of their replayed", later=later
        )


def gates_without_a_gradient_stop(_: Path) -> None:
    other_gates_stop(lambda scores, chosen, _live: scores.gather(1, chosen).detach(), "layer 2: .* the router got none")


def swapped_targets_stop(_: Path) -> None:
    def check(replayer: MegatronReplayer, model: Any, data: Rows) -> None:
        with replayer.use(random_records(data), Layout(B, R), **data) as running:
            running.targets = dict(running.targets) | {2: running.targets[3], 3: running.targets[2]}
            forward(model, data)

    stops(check, "layer 2", max_local_flip_rate=1.0)


def shifted_rows_stop(_: Path) -> None:
    stops(
        lambda p, m, d: run(p, m, edit(natural_records(p, m, d), lambda e: np.roll(e, 1, axis=0)), d),
        "local|live router",
    )


def swapped_layers_stop(_: Path) -> None:
    stops(lambda p, m, d: run(p, m, edit(natural_records(p, m, d), lambda e: e[:, [1, 0, 2]]), d), "live router")


def swapped_and_stale_samples_stop(_: Path) -> None:
    model, data = build(), batch()
    replayer = MegatronReplayer(model)
    data["valid"] = data["valid"][:1].expand(B, R).clone()
    taken = record(replayer, model, data)
    whole = (
        torch.stack([Layout(B, R).from_router(taken.experts[layer]) for layer in LAYERS], dim=2)
        .numpy()
        .astype(np.uint8)
    )
    records = [
        RouteRecord(whole[b], LAYERS, E, token_digest(np.append(data["input_ids"][b], data["target_ids"][b, -1])))
        for b in range(B)
    ]
    run(replayer, model, ReplayRecords(tuple(records)), data)
    stale = data | {"input_ids": data["input_ids"].clone()}
    stale["input_ids"][2, 4] = (stale["input_ids"][2, 4] + 1) % VOCAB
    for source, tokens in ((records[::-1], data), (records, stale)):
        with pytest.raises(RouteError) as error:
            run(replayer, model, ReplayRecords(tuple(source)), tokens)
        assert error.value.reason == "digest"
    report = replayer.report(dist.group.WORLD)
    assert report.replayed == B * R * len(LAYERS) * dist.get_world_size()


def a_source_serves_its_own_micro_batch_alone(_: Path) -> None:
    """It may be used for several passes, each checked and proved."""
    model, data = build(), batch()
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    source = random_records(data)
    first = run(replayer, model, source, data)
    assert torch.equal(first, run(replayer, model, source, copy.deepcopy(data)))
    other = replace(source, records=random_records(data, seed=1).records)
    assert not torch.equal(first, run(replayer, model, other, data))
    with pytest.raises(RouteError) as error:
        run(replayer, model, replace(source, origins=(bytes(16),) * B), data)
    assert error.value.reason == "digest"
    for values, column in ((data["input_ids"], 0), (data["target_ids"], LENGTHS[0] - 1)):
        values[0, column] += 1
        with pytest.raises(RouteError) as error:
            run(replayer, model, source, data)
        assert error.value.reason == "digest"
        values[0, column] -= 1
    data["valid"][1] = False
    with pytest.raises(RouteError) as error:
        run(replayer, model, source, data)
    assert error.value.reason == "rows"
    with pytest.raises(RouteError):
        replayer.use(source, Layout(B, R, 2, 0), **data).__enter__()
    assert replayer.report(dist.group.WORLD).applied_fraction == 1.0


def forwards_that_escape_stop(_: Path) -> None:
    model, other, data = build(), build(), batch()
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    source = random_records(data)
    with pytest.raises(ReplayProofError, match="outside `use`"):
        forward(model, data)
    with pytest.raises(ReplayProofError, match="forwarded once"):
        run(replayer, other, source, data)
    with pytest.raises(ReplayProofError, match="forwarded once"), replayer.use(source, Layout(B, R), **data):
        forward(model, data), forward(model, data)
    with pytest.raises(ReplayProofError, match="attached to"):
        replayer.use(source, Layout(B, R), **data, model=other).__enter__()
    with pytest.raises(ReplayRefusedError, match="already belongs"):
        MegatronReplayer(model)
    with pytest.raises(RouteError):
        replayer.use(source, Layout(B, R, 2, 0), **data).__enter__()
    for change, reason in (
        (lambda r: replace(r, layer_ids=(0, 1, 2)), "layers"),
        (lambda r: replace(r, experts=r.experts[:, :2]), "layers"),
        (lambda r: replace(r, experts=r.experts + np.uint8(E)), "range"),
    ):
        with pytest.raises(RouteError) as error:
            run(replayer, model, ReplayRecords(tuple(change(r) for r in source.records)), data)
        assert error.value.reason == reason
    model.decoder.layers[2].mlp.router.router_replay = None
    with pytest.raises(ReplayProofError, match="rebuilt"):
        run(replayer, model, source, data)


def recompute_that_escapes_stops(_: Path) -> None:
    """A recomputation that ignores its routes is counted too."""
    model, data = build(**FULL), batch()
    replayer = MegatronReplayer(model, max_local_flip_rate=1.0)
    output = run(replayer, model, random_records(data), data)
    tap = model.decoder.layers[3].mlp.router.router_replay
    tap.get_replay_topk = lambda scores, topk, groups, group_topk, live: live(scores, topk, groups, group_topk)
    output.sum().backward()
    with pytest.raises(ReplayProofError, match="layer 3"):
        replayer.report(dist.group.WORLD)
