"""Kimi-K2.5 as it is released: the text is a DeepSeek-V3 whose experts are 4-bit integers, beside a vision encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.published import make_published
from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_form import ChangeLoss, ExportForm
from moe_trm.models import int4_groups
from moe_trm.models.hf_config import read_full_config, read_hf_config
from moe_trm.models.quantisation import quantisation_of
from moe_trm.models.registry import family_of
from moe_trm.models.tensors import tensor_names
from moe_trm.rollout.sglang.start_folder import folder_to_serve
from tests.published_models import published_config
from tests.unit.learner.test_family_checkpoints import backends, launch
from tests.unit.learner.test_published_checkpoints import exported, same_bits, stored

GROUP = 16
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
}
SCHEME = QuantizationScheme(targets=["Linear"], weights=WEIGHTS)
UP = "model.layers.1.mlp.experts.3.up_proj.weight"
PARTS = tuple(f"language_model.{UP}{end}" for end in ("_packed", "_scale", "_shape"))


def compressed(weight: Tensor) -> dict[str, Tensor]:
    """As compressed-tensors writes a matrix, with its own scales."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
    return PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale.to(weight.dtype)}, SCHEME)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    published = {key: value for key, value in published_config("kimi_k2").items() if key != "quantization_config"}
    folder = make_published(published, tmp_path_factory.mktemp("kimi"))
    tensors = dict[str, Tensor]()
    for name, tensor in stored(folder).items():
        stem = f"language_model.{name.removesuffix('weight')}"
        parts = compressed(tensor) if ".mlp.experts." in name else {name.rpartition(".")[2]: tensor}
        tensors |= {f"{stem.removesuffix(end)}{end}": part.contiguous() for end, part in parts.items()}
    tensors |= {
        f"{name}.weight": torch.randn(4, 4) for name in ("vision_tower.patch_embed.proj", "mm_projector.proj.0")
    }
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    text = {**json.loads((folder / "config.json").read_text()), "quantization_config": INT4}
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"patch_size": 4},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def test_the_text_is_a_deepseek_v3_with_the_weights_of_compressed_tensors(release: Path) -> None:
    hf, checkpoint = read_hf_config(release), HfCheckpoint(release)
    assert checkpoint.names == tensor_names(family_of(hf, "config.json"), hf)
    assert {name.partition(".")[0] for name in checkpoint.vision} == {"vision_tower", "mm_projector"}
    files = stored(release)
    quantised = [name for name in checkpoint.names if len(checkpoint.parts(name)) == 3]
    assert len(quantised) == 3 * 3 * 16  # matrices, layers, experts
    for name in checkpoint.names:
        parts = {part.rpartition(".")[2]: files[part] for part in checkpoint.parts(name)}
        if name in quantised:
            parts = PackedQuantizationCompressor.decompress(parts, SCHEME)
            assert same_bits(checkpoint.read(name), parts["weight"]), name
        assert checkpoint.shape(name) == tuple(checkpoint.read(name).shape), name


@backends
def test_both_learners_start_from_it(release: Path, backend: str) -> None:
    launch(release, backend)


def test_the_rollout_gets_the_text(release: Path, tmp_path: Path) -> None:
    served = json.loads((folder_to_serve(release, tmp_path, "bfloat16") / "config.json").read_text())
    assert (served["architectures"], served["model_type"]) == (["DeepseekV3ForCausalLM"], "deepseek_v3")
    assert "quantization_config" not in served


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unchanged_weights_are_written_back_bit_for_bit(release: Path, tmp_path: Path, dtype: str) -> None:
    before, after = stored(release), stored(exported(release, tmp_path / "out", dtype, published=True))
    assert before.keys() == after.keys()
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    assert read_full_config(tmp_path / "out") == read_full_config(release)


def test_a_trained_expert_changes_its_own_groups_alone(release: Path, tmp_path: Path) -> None:
    start = HfCheckpoint(release).read(UP).float()
    trained = start.clone()
    trained[2, :GROUP] *= 3  # another scale holds it to half a step
    out = exported(release, tmp_path / "out", "float32", published=True, **{UP: trained})
    before, after = stored(release), stored(out)
    assert {name for name in before if not same_bits(before[name], after[name])} == {*PARTS[:2]}
    written = HfCheckpoint(out).read(UP).float()
    changed = written != start
    assert changed[2, :GROUP].any()
    assert not changed[2, GROUP:].any()
    assert not changed[[row for row in range(len(start)) if row != 2]].any()
    torch.testing.assert_close(written, trained, rtol=0, atol=float(trained[2, :GROUP].abs().max()) / 14)


def test_a_plain_export_is_not_quantised(release: Path, tmp_path: Path) -> None:
    out = exported(release, tmp_path / "out", "bfloat16", published=False)
    assert "quantization_config" not in read_full_config(out)["text_config"]
    written = HfCheckpoint(out)
    assert f"language_model.{UP}" in stored(out)
    for name in written.names:
        assert torch.equal(written.read(name), HfCheckpoint(release).read(name)), name


def test_the_loss_of_the_form_is_counted(release: Path) -> None:
    loss = ChangeLoss()
    start = HfCheckpoint(release).read(UP).float()
    ExportForm(HfCheckpoint(release), "float32", published=True, loss=loss).stored(UP, start * 1.001)
    assert loss.tensors == 1
    assert loss.share > 0.1


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_numbers_and_scales_are_those_of_compressed_tensors(seed: int, dtype: torch.dtype) -> None:
    weight = torch.randn(3, 2 * GROUP, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight[1] = 0
    expected = compressed(weight)
    packed, scale = int4_groups.quantize(weight, GROUP, dtype)
    living = [0, 2]  # a row of zeros has any scale
    assert torch.equal(scale[living], expected["weight_scale"][living])
    back = int4_groups.dequantize(packed, scale, torch.float32)
    assert not back[1].any()
    unpacked = PackedQuantizationCompressor.decompress(expected, SCHEME)["weight"].float()
    step = scale.float().repeat_interleave(GROUP, 1)
    # Ties may go to either neighbour, and bfloat16 rounds products and scales.
    assert bool(((back - unpacked).abs() <= 1.05 * step)[living].all())
    assert bool(((back - weight.float()).abs() <= 0.56 * step).all())


@pytest.mark.parametrize(
    "change",
    [
        {"format": "float-quantized"},
        {"kv_cache_scheme": {"num_bits": 8}},
        {"config_groups": {"group_0": {"weights": {**WEIGHTS, "symmetric": False}}}},
        {"config_groups": {"group_0": {"weights": {**WEIGHTS, "num_bits": 8}}}},
        {"config_groups": {"group_0": {"weights": {**WEIGHTS, "actorder": "group"}}}},
        {"config_groups": {"group_0": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}},
        {"config_groups": {"group_0": {"weights": WEIGHTS}, "group_1": {"weights": WEIGHTS}}},
    ],
)
def test_other_forms_of_compressed_tensors_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quantised in a form that is not read here"):
        quantisation_of({"quantization_config": {**INT4, **change}}, "config.json")


@pytest.mark.parametrize("part", ["weight", "scale", "shape"])
def test_parts_that_do_not_fit_are_refused(release: Path, part: str) -> None:
    checkpoint = HfCheckpoint(release)
    parts = dict(zip(("weight", "scale", "shape"), (stored(release)[name] for name in PARTS), strict=True))
    parts[part] = parts[part][..., :-1] if part != "shape" else parts[part].flip(0)
    with pytest.raises(CheckpointError, match="do not fit together"):
        checkpoint.plain(UP, list(parts.values()))
