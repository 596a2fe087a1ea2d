"""One suite for every learner: Megatron-Core and DeepSpeed's three stages do the same work on two real ranks.

They are compared with transformers in float64 and with one another.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_trm.learner.parameter_groups import ROUTER
from moe_trm.learner.protocol import Scores
from routing.hf import HFReplayer
from routing.record.sources import ReplayRecords
from tests.integration.learner_support.families import FAMILIES, HYBRIDS, SPARSE, make_family
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import load_reference, make_checkpoint, random_routes
from tests.integration.learner_support.work import NUM_BATCHES, TEMPERATURE, global_batch, objective

MEGATRON = "backend=megatron:expert=2"
ZERO_1, ZERO_2, ZERO_3 = (f"backend=deepspeed:stage={stage}" for stage in (1, 2, 3))
OTHER_STAGE = "backend=deepspeed:stage=2:from=3"
RECOMPUTE_2, RECOMPUTE_3 = (f"backend=deepspeed:stage={stage}:recompute=full" for stage in (2, 3))
OFFLOAD_2, OFFLOAD_3 = (f"backend=deepspeed:stage={stage}:offload=1" for stage in (2, 3))
BFLOAT16_2, BFLOAT16_3 = (f"backend=deepspeed:stage={stage}:dtype=bfloat16" for stage in (2, 3))
# MiniMax-M2's selection bias stays float32, and its norms are over all heads.
BFLOAT16_FAMILIES = [
    *(f"{run}:model=minimax_m2:dtype=bfloat16" for run in (MEGATRON, ZERO_2)),
    f"{ZERO_2}:dtype=bfloat16:model=deepseek_v32",
]
PACKED_MEGATRON = f"{MEGATRON}:layout=packed"
PACKED_2, PACKED_3 = (f"backend=deepspeed:stage={stage}:layout=packed" for stage in (2, 3))
PACKED_RECOMPUTE = f"{PACKED_3}:recompute=full"
ZERO_FAMILIES = [
    f"backend=deepspeed:stage={2 + place % 2}:model={name}" for place, name in enumerate((*FAMILIES, *HYBRIDS))
]
SPARSE_FAMILIES = [
    "backend=deepspeed:stage=3:model=deepseek_v32",
    "backend=deepspeed:stage=2:recompute=full:model=glm_moe_dsa",
]
# Sigmoid scores, a bias and groups that choose, shared experts and a dense layer: the family most unlike the main one.
MEGATRON_GLM, *MEGATRON_FAMILIES = (f"{MEGATRON}:model={name}" for name in sorted(FAMILIES, key="glm4_moe".__ne__))
# An expert's rows are 24 bytes, which torch's grouped product refuses.
ODD_WIDTHS = [f"{MEGATRON}:model=odd", "backend=deepspeed:stage=3:model=odd"]
PACKED_FAMILIES = [f"{run}:layout=packed" for run in (MEGATRON_GLM, *MEGATRON_FAMILIES, *ZERO_FAMILIES)]
SLOW_FAMILIES = [*MEGATRON_FAMILIES, *ZERO_FAMILIES, *SPARSE_FAMILIES, *PACKED_FAMILIES, *ODD_WIDTHS]
OTHER_FAMILIES = [
    MEGATRON_GLM,
    *(pytest.param(run, marks=pytest.mark.slow) for run in SLOW_FAMILIES),
]
FEW = [MEGATRON, ZERO_3, PACKED_2]
MORE = [ZERO_1, ZERO_2, PACKED_3, PACKED_RECOMPUTE, RECOMPUTE_2, RECOMPUTE_3, OFFLOAD_2, OFFLOAD_3]
EVERY = [*FEW, *(pytest.param(run, marks=pytest.mark.slow) for run in (*MORE, PACKED_MEGATRON))]
WITH_BFLOAT16 = [
    *EVERY,
    *(pytest.param(run, marks=pytest.mark.slow) for run in (BFLOAT16_2, BFLOAT16_3, *BFLOAT16_FAMILIES)),
]
EVERY_MODEL = [*WITH_BFLOAT16, *OTHER_FAMILIES]

SCRIPT = Path(__file__).parent / "learner_support" / "conformance.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conformance")
    for name in (*FAMILIES, *HYBRIDS, *SPARSE):
        make_family(name, folder / name)
    make_checkpoint(folder / "odd", moe_intermediate_size=6)
    return make_checkpoint(folder / "main")


class Finished:
    """Runs by name, each done once, when it is first asked for; those of one group share their processes."""

    GROUPS = (
        (MEGATRON,),
        (ZERO_3, OTHER_STAGE, PACKED_2),
        (*MORE, BFLOAT16_2, BFLOAT16_3),
        (MEGATRON_GLM,),
        (PACKED_MEGATRON,),
        tuple(MEGATRON_FAMILIES),
        *((run,) for run in (*ZERO_FAMILIES, *SPARSE_FAMILIES, *PACKED_FAMILIES, *ODD_WIDTHS, *BFLOAT16_FAMILIES)),
    )

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._begun = set[str]()

    def __getitem__(self, run: str) -> Ranks:
        if run not in self._begun:
            group = next(group for group in self.GROUPS if run in group)
            self._begun.update(group)
            run_ranks(self._folder, self._checkpoint, 2, *group, script=SCRIPT)
        return Ranks(self._folder, 2)


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("learners"), checkpoint)


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """The expected results of the learners, from transformers in float64.

    These are scores by kind and batch, and the gradient under checkpoint names.
    """
    model = load_reference(checkpoint).double()
    model.set_experts_implementation("eager")
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    scores: dict[str, Tensor] = {}
    for number in range(NUM_BATCHES):
        batch = global_batch(number)
        assert batch.kept_ids is not None
        assert batch.kept_offsets is not None
        routes = ReplayRecords(random_routes(batch, replayer.layer_ids, seed=number))
        with torch.no_grad(), replayer.use(routes, batch.input_ids, batch.target_ids, batch.valid):
            scores[f"r3.{number}"] = masked(model, batch)[0]
        replayer.detach()
        logprobs, mass, full, entropy = masked(model, batch)
        torch.autograd.backward(objective([batch], [])(0, Scores(logprobs)))
        scores |= {f"score.{number}": logprobs, f"mass.{number}": mass, f"full.{number}": full, f"H.{number}": entropy}
        replayer = HFReplayer(model, max_local_flip_rate=1.0)
    replayer.detach()
    return {"scores": {k: v.detach() for k, v in scores.items()}, "gradient": in_checkpoint_form(model)}


def masked(model: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores from plain logits, `[B, R]` each.

    In order: log-prob over the kept support, log kept mass, log-prob over the vocabulary, entropy.
    """
    logits_NV = (model(input_ids=batch.input_ids, use_cache=False).logits / TEMPERATURE)[batch.mask]
    everything_NV = logits_NV.log_softmax(-1)
    kept_NV = torch.zeros_like(everything_NV, dtype=torch.bool)
    kept_NV[torch.repeat_interleave(batch.kept_offsets.diff()), batch.kept_ids] = True
    mass_N = everything_NV.masked_fill(~kept_NV, -torch.inf).logsumexp(-1)
    full_N = everything_NV.gather(1, batch.target_ids[batch.mask][:, None])[:, 0]
    entropy_N = -(everything_NV.exp() * everything_NV).sum(-1)
    zeros = torch.zeros(batch.mask.shape, dtype=torch.float64)
    channels = [zeros.masked_scatter(batch.mask, values) for values in (full_N - mass_N, mass_N, full_N, entropy_N)]
    return channels[0], channels[1], channels[2], channels[3]


