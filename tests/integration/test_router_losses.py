"""Losses of routers on both learners, with their own choice and with replayed routes, against autograd in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm.learner.protocol import Scores
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.record.sources import Native, ReplayRecords
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.router_losses import TERMS
from tests.integration.learner_support.tiny import EXPERTS, TOP_K, load_reference, make_checkpoint, random_routes
from tests.integration.learner_support.work import NUM_BATCHES, global_batch, objective
from tests.integration.test_learner_conformance import in_checkpoint_form, masked, worst_relative

FEW = (
    "backend=megatron:expert=2:routes=R3",
    "backend=megatron:tensor=2:expert=2",
    "backend=megatron:context=2:layout=packed:routes=R3:recompute=full",
    "backend=megatron:pipeline=2:first_stage_layers=1:recompute=selective",
    "backend=deepspeed:stage=2:routes=R3:recompute=full",
    "backend=deepspeed:stage=3:layout=packed",
    "backend=deepspeed:stage=2:loss=0",
)
MORE = (
    "backend=megatron:expert=2:loss=0",
    "backend=megatron:context=2",
    "backend=megatron:tensor=2:expert=2:layout=packed:routes=R3:recompute=full",
    "backend=megatron:pipeline=2:first_stage_layers=1:routes=R3:recompute=full",
    "backend=deepspeed:stage=1:routes=R3",
    "backend=deepspeed:stage=3:recompute=full",
)
SCRIPT = Path(__file__).parent / "learner_support" / "router_losses.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("losses") / "main")


@pytest.fixture(scope="module", params=[FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def finished(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ranks, tuple[str, ...]]:
    """Finished ranks, and their runs."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), checkpoint, 2, *request.param, script=SCRIPT), request.param


class Exact:
    """The update in float64: gradients under checkpoint names, and the values of both losses."""

    def __init__(self, checkpoint: Path, *, replayed: bool, factor: float) -> None:
        model = load_reference(checkpoint).double()
        model.set_experts_implementation("eager")
        seen: dict[int, Tensor] = {}

        def look(layer: int, _gate: Any, _args: Any, output: tuple[Tensor, ...]) -> None:
            seen[layer] = output[0]

        replayer = HFReplayer(model, max_local_flip_rate=1.0)
        for layer, block in moe_blocks(model).items():
            gate_of(block).register_forward_hook(partial(look, layer))
        self.balance = self.z = 0.0
        for number in range(NUM_BATCHES):
            batch = global_batch(number)
            routes = ReplayRecords(random_routes(batch, replayer.layer_ids, seed=number)) if replayed else Native()
            with replayer.use(routes, batch.input_ids, batch.target_ids, batch.valid):
                logprobs = masked(model, batch)[0]
            loss = factor * objective([batch], [])(0, Scores(logprobs))
            for logits_NE in seen.values():
                for logits_RE, valid in zip(logits_NE.unflatten(0, batch.mask.shape), batch.valid, strict=True):
                    balance, z = row_losses(logits_RE[valid])
                    loss = loss + TERMS.balance * balance + TERMS.z * z
                    self.balance += TERMS.balance * float(balance.detach())
                    self.z += TERMS.z * float(z.detach())
            torch.autograd.backward(loss)
        self.gradient = {name: value for name, value in in_checkpoint_form(model).items() if value is not None}


def row_losses(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    if not len(logits_TE):
        return logits_TE.sum(), logits_TE.sum()
    shares = torch.bincount(logits_TE.topk(TOP_K).indices.flatten(), minlength=EXPERTS) / (TOP_K * len(logits_TE))
    return EXPERTS * (shares * logits_TE.softmax(-1).mean(0)).sum(), logits_TE.logsumexp(-1).square().mean()


def test_an_update_is_that_of_the_float64_gradient(finished: tuple[Ranks, tuple[str, ...]], checkpoint: Path) -> None:
    ranks, runs = finished
    references: dict[tuple[bool, float], Exact] = {}
    for run in runs:
        case = "routes=R3" in run, float("loss=0" not in run)
        if case not in references:
            references[case] = Exact(checkpoint, replayed=case[0], factor=case[1])
        exact, facts = references[case], {name: float(value) for name, value in ranks.saved(run, "facts").items()}
        before, after = (ranks.exported(run, name) for name in ("before", "after"))
        steps = {name: value.double() - before[name] for name, value in after.items()}
        # Adam's first step with lr = eps = 1. Where the policy has no gradient, the output weights have none either.
        trained = {name: -value / (value.abs() + 1) for name, value in exact.gradient.items() if value.any()}
        assert worst_relative({name: steps[name] for name in trained}, trained) < 2e-4, run
        assert not any(bool(value.any()) for name, value in steps.items() if name not in trained), run
        routers = [name for name in trained if name.endswith("mlp.gate.weight")]
        assert len(routers) == 2, run
        norm = torch.cat([value.flatten() for value in exact.gradient.values()]).norm()
        assert facts["norm"] == pytest.approx(float(norm), rel=1e-5), run
        assert facts["balance"] == pytest.approx(exact.balance, rel=1e-5), run
        assert facts["z"] == pytest.approx(exact.z, rel=1e-5), run
        assert facts["applied"] == 1.0, run
        # The losses change no bit of the forward.
        assert all(ranks.saved(run, "facts", rank)["same"] == 1.0 for rank in range(2)), run
        assert bool(facts["replayed"]) == case[0], run


def test_of_one_row_the_losses_are_those_of_megatron_core(finished: tuple[Ranks, tuple[str, ...]]) -> None:
    ranks, runs = finished
    gaps = [float(ranks.saved(run, "facts")["gap"]) for run in runs if "megatron" in run]
    assert gaps
    assert max(gaps) < 1e-6
