"""Parameters that ZeRO-3 reads one after the other: those that transformers loads, in a model without values before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.published import make_published
from moe_trm.errors import CheckpointError
from moe_trm.learner.deepspeed.partitioned import check_shapes, read_into
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.registry import MOE_FAMILIES
from moe_trm.models.tiny.families import make_family
from tests.published_models import published_config


def read_one_by_one(checkpoint: HfCheckpoint, dtype: str) -> Any:
    """The model whose parameters hold nothing until each is read."""
    causal = load_policy(checkpoint, dtype, recompute=False, empty=True).causal
    assert all(one.untyped_storage().nbytes() == one.element_size() for one in causal.parameters())
    check_shapes(causal, checkpoint)
    for name, parameter in causal.named_parameters():
        parameter.data = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
        read_into(parameter.data, causal, name, checkpoint)
    return causal


def tensors(causal: Any) -> dict[str, Tensor]:
    return dict(causal.named_parameters()) | dict(causal.named_buffers())


def assert_same_model(checkpoint: HfCheckpoint, dtype: str) -> None:
    found, requested = read_one_by_one(checkpoint, dtype), load_policy(checkpoint, dtype, recompute=False).causal
    assert tensors(found).keys() == tensors(requested).keys()
    for name, tensor in tensors(requested).items():
        assert tensors(found)[name].dtype == tensor.dtype, name
        assert torch.equal(tensors(found)[name], tensor), name
    assert found.training == requested.training


@pytest.mark.parametrize("name", MOE_FAMILIES)
def test_every_family_is_read_as_transformers_loads_it(tmp_path: Path, name: str) -> None:
    checkpoint = HfCheckpoint(make_family(name, tmp_path / "start", num_hidden_layers=2))
    assert_same_model(checkpoint, "bfloat16")


@pytest.mark.parametrize(
    "release", ["deepseek_v3", "qwen3_5_35b_a3b", pytest.param("gpt_oss_20b", marks=pytest.mark.slow)]
)
def test_published_forms_are_read_too(tmp_path: Path, release: str) -> None:
    assert_same_model(HfCheckpoint(make_published(published_config(release), tmp_path / "start")), "float32")


def test_tied_weights_stay_one_parameter(tmp_path: Path) -> None:
    checkpoint = HfCheckpoint(make_family("qwen3_moe", tmp_path / "start", tie_word_embeddings=True))
    causal = read_one_by_one(checkpoint, "float32")
    assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight


def test_tensors_of_another_shape_are_refused_before_any_is_read(tmp_path: Path) -> None:
    start = make_family("qwen3_moe", tmp_path / "start", num_hidden_layers=1)
    hf = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**hf, "moe_intermediate_size": hf["moe_intermediate_size"] // 2}))
    checkpoint = HfCheckpoint(start)
    causal = load_policy(checkpoint, "float32", recompute=False, empty=True).causal
    with pytest.raises(CheckpointError, match=r"mismatched tensors[\s\S]*experts\.0\."):
        check_shapes(causal, checkpoint)
