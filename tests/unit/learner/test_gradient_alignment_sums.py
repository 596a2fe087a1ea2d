"""The bound on the cosine of consecutive gradients, against NumPy-like loops in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe_trm.config.deepspeed_rules import refusals
from moe_trm.config.schema import Config
from moe_trm.learner.alignment import GradientAlignment, alignment_of
from moe_trm.learner.protocol import UpdateResult
from moe_trm.loop import update_metrics
from tests.unit.sections import sections_of


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((one * other).sum()) for one, other in zip(left, right, strict=True))


def pieces(*values: float) -> list[Tensor]:
    """A gradient in two tensors of other shapes."""
    whole = torch.tensor(values, dtype=torch.float64)
    return [whole[:1].clone(), whole[1:].clone().view(-1, 1)]


def whole(gradient: Sequence[Tensor]) -> list[float]:
    return torch.cat([piece.flatten() for piece in gradient]).tolist()


def test_golden() -> None:
    control = GradientAlignment(0.1)
    assert control.apply(pieces(1, 0, 0), inner) is None
    gradient = pieces(1, 1, 0)
    assert control.apply(gradient, inner) == pytest.approx(0.707107, abs=1e-6)
    assert whole(gradient) == pytest.approx([0.141421, 1, 0], abs=1e-6)
    assert gradient[0] / math.sqrt(inner(gradient, gradient)) == pytest.approx(0.140028, abs=1e-6)


def test_the_cosine_afterwards_is_the_one_that_the_setting_names() -> None:
    """A limit on what is kept of the part along the gradient before, not on the cosine."""
    for cosine, after in ((0.9, 0.224), (0.99, 0.578), (0.999, 0.913)):
        control, gradient = GradientAlignment(0.1), pieces(cosine, math.sqrt(1 - cosine**2))
        control.apply(pieces(1, 0), inner)
        assert control.apply(gradient, inner) == pytest.approx(cosine)
        got = gradient[0].item() / math.sqrt(inner(gradient, gradient))
        assert got == pytest.approx(0.1 / math.sqrt(1 - cosine**2 + 0.1**2)) == pytest.approx(after, abs=1e-3)


def test_a_random_walk_against_a_loop() -> None:
    """Along with corrected updates, small cosines, opposite ones and gradients that cannot count."""
    draw = torch.Generator().manual_seed(3)
    control, previous = GradientAlignment(0.2), None
    seen = {"cut": 0, "left": 0, "opposite": 0}
    drift = torch.randn(7, generator=draw, dtype=torch.float64)
    for number in range(40):
        came = torch.randn(7, generator=draw, dtype=torch.float64) + (number % 3) * drift
        if number % 7 == 5:
            came = came * 0
        if number % 7 == 6:
            came[2] = math.nan
        gradient = [came[:3].clone(), came[3:].clone()]
        cosine = control.apply(gradient, inner)
        norm = math.sqrt(sum(value * value for value in came.tolist()))
        if not norm > 0:
            assert cosine is None
            assert torch.equal(torch.cat(gradient).nan_to_num(), came.nan_to_num())
            continue
        if previous is None:
            assert cosine is None
        else:
            product = sum(a * b for a, b in zip(came.tolist(), previous.tolist(), strict=True))
            square = sum(value * value for value in previous.tolist())
            expected = product / norm / math.sqrt(square)
            assert cosine == pytest.approx(expected)
            share = (1 - 0.2 / expected) * product / square if expected > 0.2 else 0.0
            torch.testing.assert_close(torch.cat(gradient), came - share * previous)
            seen["cut" if share else "opposite" if expected < 0 else "left"] += 1
        previous = came
    assert all(seen.values())


def test_nothing_is_copied_where_no_limit_is_asked_for() -> None:
    assert alignment_of(None) is None
    assert alignment_of(0.5) is not None


def test_the_metric_is_the_mean_of_what_is_known() -> None:
    def results(*cosines: float | None) -> dict[str, float]:
        return update_metrics([UpdateResult(1.0, 1.0, True, None, cosine) for cosine in cosines])

    assert results(None, 0.2, 0.4)["optimizer/grad_cosine"] == pytest.approx(0.3)
    assert "optimizer/grad_cosine" not in results(None, None)
    perturbed = [UpdateResult(1.0, 1.0, True, layer_noise=size) for size in (0.2, 0.1)]
    assert update_metrics(perturbed)["optimizer/layer_noise"] == 0.1


def test_the_norm_is_the_mean_over_real_steps() -> None:
    """An update in which nothing trained is counted apart; a refused one has a norm of no use."""
    real, empty = UpdateResult(2.0, 0.5, True, cosine=0.1), UpdateResult(0.0, 0.5, False)
    refused = UpdateResult(float("inf"), 0.5, False)
    assert update_metrics([empty, real, empty, refused, real]) == {
        "optimizer/steps": 3.0,
        "optimizer/skipped": 1.0,
        "optimizer/empty": 2.0,
        "optimizer/lr": 0.5,
        "optimizer/grad_norm": 2.0,
        "optimizer/grad_cosine": 0.1,
    }
    nothing = update_metrics([empty, empty])
    assert "optimizer/grad_norm" not in nothing
    assert (nothing["optimizer/steps"], nothing["optimizer/skipped"], nothing["optimizer/empty"]) == (0.0, 0.0, 2.0)
    assert update_metrics([])["optimizer/steps"] == 0.0


def test_gradients_of_zero_3_are_refused() -> None:
    def keys(stage: int) -> list[str]:
        learner = {"backend": "deepspeed", "deepspeed": {"zero_stage": stage}}
        optimizer = {"alignment_limit": 0.1}
        chosen = {"model": {"checkpoint": "x"}, "learner": learner, "optimizer": optimizer}
        return [
            problem.key for problem in refusals(*sections_of(Config.model_validate(chosen), "learner", "optimizer"))
        ]

    assert keys(3) == ["optimizer.alignment_limit"]
    assert not keys(2)
