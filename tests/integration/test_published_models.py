"""Published models as tiny checkpoints in their own form: loaded, served, trained with replay proved, written back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import models
from benchmarks.published import make_published
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.hf_config import text_config
from moe_trm.models.registry import family_of
from tests.integration.learner_support import ranks
from tests.integration.ranks import fork_ranks
from tests.published_models import NAMES, published_config

INDEX = "model.safetensors.index.json"
SCRIPT = Path(ranks.__file__).with_name("published.py")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_two_ranks_read_their_share_and_write_the_same_bits(tmp_path: Path) -> None:
    """FP8 with blocks that do not divide, experts on two ranks, a layer behind the last that nobody reads."""
    checkpoint = make_published(published_config("deepseek_v3"), tmp_path / "start")
    out = tmp_path / "out"
    done = fork_ranks([str(SCRIPT), str(checkpoint), str(out), "2"], 2)
    assert done.ok, done.stderr[-3000:]
    given, written = stored(checkpoint), stored(out / "published")
    assert given.keys() == written.keys()
    for name, tensor in given.items():
        assert tensor.dtype == written[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), written[name].view(torch.uint8)), name
    assert json.loads((out / "published" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    source = HfCheckpoint(checkpoint)
    largest = max(source.read(name).nbytes for name in source.names)
    for rank in range(2):
        facts = json.loads((out / f"facts-{rank}.json").read_text())
        assert facts["layers"] == [1, 2, 3]
        # A parameter is at most two tensors of the checkpoint, gate and up; the next is read before they are dropped.
        assert facts["most_bytes"] <= 4 * largest
        assert facts["read_bytes"] <= facts["own_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("release", ["deepseek_v3", "qwen3_5_35b_a3b"])
def test_zero_3_holds_one_whole_parameter_at_a_time(tmp_path: Path, release: str) -> None:
    """Of the first rank, which reads; the other gets its part of each from it."""
    checkpoint = make_published(published_config(release), tmp_path / "start")
    out = tmp_path / "out"
    done = fork_ranks([str(SCRIPT), str(checkpoint), str(out), "1", "deepspeed"], 2)
    assert done.ok, done.stderr[-3000:]
    given, written = stored(checkpoint), stored(out / "published")
    assert given.keys() == written.keys()
    assert all(torch.equal(tensor.view(torch.uint8), written[name].view(torch.uint8)) for name, tensor in given.items())
    first, second = (json.loads((out / f"facts-{rank}.json").read_text()) for rank in range(2))
    source = HfCheckpoint(checkpoint)
    largest = max(source.read(name).nbytes for name in source.names)
    assert first["beside_bytes"] == 0
    assert first["most_bytes"] <= 2 * largest < first["parameter_bytes"]
    assert second["read_bytes"] < 0.01 * first["read_bytes"]  # biases that choose experts
    whole = sum(source.read(name).nbytes for name in source.names)
    assert first["own_bytes"] == second["own_bytes"] <= 0.51 * whole


_NO_POSITIONS = "a server sends no positions that the indexer"
UNSERVED = {"moonlight_16b_a3b": "AssertionError", "deepseek_v3_2": _NO_POSITIONS, "glm_5": _NO_POSITIONS}
"""The reason. SGLang's rotary embedding for latent attention wants YaRN on a CPU. The learners convert them."""


def learners(name: str) -> tuple[str, ...]:
    """Those that do not refuse the family."""
    return (
        models.LEARNERS[1:] if family_of(text_config(published_config(name)), name).not_in_megatron else models.LEARNERS
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSERVED)
def test_a_published_model_that_the_engine_does_not_serve_is_converted(tmp_path: Path, name: str) -> None:
    found = models.examine_release(name, tmp_path)
    assert UNSERVED[name] in found["sglang"]["serve"]
    for learner in learners(name):
        assert found[learner]["convert"] == found[learner]["published form"] == "yes"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNSERVED])
def test_a_published_model_is_served_trained_and_written_back(tmp_path: Path, name: str) -> None:
    """Two steps on a real server, and learners on what it sampled: every cell of docs/models.md is `yes`."""
    found = models.examine_release(name, tmp_path)
    assert {check: found["sglang"][check] for check in models.CHECKS["sglang"]} == dict.fromkeys(
        models.CHECKS["sglang"], "yes"
    )
    for learner in learners(name):
        checks = models.CHECKS["release"]
        assert {check: found[learner].get(check) for check in checks} == dict.fromkeys(checks, "yes"), learner


@pytest.mark.slow
def test_a_release_with_images_is_trained_and_written_back_whole(tmp_path: Path) -> None:
    """A run on a real server, which is started on the text; what transformers loads again is text and images."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    start = make_published(published_config("qwen3_5_35b_a3b"), tmp_path / "start")
    settings = {
        **models.SETTINGS,
        "model": {"checkpoint": str(start)},
        "run_dir": str(tmp_path / "runs"),
        "learner": {**models.SETTINGS["learner"], "backend": "deepspeed"},
        "optimizer": {"lr": 0.001},
        "train": {"steps": 1, "export": True, "export_form": "published"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "moe_trm", "train", str(tmp_path / "config.yaml"), "--nproc-per-node=1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"started on the text of {start}" in done.stderr
    (out,) = (path.parent for path in (tmp_path / "runs").rglob("config.json") if (path.parent / INDEX).is_file())
    given, written = stored(start), stored(out)
    assert given.keys() == written.keys()
    same = {name for name, one in given.items() if torch.equal(one.view(torch.uint8), written[name].view(torch.uint8))}
    apart = {name for name in given if name.startswith(("model.visual.", "mtp."))}
    assert apart < same
    assert {"lm_head.weight", "model.language_model.layers.0.mlp.experts.gate_up_proj"}.isdisjoint(same)
    assert json.loads((out / "config.json").read_text()) == json.loads((start / "config.json").read_text())
    _, loaded = Qwen3_5MoeForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["mismatched_keys"]
