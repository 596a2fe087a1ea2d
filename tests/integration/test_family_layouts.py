"""The families of transformers shared by two ranks: weights, log-probs, gradients and replay of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.learner_support.families import FAMILIES, make_family
from tests.integration.learner_support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.slow

LAYOUTS = {"TP2xEP2": "tensor=2:expert=2", "CP2": "context=2", "PP2": "pipeline=2"}
SHARED_EXPERTS = {"TP2xETP2": "tensor=2:expert_tensor=2"}
WHOLE_HEADS, WHOLE_EXPERTS = ("olmoe",), ("gpt_oss",)
"""Families whose attention, or whose experts, cannot be shared by tensor-parallel ranks."""


def runs(layout: str, family: str) -> tuple[str, str]:
    return f"train:model={family}:{layout}", f"matrix:model={family}:{layout}"


def layouts(family: str) -> list[str]:
    offered = LAYOUTS if family in WHOLE_EXPERTS else LAYOUTS | SHARED_EXPERTS
    return [layout for layout in offered.values() if not (family in WHOLE_HEADS and "tensor" in layout)]


CASES = [(family, layout) for family in FAMILIES for layout in layouts(family)]


class Finished:
    """The results of one and two ranks for each family of four layers, run when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, family: str) -> tuple[Ranks, Ranks, Path]:
        checkpoint, one, two = (self._folder / family / name for name in (family, "one", "two"))
        if not checkpoint.exists():
            make_family(family, checkpoint, num_hidden_layers=4)
            run_ranks(one, checkpoint, 1, *runs("expert=1", family))
            run_ranks(two, checkpoint, 2, *(run for x in layouts(family) for run in runs(x, family)))
        return Ranks(one, 1), Ranks(two, 2), checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_weights_are_loaded_and_exported_bit_for_bit_and_step_like_one_process(
    finished: Finished, family: str, layout: str
) -> None:
    one, two, checkpoint = finished[family]
    (run, _), (reference, _) = runs(layout, family), runs("expert=1", family)
    before, source = two.exported(run, "before"), load_file(checkpoint / "model.safetensors")
    assert before.keys() == source.keys()
    assert all(torch.equal(before[name], source[name]) for name in source)
    after, expected = two.exported(run, "after"), one.exported(reference, "after")
    for name, value in expected.items():
        # With eps = lr = 1 an Adam step is close to the gradient itself, so its scale counts. Where that is small, the
        # weights' own rounding shows.
        moved, wanted = after[name] - before[name], value - source[name]
        rounding = 2.0**-23 * float(value.norm())
        assert float((moved - wanted).norm()) <= 2e-5 * float(wanted.norm()) + rounding, name
    norms = [float(found.saved(name, "facts")["grad_norm"]) for found, name in ((one, reference), (two, run))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_replayed_log_probs_and_router_gradients_are_those_of_one_process(
    finished: Finished, family: str, layout: str, mode: str
) -> None:
    one, two, _ = finished[family]
    (_, run), (_, reference) = runs(layout, family), runs("expert=1", family)
    logprobs, routers = one.saved(reference, "logprobs"), one.saved(reference, f"routers-{mode}")
    for rank in range(2):
        facts = {key: float(value) for key, value in two.saved(run, "facts", rank).items()}
        assert facts[f"{mode}.applied"] == 1.0
        assert facts[f"{mode}.flips"] > 0.5
        for name, values in two.saved(run, "logprobs", rank).items():
            torch.testing.assert_close(values, logprobs[name], rtol=1e-5, atol=1e-5 * float(logprobs[name].abs().max()))
        for name, gradient in two.saved(run, f"routers-{mode}", rank).items():
            largest = float(routers[name].abs().max())
            torch.testing.assert_close(gradient, routers[name], rtol=1e-5, atol=1e-5 * largest)
