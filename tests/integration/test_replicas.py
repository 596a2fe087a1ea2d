"""One number out of place on one rank stops the run, with rank and tensor; what no other rank holds is not compared."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from tests.integration.learner_support.ranks import run_ranks
from tests.integration.learner_support.tiny import make_checkpoint

SCRIPT = Path(__file__).parent / "learner_support" / "replica_faults.py"
COMPARED = {
    "backend=megatron:expert=1": {"router", "norm", "experts", "embed", "proj"},
    "backend=megatron:expert=2": {"router", "norm", "embed", "proj"},
    "backend=megatron:expert=1:expert_tensor=2:tensor=2": {"router", "norm"},
    "backend=megatron:expert=1:pipeline=2:first_stage_layers=1": {"router", "norm", "experts", "embed", "proj"},
    "backend=megatron:expert=1:pipeline=2:first_stage_layers=1:odd=3": {"router", "norm", "experts", "proj"},
    "backend=deepspeed:stage=2": {"norm", "q_norm", "experts", "embed", "proj"},
    "backend=deepspeed:stage=3": set[str](),
}
"""By layout of two ranks, or of two for each stage, the kinds of tensors of which the odd one and another hold the same
part."""

Facts = dict[str, dict[int, dict[str, str]]]


def num_ranks(run: str) -> int:
    return 4 if "pipeline" in run else 2


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What each rank's learner said, by run and rank."""
    folder = tmp_path_factory.mktemp("replicas")
    checkpoint, out = make_checkpoint(folder / "main"), folder / "out"
    jobs = groupby(COMPARED, lambda run: (run.split(":")[0], num_ranks(run)))
    for (_, size), runs in jobs:
        run_ranks(out, checkpoint, size, *runs, script=SCRIPT)
    return {
        run: {rank: json.loads((out / run / f"{rank}.json").read_text()) for rank in range(num_ranks(run))}
        for run in COMPARED
    }


@pytest.mark.parametrize("run", COMPARED)
def test_replicas_agree_after_the_load_and_after_a_step(facts: Facts, run: str) -> None:
    for messages in facts[run].values():
        assert (messages["loaded"], messages["trained"], messages["healed"]) == ("", "", "")


@pytest.mark.parametrize("run", COMPARED)
def test_every_rank_stops_at_one_changed_bit_of_another_and_names_the_tensor(facts: Facts, run: str) -> None:
    holders = "ranks 2, 3" if "odd=3" in run else "ranks 0, 1"
    for messages in facts[run].values():
        stops = {fault: text for fault, text in messages.items() if ", " in fault and text}
        assert {fault.split(", ")[0] for fault in stops} == COMPARED[run]
        for fault, text in stops.items():
            kind = fault.split(", ")[0]
            assert holders in text.splitlines()[0]
            assert kind in text.splitlines()[0]
            assert f"{kind}, bit" in stops
            assert f"{kind}, tenth" in stops


@pytest.mark.parametrize("run", [run for run in COMPARED if "megatron" in run])
def test_no_step_is_made_on_gradients_whose_norms_differ(facts: Facts, run: str) -> None:
    for messages in facts[run].values():
        assert "gradients of different norms" in messages["norms"]
        assert "rank 1" in messages["norms"]
        assert messages["moved"] == ""
