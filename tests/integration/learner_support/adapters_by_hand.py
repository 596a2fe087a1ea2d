"""Adapters written by hand around transformers' models, in float64: what runs of `lora.py` are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from moe_trm.learner.lora.adapter import A, B, factor_name
from moe_trm.learner.protocol import Scores
from routing.hf import HFReplayer
from routing.record.sources import Native, Record, ReplayRecorded, ReplayRecords, RouteSource
from tests.integration.learner_support.adapted_runs import Run, modules
from tests.integration.learner_support.lora import ALPHA, LR, RANK
from tests.integration.learner_support.tiny import load_reference, random_routes
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective


@dataclass
class Exact:
    """The expected results in float64.

    Attributes:
        scores: by kind and batch.
        norm: of the first gradient.
        stepped: factors after the first step.
    """

    scores: dict[str, Tensor]
    norm: float
    stepped: dict[str, Tensor]


def merged_by_hand(model: Any, factors: Mapping[str, Tensor], adapted: frozenset[str]) -> dict[str, Tensor]:
    """Weights of transformers' model with adapters, written down once more."""

    def changed(module: str, base: Tensor) -> Tensor:
        if module not in adapted:
            return base
        return base + ALPHA / RANK * factors[factor_name(module, B)] @ factors[factor_name(module, A)]

    found = {}
    for name, base in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            prefix, width = name.removesuffix(".gate_up_proj"), base.shape[1] // 2
            found[name] = torch.stack(
                [
                    torch.cat(
                        [
                            changed(f"{prefix}.{e}.gate_proj", base[e, :width]),
                            changed(f"{prefix}.{e}.up_proj", base[e, width:]),
                        ]
                    )
                    for e in range(len(base))
                ]
            )
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            found[name] = torch.stack([changed(f"{prefix}.{e}.down_proj", base[e]) for e in range(len(base))])
        else:
            found[name] = changed(name.removesuffix(".weight"), base)
    return found


def exact(start: Path, factors: Mapping[str, Tensor], adapted: frozenset[str]) -> Exact:
    """Scores, a step, and scores again: natively, under the routes before the step (R2) and under random ones (R3)."""
    model = load_reference(start).double()
    model.set_experts_implementation("eager")
    model.requires_grad_(False)
    leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in factors.items()}
    batches = [global_batch(number, keep_mask=False) for number in range(NUM_BATCHES)]

    def logprobs(number: int) -> Tensor:
        batch, weights = batches[number], merged_by_hand(model, leaves, adapted)
        out = functional_call(model, weights, (batch.input_ids,), {"use_cache": False})
        scaled = (out.logits / TEMPERATURE).log_softmax(-1)
        return scaled.gather(-1, batch.target_ids[..., None])[..., 0] * batch.mask

    scores: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        scores[f"score.{number}"] = found = logprobs(number)
        objective([batch], [])(0, Scores(found)).backward()
    norm = torch.cat([leaf.grad.flatten() for leaf in leaves.values() if leaf.grad is not None]).norm()
    replayer = HFReplayer(model, max_local_flip_rate=1.0)

    def routed(number: int, source: RouteSource) -> tuple[Tensor, Any]:
        batch = batches[number]
        with torch.no_grad(), replayer.use(source, batch.input_ids, batch.target_ids, batch.valid) as this_pass:
            return logprobs(number), this_pass

    recorded = [routed(number, Record())[1].recorded() for number in range(NUM_BATCHES)]
    torch.optim.AdamW(leaves.values(), lr=LR, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0).step()
    for number, batch in enumerate(batches):
        routes = ReplayRecords(random_routes(batch, replayer.layer_ids, seed=number))
        scores[f"moved.{number}"], _ = routed(number, Native())
        scores[f"r2.{number}"], _ = routed(number, ReplayRecorded(recorded[number]))
        scores[f"r3.{number}"], _ = routed(number, routes)
    replayer.detach()
    stepped = {name: leaf.detach() for name, leaf in leaves.items()}
    return Exact({name: value.detach() for name, value in scores.items()}, float(norm), stepped)


_exact: dict[tuple[str, ...], Exact] = {}


