"""Transformer Engine, 8-bit recipes, float16 and quantised rollouts on a GPU, with what they have to say.

Bounds. Two ways of computing in bfloat16 are rounding apart: k3 below 3e-3, the doctor's bound between rounding and
other weights. 8-bit products (3 bits of mantissa, against 7) are noisier: mean |difference| of log-probs below 0.25
nats on this random model, and the step points where bfloat16's points. The same arithmetic on the same tokens gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch.job import run_job
from moe_trm.learner.megatron.layers import transformer_engine_problem
from moe_trm.models.tiny.checkpoint import TinyShape
from moe_trm.tools.quickstart.warmup import warm_up
from tests.gpu.one_rank import Trial, k3, one_rank, relative
from tests.integration.jobs import BRIEF, STEPS, metrics_of, write_config
from tests.integration.learner_support.tiny import EXPERTS, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_transformer_engine = pytest.mark.skipif(
    not (torch.cuda.is_available() and not transformer_engine_problem()), reason="needs a working Transformer Engine"
)
ROUNDING = 3e-3
CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Compute capability that each recipe needs."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("precision") / "main")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


@needs_transformer_engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformer_engines_parameters_carry_the_checkpoint(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    trial = Trial(checkpoint, tmp_path, te="on", dtype=dtype)
    chunk: Any = trial.learner._chunks[0]  # type: ignore[attr-defined]
    names = {name for name, _ in chunk.named_parameters()}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert {f"decoder.layers.0.mlp.experts.linear_fc1.weight{n}" for n in range(EXPERTS)} <= names
    exact = load_file(checkpoint / "model.safetensors")
    assert trial.start.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(trial.start[name], tensor.to(getattr(torch, dtype)).float()), name


@needs_transformer_engine
def test_grouped_products_and_plain_layers_are_rounding_apart(checkpoint: Path, tmp_path: Path) -> None:
    fused, plain = (Trial(checkpoint, tmp_path / te, te=te, dtype="bfloat16") for te in ("on", "off"))
    assert k3(fused.replayed - plain.replayed) < ROUNDING
    for trial in (fused, plain):
        _, seen = trial.update()
        assert torch.equal(seen, trial.replayed)
        assert trial.learner.replay_report().applied_fraction == 1.0
    assert relative(fused.moved(), plain.moved()) < 0.1


@needs_transformer_engine
@pytest.mark.parametrize("recipe", CAPABILITY)
def test_8_bit_products(checkpoint: Path, tmp_path: Path, recipe: str) -> None:
    if torch.cuda.get_device_capability() < CAPABILITY[recipe]:
        pytest.skip(f"{recipe} needs compute capability {CAPABILITY[recipe]}")
    exact = Trial(checkpoint, tmp_path / "bfloat16", te="on", dtype="bfloat16")
    eight = Trial(checkpoint, tmp_path / recipe, te="on", dtype="bfloat16", fp8=recipe)
    difference = (eight.replayed - exact.replayed).abs()
    assert 0 < float(difference.mean()) < 0.25
    result, seen = eight.update()
    assert result.applied
    assert eight.learner.replay_report().applied_fraction == 1.0
    if recipe != "delayed":
        # Scales come from present tensors alone.
        assert torch.equal(seen, eight.replayed)
    exact.update()
    one, other = eight.moved(), exact.moved()
    assert float(one @ other / (one.norm() * other.norm())) > 0.9


@pytest.mark.parametrize("learner", [{"backend": "megatron"}, {"backend": "deepspeed", "stage": "2"}])
def test_float16_skips_overflow_and_steps_as_float32(checkpoint: Path, tmp_path: Path, learner: dict[str, str]) -> None:
    start = 2**20
    trial = Trial(checkpoint, tmp_path / "float16", dtype="float16", scale=str(start), **learner)
    results = [trial.update()[0]]
    assert not results[0].applied
    assert not trial.moved().any()
    while not results[-1].applied and len(results) < 20:
        results.append(trial.update()[0])
    assert [result.loss_scale for result in results] == [start // 2**i for i in range(len(results))]
    assert results[-1].applied
    exact = Trial(checkpoint, tmp_path / "float32", dtype="float32", te="off", **learner)
    exact.update()
    assert relative(trial.moved(), exact.moved()) < 0.02


def test_a_quantised_rollout_is_measured_and_not_called_a_fault(tmp_path: Path) -> None:
    """SGLang rounds the pushed weights to fp8: replayed routes are proved, and the engine part exceeds bfloat16's."""
    warm_up(tmp_path / "checkpoint", recipe=BRIEF, shape=TinyShape(head_dim=64))
    config = write_config(tmp_path, tmp_path / "checkpoint")
    common = ["learner.parallel.expert=1", "rollout.server.device=cuda", "train.steps=2"]
    common += ["rollout.server.extra_args=[--mem-fraction-static, '0.3']"]
    assert run_job(str(config), [*common, "name=plain"]) == 0
    assert run_job(str(config), [*common, "name=rounded", "rollout.quantization=fp8", "sync.verify=false"]) == 0
    plain, rounded = (metrics_of(tmp_path / "runs" / name)[1 : STEPS + 1] for name in ("plain", "rounded"))
    for row in rounded:
        assert row["replay/applied_fraction"] == 1.0
        assert row["routing/local_flip_rate"] < 0.3
        assert "align precision" not in str(row["verdict"])
    assert sum(row["engine/k3_kl"] for row in rounded) > 2 * sum(row["engine/k3_kl"] for row in plain)
