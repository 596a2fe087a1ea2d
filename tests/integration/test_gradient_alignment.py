"""The cosine of consecutive gradients on both learners, against transformers in float64; and its bound."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_trm.learner.protocol import Scores
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import load_reference, make_checkpoint
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective, squares

LIMIT = 0.1
UNREPLAYED = ":mode=none:flips=0.2"
MEGATRON, WHOLE = f"backend=megatron:expert=2{UNREPLAYED}", "backend=megatron:expert=1:flips=0.2"
TENSOR = "backend=megatron:tensor=2:expert=2"
"""Both ranks hold the norms and the routers, and sum their gradients."""
ZERO_1, ZERO_2, OFFLOAD = (
    f"backend=deepspeed:stage=1{UNREPLAYED}",
    "backend=deepspeed:stage=2:flips=0.2",
    "backend=deepspeed:stage=2:offload=1",
)
RUNS = (MEGATRON, WHOLE, TENSOR, ZERO_1, ZERO_2, OFFLOAD)
SCRIPT = Path(__file__).parent / "learner_support" / "alignment.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("alignment") / "main")


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(tmp_path_factory.mktemp("ranks"), checkpoint, 2, *RUNS, f"{ZERO_2}:limit=1", script=SCRIPT)


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> tuple[Tensor, Tensor]:
    """The two gradients of the whole work, flat, in float64."""
    found = []
    for other in (False, True):
        model = load_reference(checkpoint).double()
        model.set_experts_implementation("eager")
        for number in range(NUM_BATCHES):
            batch = global_batch(number)
            assert batch.kept_ids is not None
            assert batch.kept_offsets is not None
            logits = (model(input_ids=batch.input_ids, use_cache=False).logits / TEMPERATURE)[batch.mask]
            kept = torch.zeros_like(logits, dtype=torch.bool)
            kept[torch.repeat_interleave(batch.kept_offsets.diff()), batch.kept_ids] = True
            chosen = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
            own = chosen.gather(1, batch.target_ids[batch.mask][:, None])[:, 0]
            current = Scores(torch.zeros(batch.mask.shape, dtype=torch.float64).masked_scatter(batch.mask, own))
            loss = squares(batch, current) if other else objective([batch], [])(0, current)
            torch.autograd.backward(loss)
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return found[0], found[1]


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
def test_a_repeated_gradient_is_cut_to_the_limit(finished: Ranks, exact: tuple[Tensor, Tensor], run: str) -> None:
    facts = finished.saved(run, "facts")
    assert "cosine.0" not in facts
    assert float(facts["norm.0"]) == pytest.approx(float(exact[0].norm()), rel=1e-5)
    assert float(facts["cosine.1"]) == pytest.approx(1, abs=1e-6)
    assert float(facts["norm.1"]) == pytest.approx(LIMIT * float(exact[0].norm()), rel=1e-4)


@pytest.mark.parametrize("run", RUNS)
def test_another_gradient_has_the_cosine_and_the_rest_of_float64(
    finished: Ranks, exact: tuple[Tensor, Tensor], run: str
) -> None:
    """Its predecessor is the gradient as it came, not as it was applied."""
    facts, (before, now) = finished.saved(run, "facts"), exact
    cosine = float(before @ now / before.norm() / now.norm())
    assert LIMIT < cosine < 0.999
    assert float(facts["cosine.2"]) == pytest.approx(cosine, abs=1e-5)
    along = before / before.norm()
    rest = now - (now @ along) * along
    expected = rest + (LIMIT / cosine) * (now @ along) * along
    assert float(facts["norm.2"]) == pytest.approx(float(expected.norm()), rel=1e-4)
    assert float(expected @ along / expected.norm()) == pytest.approx(
        LIMIT / math.sqrt(1 - cosine**2 + LIMIT**2), abs=1e-9
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_broken_gradient_is_not_remembered(finished: Ranks, run: str) -> None:
    facts = finished.saved(run, "facts")
    assert not float(facts["broken_applied"])
    assert float(facts["broken"])
    assert float(facts["cosine.4"]) == pytest.approx(1, abs=1e-6)


def test_a_limit_of_one_measures_alone(finished: Ranks, exact: tuple[Tensor, Tensor]) -> None:
    facts = finished.saved(f"{ZERO_2}:limit=1", "facts")
    assert float(facts["cosine.1"]) == pytest.approx(1, abs=1e-6)
    for number, norm in ((1, exact[0].norm()), (2, exact[1].norm())):
        assert float(facts[f"norm.{number}"]) == pytest.approx(float(norm), rel=1e-5)


def test_learners_agree(finished: Ranks) -> None:
    found = [finished.saved(run, "facts") for run in RUNS]
    for name in ("cosine.2", "norm.2", "norm.4"):
        assert [float(facts[name]) for facts in found] == pytest.approx([float(found[0][name])] * len(RUNS), rel=1e-4)


@pytest.mark.parametrize("run", [MEGATRON, WHOLE, ZERO_1, ZERO_2])
def test_a_learner_without_replay_has_no_bound_on_flips(finished: Ranks, run: str) -> None:
    """Its probes measure; a stop would be for routes that do not train."""
    assert finished.saved(run, "facts")["stops_above"] == pytest.approx(1.0 if UNREPLAYED in run else 0.2)
