"""The shift of routers at replayed experts, on both learners, against transformers in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.layout.rows import Rows
from routing.record.sources import ReplayRecords
from routing.replay.placing import placed_routes
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import load_reference, make_checkpoint, random_routes
from tests.integration.learner_support.work import NUM_BATCHES, global_batch

SHARED = ("backend=megatron:context=2:layout=packed", "backend=megatron:tensor=2:expert=2:layout=packed")
"""Runs whose ranks have the same rows."""
FEW = (
    *SHARED,
    "backend=megatron:expert=2:recompute=full",
    "backend=deepspeed:stage=2:recompute=full",
    "backend=deepspeed:stage=2:layout=packed",
)
SHARED_PADDED = ("backend=megatron:context=2", "backend=megatron:tensor=2:expert=2")
MORE = (*SHARED_PADDED, "backend=megatron:expert=2", "backend=deepspeed:stage=1")
SCRIPT = Path(__file__).parent / "learner_support" / "router_shift.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shift") / "main")


@pytest.fixture(scope="module", params=[FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def finished(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ranks, tuple[str, ...]]:
    """Finished ranks, and their runs."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), checkpoint, 2, *request.param, script=SCRIPT), request.param


def log_scores(folder: Path) -> list[Tensor]:
    """`[B, R, L, K]` log-softmax of each micro-batch's replayed experts, in float64."""
    model = load_reference(folder).double()
    model.set_experts_implementation("eager")
    blocks, seen = moe_blocks(model), dict[int, Tensor]()

    def look(layer: int, _gate: Any, _args: Any, output: tuple[Tensor, ...]) -> None:
        seen[layer] = output[0].detach()

    for layer, block in blocks.items():
        gate_of(block).register_forward_hook(partial(look, layer))
    replayer, found = HFReplayer(model, max_local_flip_rate=1.0), []
    for number in range(NUM_BATCHES):
        batch = global_batch(number)
        records = random_routes(batch, tuple(blocks), seed=number)
        gate = gate_of(next(iter(blocks.values())))
        ids = placed_routes(records, Rows.right_padded(batch.valid), tuple(blocks), gate.num_experts, gate.top_k)
        source = ReplayRecords(records)
        with torch.no_grad(), replayer.use(source, batch.input_ids, batch.target_ids, batch.valid):
            model(input_ids=batch.input_ids, use_cache=False)
        logs = [seen[layer].log_softmax(-1).gather(1, ids[layer]) for layer in blocks]
        found.append(torch.stack(logs, 1).unflatten(0, batch.mask.shape))
    return found


def test_the_shift_is_that_of_the_exact_scores(finished: tuple[Ranks, tuple[str, ...]], checkpoint: Path) -> None:
    ranks, runs = finished
    before = log_scores(checkpoint)
    for run in runs:
        after = log_scores(ranks.folder / run / "moved")
        parts = [ranks.saved(run, "shifts", rank) for rank in range(ranks.num_ranks)]
        shifts = {name: value for part in parts for name, value in part.items()}
        for number in range(NUM_BATCHES):
            mask = global_batch(number).mask
            exact = (after[number] - before[number]).abs().mean((2, 3))
            assert float(exact[mask].max()) > 0.02, run
            got = shifts[f"moved.{number}"]
            torch.testing.assert_close(got[mask].double(), exact[mask], rtol=1e-3, atol=1e-5, msg=run)
            assert not got[~mask].any(), run
            assert not shifts[f"still.{number}"].any(), run
            assert shifts[f"own.{number}"][mask].gt(0).all(), run


def test_ranks_with_the_same_rows_are_told_the_same(finished: tuple[Ranks, tuple[str, ...]]) -> None:
    ranks, runs = finished
    shared = {*SHARED, *SHARED_PADDED} & set(runs)
    assert len(shared) == 2
    for run in shared:
        first, second = (ranks.saved(run, "shifts", rank) for rank in range(2))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
