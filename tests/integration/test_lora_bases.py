"""Adapters on bases that are published in FP8 and MXFP4: the run of the plain weights that these mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name
from tests.integration.learner_support.adapted_runs import Finished, Run, make_adapter, modules
from tests.integration.learner_support.adapters_by_hand import (
    assert_adapters_by_hand,
    assert_nothing_but_factors_trains,
    assert_replay_and_resume,
    expected,
)
from tests.integration.learner_support.lora import ALPHA, RANK
from tests.integration.learner_support.quantised import FORMS, low, make_quantised, plain

TARGETS = {"fp8": "attention+experts+router", "mxfp4": "attention+router"}
"""The experts of gpt-oss, whose matrices are one tensor, have no adapters."""


def of(form: str, *options: str) -> str:
    return ":".join([f"model={form}", f"targets={TARGETS[form]}", f"start={form}-adapter", "published=1", *options])


FAST = (1, of("fp8", "backend=megatron"))
ALONE = [
    of("mxfp4", "backend=megatron"),
    of("mxfp4", "backend=megatron", "layout=packed", "recompute=full"),
    *(of(form, "backend=deepspeed") for form in FORMS),
    of("fp8", "backend=deepspeed", "layout=packed", "stage=3"),
]
TWO = [
    of("fp8", "backend=megatron", "expert=2", "liars=1"),
    of("fp8", "backend=megatron", "tensor=2", "expert=2", "layout=packed"),
    of("fp8", "backend=megatron", "pipeline=2", "first_stage_layers=2"),
    of("mxfp4", "backend=megatron", "expert=2"),
    of("mxfp4", "backend=megatron", "pipeline=2", "last_stage_layers=2"),
    *(of(form, "backend=deepspeed", "stage=3") for form in FORMS),
]
GROUPS = ((1, [FAST[1]]), (1, ALONE), (2, TWO))
"""Runs that share their processes."""
CASES = [
    pytest.param(*FAST, id=FAST[1]),
    *(pytest.param(1, run, id=run, marks=pytest.mark.slow) for run in ALONE),
    *(pytest.param(2, run, id=f"2-{run}", marks=pytest.mark.slow) for run in TWO),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in each form, and an adapter beside it whose B is not zero."""
    folder = tmp_path_factory.mktemp("bases")
    for form in FORMS:
        start = make_quantised(form, folder / form)
        make_adapter(start, of(form), folder / f"{form}-adapter")
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("runs"), folder / "fp8", GROUPS)


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_a_run_is_that_of_the_weights_that_the_published_ones_mean(
    finished: Finished, num_ranks: int, name: str
) -> None:
    run = finished[num_ranks, name]
    assert_adapters_by_hand(run, expected(run, plain(run.start)))
    assert_nothing_but_factors_trains(run)
    assert_replay_and_resume(run)


def merged(run: Run) -> dict[str, Tensor]:
    """Every tensor as passes have it after the first step, with adapters by hand."""
    found, factors = load_file(plain(run.start) / "model.safetensors"), run.factors("stepped")
    for module in modules(run.start, run.name):
        a, b = (factors[factor_name(module, factor)].double() for factor in (A, B))
        found[f"{module}.weight"] = (found[f"{module}.weight"].double() + ALPHA / RANK * (b @ a)).float()
    return found


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_the_published_form_has_the_base_bit_for_bit_and_merged_matrices_rounded_anew(
    finished: Finished, num_ranks: int, name: str
) -> None:
    run = finished[num_ranks, name]
    given = load_file(run.start / "model.safetensors")
    written = run.ranks.exported(name, "published")
    adapted, read = modules(run.start, name), HfCheckpoint(run.ranks.folder / name / "published")
    assert given.keys() == written.keys()
    after, start = run.ranks.exported(name, "after"), load_file(plain(run.start) / "model.safetensors")
    for tensor, requested in merged(run).items():
        torch.testing.assert_close(after[tensor], requested, rtol=1e-6, atol=1e-6)
        if tensor.removesuffix(".weight") not in adapted:
            for part in read.parts(tensor):
                assert given[part].dtype == written[part].dtype, part
                assert torch.equal(given[part].view(torch.uint8), written[part].view(torch.uint8)), part
        elif len(read.parts(tensor)) == 1:
            torch.testing.assert_close(written[tensor], low(tensor, requested), rtol=2**-7, atol=1e-6)
        else:
            # 3 bits behind the point; and rounding takes no matrix further from what was trained than its start is.
            off = float((read.read(tensor).float() - requested).norm())
            assert off <= 0.05 * float(requested.norm()), tensor
            assert off <= 1.01 * float((start[tensor] - requested).norm()), tensor