def in_checkpoint_form(model: Any) -> dict[str, Tensor]:
    """Gradients under the checkpoint's names.

    Expert `e` of a fused `[E, 2I, H]` parameter has gate rows first, then up rows.

    Mixtral and MiniMax-M2 have names of their own for them; gpt-oss leaves them fused on disk.
    """
    mixtral = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    kind, found = model.config.model_type, dict[str, Tensor]()
    has_own_names = kind in ("mixtral", "minimax_m2")
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        if has_own_names:
            stem = stem.replace(".mlp", ".block_sparse_moe")
        if leaf not in ("gate_up_proj", "down_proj") or kind == "gpt_oss":
            found[f"{stem}.{leaf}"] = parameter.grad
            continue
        for expert, rows in enumerate(parameter.grad):
            matrices = rows.chunk(2) if leaf == "gate_up_proj" else (rows,)
            for matrix, values in zip(
                ("gate_proj", "up_proj") if len(matrices) > 1 else ("down_proj",), matrices, strict=True
            ):
                found[f"{stem}.{expert}.{mixtral[matrix] if has_own_names else matrix}.weight"] = values
    return found


def model_of(run: str) -> str:
    """The checkpoint that a run names; empty for the main one."""
    return run.partition("model=")[2].partition(":")[0]