def expected(run: Run, plain: Path | None = None) -> Exact:
    """Each reference is made once: by the model, the targets and what the factors begin as.

    Args:
        run: whose work is repeated.
        plain: the weights that a quantised start means; None: the start is plain.
    """
    key = (str(run.start), *(part for part in run.name.split(":") if part.startswith(("targets", "start", "dtype"))))
    if key not in _exact:
        _exact[key] = exact(plain or run.start, run.factors("begun"), modules(run.start, run.name))
    return _exact[key]


def relative(got: dict[str, Tensor], requested: dict[str, Tensor], begun: dict[str, Tensor]) -> float:
    """Error of the factors' moves."""
    errors = torch.cat([(got[name].double() - requested[name]).flatten() for name in requested])
    moves = torch.cat([(requested[name] - begun[name].double()).flatten() for name in requested])
    return float(errors.norm() / moves.norm())


def assert_adapters_by_hand(run: Run, reference: Exact) -> None:
    """Log-probs of every pass, the gradient's norm and a step of the factors are those by hand."""
    scores = run.scores()
    for kind, tolerance in (("score", 2e-5), ("update", 2e-5), ("moved", 2e-4), ("r2", 2e-4), ("r3", 2e-4)):
        for number in range(NUM_BATCHES):
            requested = reference.scores[f"{'score' if kind == 'update' else kind}.{number}"]
            torch.testing.assert_close(scores[f"{kind}.{number}"].double(), requested, rtol=0, atol=tolerance)
    assert run.facts()["applied"]
    assert run.facts()["first_norm"] == pytest.approx(reference.norm, rel=1e-4)
    stepped = run.factors("stepped")
    assert stepped.keys() == reference.stepped.keys()
    assert relative(stepped, reference.stepped, run.factors("begun")) < 2e-4


def assert_replay_and_resume(run: Run) -> None:
    """Replay is proved in every mode, a snapshot comes back, and a resumed run repeats the second step's bits."""
    scores = run.scores()
    for number in range(NUM_BATCHES):
        # The weights at the start were factors alone, and came back.
        assert torch.equal(scores[f"start.{number}"], scores[f"score.{number}"])
        assert torch.equal(scores[f"r3_update.{number}"], scores[f"r3.{number}"])
        assert torch.equal(scores[f"update.{number}"], scores[f"score.{number}"])
    for rank in range(run.ranks.num_ranks):
        facts = run.facts(rank)
        for mode in ("r2", "replay", "held"):
            assert facts[f"{mode}_applied"] == 1.0, mode
            assert facts[f"{mode}_replayed"] > 0, mode
        # Routers that moved would choose others by now.
        assert facts["held_flips"] > 0 or "router" not in run.name
        assert facts["held_same"]
        assert facts["second_norm"] > 0
        assert facts["held_norm"] > 0
        assert facts["other_base"]
        told = {key: value for key, value in facts.items() if key.startswith("liar_")}
        assert set(told.values()) <= {1.0}
        assert bool(told) == ("liars=1" in run.name)
    second, resumed = run.factors("second"), run.factors("resumed")
    assert all(torch.equal(second[key], resumed[key]) for key in second)
    assert any(bool((second[key] != value).any()) for key, value in run.factors("stepped").items())


def assert_nothing_but_factors_trains(run: Run) -> None:
    """Gradients, moments and snapshots are those of factors alone, and every other bit stays as it was."""
    for rank in range(run.ranks.num_ranks):
        facts = run.facts(rank)
        assert facts["frozen_same"]
        assert facts["num_frozen"] > 20 or "model=" not in run.name
        # A pipeline stage may have nothing to train.
        assert 0 <= facts["trained"] < facts["all"] / 2
        # The optimizer's state is that of the factors, on this rank or shared, with padding.
        assert facts["moments"] <= 1.1 * facts["trained"] + 512
        assert bool(facts["moments"]) == bool(facts["trained"])
        assert facts["snapshot_bytes"] <= 4.4 * facts["trained"] + 8192
        assert facts["frozen_gradients"] == 0
    total = sum(tensor.numel() for tensor in run.factors("stepped").values())
    assert sum(run.facts(rank)["trained"] for rank in range(run.ranks.num_ranks)) >= total
