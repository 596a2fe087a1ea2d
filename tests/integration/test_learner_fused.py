"""Transformer Engine's parameters in conversion, replay, gradients and checkpoints, against Megatron's plain layers.

Transformer Engine itself needs CUDA: tests/gpu. Here its layout is real (Megatron-Core's own specification builds it),
its arithmetic is torch's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.learner_support.families import make_family
from tests.integration.learner_support.ranks import Ranks, run_ranks
from tests.integration.learner_support.tiny import EXPERTS, load_reference, make_checkpoint
from tests.integration.learner_support.work import NUM_BATCHES, global_batch
from tests.integration.test_learner_conformance import masked

GLM = "glm4_moe_lite"
"""The norms in its latent attention have an epsilon of their own."""
PLAIN, PLAIN_GLM = "expert=2", f"expert=2:model={GLM}"
FUSED, FUSED_GLM = "expert=2:layers=fused:from=expert=2", f"expert=2:layers=fused:model={GLM}"
PAIRS = [(FUSED, PLAIN), (FUSED_GLM, PLAIN_GLM)]
SCRIPT = Path(__file__).parent / "learner_support" / "fused.py"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("fused")
    make_family(GLM, folder / GLM, rms_norm_eps=1e-3)
    checkpoint = make_checkpoint(folder / "main")
    run_ranks(folder, checkpoint, 2, PLAIN, PLAIN_GLM, script=SCRIPT)
    return run_ranks(folder, checkpoint, 2, FUSED, FUSED_GLM, script=SCRIPT)


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_layout_is_transformer_engines(finished: Ranks) -> None:
    """A guard against testing plain layers twice."""
    names = set(finished.saved(FUSED, "parameters"))
    layer = "decoder.layers.0."
    assert layer + "self_attention.linear_qkv.layer_norm_weight" in names
    assert layer + "pre_mlp_layernorm.weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names  # a dense layer
    assert {f"{layer}mlp.experts.linear_fc1.weight{n}" for n in range(EXPERTS // 2)} <= names
    assert not any("local_experts" in name or "input_layernorm" in name for name in names)
    assert "decoder.layers.0.input_layernorm.weight" in finished.saved(PLAIN, "parameters")


@pytest.mark.parametrize(("fused", "plain"), PAIRS)
def test_weights_come_in_and_go_out_bit_for_bit(finished: Ranks, fused: str, plain: str) -> None:
    source = finished.folder / (GLM if GLM in fused else "main") / "model.safetensors"
    assert same_bits(finished.exported(fused, "before"), load_file(source))


@pytest.mark.parametrize("run", [PLAIN_GLM, FUSED_GLM])
def test_norms_of_latents_are_those_of_transformers(finished: Ranks, run: str) -> None:
    """1e-6 is their epsilon, whatever `rms_norm_eps` is."""
    model = load_reference(finished.folder / GLM).double()
    model.set_experts_implementation("eager")
    native = [(name, got) for r in range(2) for name, got in finished.saved(run, "scores", r).items() if "nat" in name]
    assert len(native) == NUM_BATCHES
    for name, got in native:
        with torch.no_grad():
            expected = masked(model, global_batch(int(name.rpartition(".")[2])))[0]
        torch.testing.assert_close(got.double(), expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize(("fused", "plain"), PAIRS)
def test_scores_and_gradients_are_those_of_plain_layers(finished: Ranks, fused: str, plain: str) -> None:
    for rank in range(2):
        expected = finished.saved(plain, "scores", rank)
        for name, values in finished.saved(fused, "scores", rank).items():
            torch.testing.assert_close(values, expected[name], atol=1e-5, rtol=0)
        facts = finished.saved(fused, "facts", rank)
        assert facts["applied"] == 1.0
        assert facts["columns"] % 16 == 0
        assert finished.saved(plain, "facts", rank)["columns"] % 16 != 0
        assert float(facts["norm"]) == pytest.approx(float(finished.saved(plain, "facts", rank)["norm"]), rel=1e-5)
    before = finished.exported(plain, "before")
    got, expected = finished.exported(fused, "after"), finished.exported(plain, "after")
    for name, start in before.items():
        error, size = (got[name] - expected[name]).norm(), (expected[name] - start).norm()
        assert float(error) <= 1e-4 * float(size) + 1e-7, name


def test_a_checkpoint_of_plain_layers_goes_on_with_fused_ones(finished: Ranks) -> None:
    """A run may begin on a CPU, or without Transformer Engine, and go on with it."""
    assert same_bits(finished.exported(FUSED, "restored"), finished.exported(PLAIN, "after"))


@pytest.mark.slow
def test_packs_and_shared_matrices_score_and_train_as_plain_layers_do(tmp_path: Path) -> None:
    plain = "tensor=2:expert=2:layout=packed"
    fused, checkpoint = f"{plain}:layers=fused", make_checkpoint(tmp_path / "main")
    run_ranks(tmp_path, checkpoint, 2, plain, script=SCRIPT)
    done = run_ranks(tmp_path, checkpoint, 2, fused, script=SCRIPT)
    before, got, expected = (done.exported(*each) for each in ((plain, "before"), (fused, "after"), (plain, "after")))
    for rank in range(2):
        scores = done.saved(plain, "scores", rank)
        for name, values in done.saved(fused, "scores", rank).items():
            torch.testing.assert_close(values, scores[name], atol=1e-5, rtol=0)
    for name, start in before.items():
        error, size = (got[name] - expected[name]).norm(), (expected[name] - start).norm()
        assert float(error) <= 1e-4 * float(size) + 1e-7, name
