"""Adapters on both learners and every layout, against transformers with adapters written by hand, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name
from tests.integration.learner_support.adapted_runs import Finished, make_adapter, modules
from tests.integration.learner_support.adapters_by_hand import (
    assert_adapters_by_hand,
    assert_nothing_but_factors_trains,
    assert_replay_and_resume,
    expected,
    relative,
)
from tests.integration.learner_support.families import make_family
from tests.integration.learner_support.lora import ALPHA, RANK
from tests.integration.learner_support.tiny import make_checkpoint
from tests.integration.learner_support.work import NUM_BATCHES

EVERYTHING = "targets=attention+experts+router"
STARTED = f"{EVERYTHING}:start=adapter"
ONE = f"backend=megatron:{STARTED}"
ZERO_2, ZERO_3 = (f"backend=deepspeed:{STARTED}:stage={stage}" for stage in (2, 3))
FRESH = [f"backend={backend}:{EVERYTHING}" for backend in ("megatron", "deepspeed")]
ALONE = [
    f"{ONE}:liars=1",
    f"{ONE}:recompute=full",
    f"{ONE}:recompute=selective",
    f"{ONE}:layout=packed",
    f"{ONE}:distributed=0",
    f"{ZERO_2}:layout=packed",
    f"{ZERO_2}:recompute=full",
    f"{ZERO_2}:liars=1",
]
TWO = [
    f"backend=megatron:{STARTED}:{layout}"
    for layout in (
        "tensor=2:expert=2",
        "tensor=2:expert=2:layout=packed:liars=1",
        "tensor=2:expert=2:recompute=full",
        "tensor=2:expert=2:distributed=0",
        "expert=2",
        "expert=2:distributed=0",
        "pipeline=2",
        "pipeline=2:recompute=full",
        "context=2",
        "context=2:layout=packed",
        "expert=1",
    )
] + [ZERO_2, ZERO_3, f"{ZERO_3}:recompute=full", f"{ZERO_3}:layout=packed", f"{ZERO_2}:layout=packed"]
UNEVEN = [
    f"backend=megatron:{STARTED}:{layout}"
    for layout in (
        "pipeline=2:first_stage_layers=3:liars=1",
        "pipeline=2:first_stage_layers=3:layout=packed:recompute=full",
        # The first stage has nothing to train, and a gradient has to come through it all the same.
        "pipeline=2:pipeline_layout=E|t*4L",
        "pipeline=2:pipeline_layout=Ett|t|t|L:layout=packed",
    )
]
PARTS = [
    f"backend={backend}:targets={targets}{more}"
    for backend, more in (("megatron", ":expert=2"), ("megatron", ":tensor=2:expert=2"), ("deepspeed", ":stage=3"))
    for targets in ("q_proj+up_proj", "experts", "router")
] + [
    "backend=megatron:targets=attention+router:tensor=2:expert_tensor=2",
    # The other stage has nothing to train, or a dense layer that has not.
    "backend=megatron:targets=model.layers.3.self_attn.q_proj:pipeline=2",
    "backend=megatron:targets=experts:pipeline=2:virtual_pipeline=2",
    "backend=megatron:targets=model.layers.3.self_attn.q_proj:pipeline=2:first_stage_layers=3",
]
LOW = [
    f"backend={backend}:{STARTED}:dtype=bfloat16{more}"
    for backend, more in (("megatron", ":expert=2"), ("deepspeed", ""))
]
BACKENDS = ("megatron", "deepspeed")
OTHERS = ("glm4_moe", "mixtral", "deepseek_v3")
FAMILIES = [f"backend={backend}:{EVERYTHING}:model={name}" for backend in BACKENDS for name in OTHERS]
GROUPS = ((1, [ONE]), (1, [ZERO_2, *FRESH]), (1, ALONE), (2, TWO), (2, UNEVEN), (2, PARTS), (2, LOW), (1, FAMILIES))
"""Runs that share their processes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the second one dense; beside it an adapter whose B is not zero."""
    folder = tmp_path_factory.mktemp("lora")
    start = make_checkpoint(folder / "main", num_hidden_layers=4)
    make_adapter(start, EVERYTHING, folder / "adapter")
    return start


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("runs"), checkpoint, GROUPS)


SLOW = [
    *((1, run) for run in (ZERO_2, *FRESH)),
    *((1, run) for run in ALONE),
    *((2, run) for run in TWO),
    *((2, run) for run in UNEVEN),
    *((2, run) for run in PARTS),
]
CASES = [
    pytest.param(1, ONE, id=f"1-{ONE}"),
    *(pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.slow) for case in SLOW),
]
EVERY = [*CASES, *(pytest.param(1, run, id=run, marks=pytest.mark.slow) for run in FAMILIES)]


@pytest.fixture(scope="module", autouse=True)
def families(request: pytest.FixtureRequest, checkpoint: Path) -> None:
    """Checkpoints of other families, where a slow test asks for them."""
    if any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path):
        for name in OTHERS:
            make_family(name, checkpoint.with_name(name))


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_log_probs_gradients_and_a_step_are_those_of_adapters_by_hand(
    finished: Finished, num_ranks: int, name: str
) -> None:
    run = finished[num_ranks, name]
    assert_adapters_by_hand(run, expected(run))
    begun, stepped = run.factors("begun"), run.factors("stepped")
    if "start=" not in name:
        # B is zero, so A has no gradient yet, and the policy is the base's.
        assert all(torch.equal(stepped[key], begun[key]) for key in begun if ".lora_A." in key)
    assert all(bool((stepped[key] != begun[key]).any()) for key in begun if ".lora_B." in key and "experts" not in key)


@pytest.mark.parametrize(("num_ranks", "name"), EVERY)
def test_the_base_stays_and_nothing_but_factors_has_a_state(finished: Finished, num_ranks: int, name: str) -> None:
    run = finished[num_ranks, name]
    source, adapted = HfCheckpoint(run.start), modules(run.start, name)
    before, after = (run.ranks.exported(name, when) for when in ("before", "after"))
    assert before.keys() == after.keys()
    for tensor in before:
        module = tensor.removesuffix(".weight")
        if module not in adapted:
            assert torch.equal(before[tensor], source.read(tensor)), tensor
            assert torch.equal(after[tensor], source.read(tensor)), tensor
        elif "start=" not in name:
            assert torch.equal(before[tensor], source.read(tensor)), tensor
        if module in adapted and "experts" not in module:
            assert not torch.equal(after[tensor], before[tensor]), tensor
    assert_nothing_but_factors_trains(run)


@pytest.mark.parametrize(("num_ranks", "name"), EVERY)
def test_pushed_weights_are_base_and_factors(finished: Finished, num_ranks: int, name: str) -> None:
    run = finished[num_ranks, name]
    source, after, factors = HfCheckpoint(run.start), run.ranks.exported(name, "after"), run.factors("stepped")
    for module in modules(run.start, name):
        a, b = (factors[factor_name(module, factor)].double() for factor in (A, B))
        requested = source.read(f"{module}.weight").double() + ALPHA / RANK * (b @ a)
        torch.testing.assert_close(after[f"{module}.weight"].double(), requested, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_ranks", "name"), EVERY)
def test_replay_is_proved_and_a_resumed_run_has_the_same_bits(finished: Finished, num_ranks: int, name: str) -> None:
    assert_replay_and_resume(finished[num_ranks, name])


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_both_learners_agree_on_other_families(finished: Finished, family: str) -> None:
    """Two implementations of model, adapters and step, which begin with the same factors."""
    one, two = (finished[1, next(run for run in FAMILIES if backend in run and family in run)] for backend in BACKENDS)
    for name, values in one.scores().items():
        kind = name.partition(".")[0]
        if kind in ("score", "update", "start", "moved"):
            torch.testing.assert_close(two.scores()[name], values, rtol=0, atol=2e-5 if kind != "moved" else 2e-4)
    begun = one.factors("begun")
    assert all(torch.equal(two.factors("begun")[name], values) for name, values in begun.items())
    requested = {name: values.double() for name, values in one.factors("stepped").items()}
    assert relative(two.factors("stepped"), requested, begun) < 2e-4
    assert two.facts()["first_norm"] == pytest.approx(one.facts()["first_norm"], rel=1e-4)


@pytest.mark.slow
def test_the_base_has_one_checksum_on_every_layout(finished: Finished) -> None:
    runs = [finished[1, ONE], *(finished[2, name] for name in (*TWO, *UNEVEN) if "megatron" in name)]
    assert len({run.facts()["base_checksum"] for run in runs}) == 1
    zero = [finished[1, ZERO_2], *(finished[2, name] for name in TWO if "deepspeed" in name)]
    assert len({run.facts()["base_checksum"] for run in zero}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", LOW)
def test_bfloat16_computes_with_what_it_pushes(finished: Finished, name: str) -> None:
    """The pushed weights in transformers give the learner's log-probs but for bfloat16's arithmetic."""
    run = finished[2, name]
    before, scores = run.ranks.exported(name, "before"), run.scores()
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
    reference = expected(run)
    for number in range(NUM_BATCHES):
        difference = (scores[f"score.{number}"].double() - reference.scores[f"score.{number}"]).abs()
        assert float(difference.mean()) < 0.05
    assert run.facts()["frozen_same"]
    assert relative(run.factors("stepped"), reference.stepped, run.factors("begun")) < 0.2
