"""One update with losses of the routers, on real ranks, with the routers' own choice or with replayed routes.

Started by torchrun: `router_losses.py CHECKPOINT OUT RUN [RUN ...]`, a RUN as in `runs.py`. Nothing is asserted here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moe_trm.sync.rounding import Rounding
from routing.record.sources import Native
from routing.replay.router_losses import RouterLosses, RouterTerms
from tests.integration.learner_support.conformance import build, save, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.tiny import EXPERTS, TOP_K
from tests.integration.learner_support.work import objective

TERMS = RouterTerms(0.05, 0.003)
"""So large that they are most of the routers' gradient."""


def update(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """`routes=R3` replays random routes, `loss=0` leaves the policy without a gradient."""
    learner = build(checkpoint, options)
    batches, random, _ = work(learner)
    seen: list[Tensor] = []
    loss, factor = objective(batches, seen), float(options.get("loss", 1))
    learner.export_shard(str(out / "before"), Rounding("float32"))
    sources = random if options.get("routes") == "R3" else [Native()] * len(batches)
    scored = [scores.logprobs for scores in learner.score(batches, sources)]
    result = learner.update(
        batches,
        sources,
        lambda index, current: factor * loss(index, current),
        router_terms=TERMS,
    )
    assert result.router_losses is not None
    learner.export_shard(str(out / "after"), Rounding("float32"))
    facts = {"norm": result.grad_norm, "balance": result.router_losses.balance, "z": result.router_losses.z}
    report = learner.replay_report()
    same = all(map(torch.equal, scored, seen))
    facts["gap"] = gap_to_megatron() if options["backend"] == "megatron" else 0.0
    save(out, "facts", {**facts, "applied": result.applied, "replayed": report.replayed, "same": same})


def gap_to_megatron() -> float:
    """Relative difference between both losses of one row and Megatron-Core's functions."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func, z_loss_func

    logits = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = RouterLosses(RouterTerms(), torch.zeros(9, dtype=torch.int64), torch.tensor([9]), logits.device)
    one.attach(0, torch.ones(9, 1), logits, TOP_K, sigmoid=False)
    choices = torch.zeros_like(logits).scatter(1, logits.topk(TOP_K).indices, 1.0).sum(0)
    balance = switch_load_balancing_loss_func(
        logits.softmax(-1), choices, 9, topk=TOP_K, num_experts=EXPERTS, moe_aux_loss_coeff=1.0
    )
    expected = torch.stack((balance.double(), z_loss_func(logits, 1.0).double()))
    return float((one.sums / expected - 1).abs().max())


if __name__ == "__main__":
    do_runs(update)