def scores(ranks: Ranks, run: str) -> dict[str, Tensor]:
    parts = [ranks.saved(run, "scores", rank) for rank in range(ranks.num_ranks)]
    return {key: value for part in parts for key, value in part.items() if key != "gathered"}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def worst_relative(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest error of any tensor, relative to the tensor's norm."""
    assert got.keys() == expected.keys()
    return max(float((got[k].double() - expected[k]).norm() / expected[k].norm()) for k in expected)


def moved(ranks: Ranks, run: str) -> dict[str, Tensor]:
    """The change of each tensor by the first step."""
    before = ranks.exported(run, "before")
    return {name: value.double() - before[name] for name, value in ranks.exported(run, "after").items()}


@pytest.mark.parametrize("run", [*EVERY, *EVERY_MODEL[len(WITH_BFLOAT16) :]])
def test_weights_come_in_and_go_out_bit_for_bit(finished: Finished, checkpoint: Path, run: str) -> None:
    ranks = finished[run]
    start = checkpoint.with_name(model_of(run) or checkpoint.name)
    assert same_bits(ranks.exported(run, "before"), load_file(start / "model.safetensors"))
    weights = load_reference(ranks.folder / run / "final").state_dict()
    after = ranks.exported(run, "after")
    assert torch.equal(weights["lm_head.weight"], after["lm_head.weight"])
    assert same_bits(ranks.exported(run, "final"), after)


@pytest.mark.parametrize("run", EVERY)
def test_scores_are_those_of_transformers_in_float64(finished: Finished, exact: Any, run: str) -> None:
    got = scores(finished[run], run)
    for kind in ("score", "full", "mass", "r3"):
        for number in range(NUM_BATCHES):
            expected = exact["scores"][f"{kind}.{number}"]
            torch.testing.assert_close(got[f"{kind}.{number}"].double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("run", EVERY_MODEL)
def test_passes_at_the_same_weights_and_routes_are_bit_identical(finished: Finished, run: str) -> None:
    got = scores(finished[run], run)
    for number in range(NUM_BATCHES):
        for kind in ("update", "r2", "start"):
            assert torch.equal(got[f"score.{number}"], got[f"{kind}.{number}"]), kind
        assert torch.equal(got[f"moved.{number}"], got[f"back.{number}"])
        assert not torch.equal(got[f"moved.{number}"], got[f"start.{number}"])


@pytest.mark.parametrize("run", EVERY)
def test_the_first_step_is_that_of_the_float64_gradient_of_the_sum(finished: Finished, exact: Any, run: str) -> None:
    ranks = finished[run]
    gradient = exact["gradient"]
    # Adam's first step with lr = eps = 1.
    expected = {name: -value / (value.abs() + 1) for name, value in gradient.items()}
    assert worst_relative(moved(ranks, run), expected) < 1e-4
    norm = torch.cat([value.flatten() for value in gradient.values()]).norm()
    assert float(ranks.saved(run, "facts")["first_norm"]) == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("run", OTHER_FAMILIES)
def test_scores_of_other_families_are_those_of_transformers_in_float64(
    finished: Finished, checkpoint: Path, run: str
) -> None:
    model = load_reference(checkpoint.with_name(model_of(run))).double()
    model.set_experts_implementation("eager")
    got = scores(finished[run], run)
    for number in range(NUM_BATCHES):
        with torch.no_grad():
            expected = masked(model, global_batch(number))
        for kind, values in zip(("score", "mass", "full"), expected, strict=False):
            torch.testing.assert_close(got[f"{kind}.{number}"].double(), values, atol=5e-5, rtol=0)


@pytest.mark.parametrize("run", OTHER_FAMILIES)
def test_the_first_step_of_other_families_is_that_of_the_float64_gradient(
    finished: Finished, checkpoint: Path, run: str
) -> None:
    model = load_reference(checkpoint.with_name(model_of(run))).double()
    model.set_experts_implementation("eager")
    for number in range(NUM_BATCHES):
        batch = global_batch(number)
        torch.autograd.backward(objective([batch], [])(0, Scores(masked(model, batch)[0])))
    gradient = in_checkpoint_form(model)
    expected = {name: -value / (value.abs() + 1) for name, value in gradient.items() if value is not None}
    after, steps = finished[run].exported(run, "after"), moved(finished[run], run)
    frozen = re.compile(r"e_score_correction_bias$|\.indexer\.")
    assert steps.keys() - expected.keys() == {name for name in steps if frozen.search(name)}
    for name, step in expected.items():
        # The gradients of sinks and attention's biases are so small that the rounding of the weights they change shows.
        rounding = 2.0**-24 * float(after[name].norm())
        assert float((steps[name] - step).norm()) < 1e-4 * float(step.norm()) + rounding, name


@pytest.mark.parametrize("run", EVERY[1:])
def test_learners_agree(finished: Finished, run: str) -> None:
    """Also after a step, on replayed routes, with entropy."""
    one, other = scores(finished[MEGATRON], MEGATRON), scores(finished[run], run)
    assert one.keys() == other.keys()
    for name, expected in one.items():
        torch.testing.assert_close(other[name], expected, atol=1e-4, rtol=0)
    assert worst_relative(moved(finished[run], run), moved(finished[MEGATRON], MEGATRON)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("run", [ZERO_1, ZERO_3])
def test_stages_give_the_same_losses(finished: Finished, run: str) -> None:
    one, other = scores(finished[ZERO_2], ZERO_2), scores(finished[run], run)
    for kind in ("update", "moved", "r3_update"):
        ours, theirs = (
            sum(objective([global_batch(i)], [])(0, Scores(found[f"{kind}.{i}"])) for i in range(NUM_BATCHES))
            for found in (one, other)
        )
        assert float(ours) == pytest.approx(float(theirs), abs=1e-5)


@pytest.mark.parametrize("run", EVERY_MODEL)
def test_replay_is_counted_and_proved(finished: Finished, run: str) -> None:
    facts = {name: float(value) for name, value in finished[run].saved(run, "facts").items()}
    token_layers = facts["valid"] * facts["layers"]
    assert facts["score_replayed"] == 2 * token_layers
    assert facts["update_replayed"] == (2 if "recompute" in run else 1) * token_layers
    assert facts["score_applied"] == facts["update_applied"] == 1.0
    assert facts["update_flips"] > 0.8


@pytest.mark.parametrize("run", EVERY_MODEL)
def test_what_must_be_refused_leaves_the_weights_alone(finished: Finished, run: str) -> None:
    ranks = finished[run]
    for rank in range(ranks.num_ranks):
        facts = ranks.saved(run, "facts", rank)
        for kind in ("deaf", "of_no_sample", "misplaced", "shifted", "swapped", "unknown_snapshot"):
            assert facts[kind] == 1.0, kind
        assert facts["broken_applied"] == 0.0
    assert same_bits(ranks.exported(run, "refused"), ranks.exported(run, "second"))


@pytest.mark.parametrize("run", EVERY_MODEL)
def test_one_wrong_sample_of_many_is_named_and_a_router_that_moved_is_not_accused(finished: Finished, run: str) -> None:
    for rank in range(finished[run].num_ranks):
        facts = {name: float(value) for name, value in finished[run].saved(run, "facts", rank).items()}
        told = {name: value for name, value in facts.items() if name.startswith("liar_")}
        assert told.keys() >= {"liar_random", "liar_shifted", "liar_a_quarter_shifted", "liar_one_layer"}
        assert set(told.values()) == {1.0}, told
        assert facts["honest_flips"] == 0.0
        assert facts["moved_flips"] > 0.4
        assert facts["moved_samples"] >= 16


@pytest.mark.parametrize("run", FEW)
def test_sums_extremes_and_values_of_all_ranks(finished: Finished, run: str) -> None:
    for rank in range(2):
        facts = finished[run].saved(run, "facts", rank)
        assert facts["valid"] == sum(float(global_batch(i).valid.sum()) for i in range(NUM_BATCHES))
        assert [float(facts[name]) for name in ("low:min", "high:max")] == [1.0, 1.0]
        assert finished[run].saved(run, "scores", rank)["gathered"].tolist() == [0, 10, 11]


@pytest.mark.parametrize("run", FEW)
def test_a_micro_batch_of_padding_keeps_up(finished: Finished, run: str) -> None:
    facts = finished[run].saved(run, "facts")
    assert facts["padding_applied"] == 1.0
    assert torch.isfinite(facts["padding_norm"])
    assert facts["padding_norm"] > 0


@pytest.mark.parametrize("run", EVERY_MODEL)
def test_a_resumed_learner_repeats_the_next_step_bit_for_bit(finished: Finished, run: str) -> None:
    ranks = finished[run]
    assert same_bits(ranks.exported(run, "restored"), ranks.exported(run, "after"))
    assert same_bits(ranks.exported(run, "resumed"), ranks.exported(run, "second"))


@pytest.mark.parametrize("run", [*EVERY, *EVERY_MODEL[len(WITH_BFLOAT16) :]])
def test_parameter_groups_and_a_frozen_router(finished: Finished, run: str) -> None:
    ranks = finished[run]
    before, plain, grouped = (ranks.exported(run, name) for name in ("before", "after", "grouped"))
    for name, start in before.items():
        moved, usual = grouped[name] - start, plain[name] - start
        if ROUTER.search(name):
            assert not moved.any(), name
            assert usual.any(), name
        elif usual.any():
            expected = 0.5 * usual if "lm_head" in name else usual
            assert float((moved - expected).norm() / expected.norm()) < 1e-4, name


def test_another_stage_resumes(finished: Finished) -> None:
    ranks = finished[OTHER_STAGE]
    assert same_bits(ranks.exported(OTHER_STAGE, "restored"), ranks.exported(ZERO_3, "after"))
    assert worst_relative(ranks.exported(OTHER_STAGE, "resumed"), ranks.exported(ZERO_3, "second")) < 1e-6
