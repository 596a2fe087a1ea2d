"""Runs of several ranks against those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.learner_support.ranks import Ranks


def assert_same_step(one: Ranks, several: Ranks, run: str, reference: str, checkpoint: Path) -> None:
    """`train` runs: weights come out as they went in, and a step moves them as one process does."""
    before, source = several.exported(run, "before"), load_file(checkpoint / "model.safetensors")
    assert before.keys() == source.keys()
    assert all(torch.equal(before[name], source[name]) for name in source)
    after, expected = several.exported(run, "after"), one.exported(reference, "after")
    for name, value in expected.items():
        # With eps = lr = 1 an Adam step is close to the gradient itself, so its scale counts. Where that is small, the
        # weights' own rounding shows.
        moved, requested = after[name] - before[name], value - source[name]
        rounding = 2.0**-23 * float(value.norm())
        assert float((moved - requested).norm()) <= 2e-5 * float(requested.norm()) + rounding, name
    norms = [float(found.saved(name, "facts")["grad_norm"]) for found, name in ((one, reference), (several, run))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def assert_same_replay(one: Ranks, several: Ranks, run: str, reference: str, mode: str) -> None:
    """`matrix` runs: replay is proved on every rank, log-probs and router gradients are those of one process."""
    logprobs, routers = one.saved(reference, "logprobs"), one.saved(reference, f"routers-{mode}")
    replayed = float(one.saved(reference, "facts")[f"{mode}.replayed"])
    seen: set[str] = set()
    for rank in range(several.num_ranks):
        facts = {key: float(value) for key, value in several.saved(run, "facts", rank).items()}
        assert facts[f"{mode}.applied"] == 1.0
        assert facts[f"{mode}.replayed"] == replayed
        assert facts[f"{mode}.flips"] > 0.5
        for name, values in several.saved(run, "logprobs", rank).items():
            torch.testing.assert_close(values, logprobs[name], rtol=1e-5, atol=1e-5 * float(logprobs[name].abs().max()))
        for name, gradient in several.saved(run, f"routers-{mode}", rank).items():
            largest = float(routers[name].abs().max())
            torch.testing.assert_close(gradient, routers[name], rtol=1e-5, atol=1e-5 * largest)
            seen.add(name)
    assert seen == routers.keys()
