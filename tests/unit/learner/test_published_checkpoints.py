"""Checkpoints as they are published: FP8, MXFP4, layers that predict several tokens; read, kept, written back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.published import make_published
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_export import write_companions, write_files, write_index
from moe_trm.learner.hf_form import ExportForm
from moe_trm.models import fp8_blocks, mxfp4
from moe_trm.models.hf_config import library_config, read_hf_config
from moe_trm.models.quantisation import Quantisation, quantisation_of
from moe_trm.models.tiny.families import make_family
from moe_trm.rollout.sglang.start_folder import folder_to_serve
from moe_trm.sync.rounding import Rounding
from tests.published_models import published_config
from tests.unit.learner.test_family_checkpoints import backends, launch

KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
STACKED = "model.layers.2.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_published(published_config("deepseek_v3"), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_published(published_config("gpt_oss_20b"), tmp_path_factory.mktemp("gpt_oss"))


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def naive_fp8(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    """`weight_dequant` of DeepSeek's inference code, weight by weight."""
    found = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            found[row, column] = weight[row, column].float() * scale[row // block, column // block]
    return found


def test_fp8_is_read_as_transformers_dequantises_it(deepseek: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    files, checkpoint = stored(deepseek), HfCheckpoint(deepseek)
    scaled = [name for name in checkpoint.names if name + "_scale_inv" in files]
    assert len(scaled) > 100
    whole = [name for name in scaled if not any(size % 16 for size in files[name].shape)]
    for name in whole:
        weight, scale = files[name], files[name + "_scale_inv"]
        expected = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
        assert weight.dtype == torch.float8_e4m3fn
        assert same_bits(checkpoint.read(name), expected), name
    assert set(scaled) - set(whole) == {name for name in scaled if "kv_a_proj" in name}


def test_blocks_at_the_end_may_be_smaller(deepseek: Path) -> None:
    """transformers refuses 2.5 blocks of rows."""
    files = stored(deepseek)
    assert files[KV_A].shape == (40, 64)
    assert files[KV_A + "_scale_inv"].shape == (3, 4)
    expected = naive_fp8(files[KV_A], files[KV_A + "_scale_inv"], 16)
    assert same_bits(HfCheckpoint(deepseek).read(KV_A), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_scales_in_every_dtype_that_is_published(dtype: torch.dtype) -> None:
    """Qwen3-FP8 has bfloat16 ones, others exponents."""
    weight, powers = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)), dtype != torch.bfloat16
    values, scales = fp8_blocks.quantize(weight, (4, 4), dtype, powers=powers)
    assert scales.dtype == dtype
    back = fp8_blocks.dequantize(values, scales, (4, 4), torch.float32)
    assert float((back - weight).abs().max() / weight.abs().max()) < 2**-4


def test_mxfp4_is_read_as_transformers_dequantises_it(gpt_oss: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    files, checkpoint = stored(gpt_oss), HfCheckpoint(gpt_oss)
    names = [name.removesuffix("_blocks") for name in files if name.endswith("_blocks")]
    assert len(names) == 8
    for name in names:
        expected = convert_moe_packed_tensors(files[name + "_blocks"], files[name + "_scales"])
        assert same_bits(checkpoint.read(name), expected), name
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert same_bits(checkpoint.read_row(name, 5, 16), expected[5])
    assert files["model.layers.0.mlp.router.weight"].dtype == torch.bfloat16


def test_every_exponent_and_every_number_of_mxfp4() -> None:
    """Also 2^-127, which is no normal number, and the largest."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 254, 1, 1)
    scales = torch.arange(254, dtype=torch.uint8).reshape(1, 254, 1).repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales)
    assert same_bits(mxfp4.dequantize(blocks, scales, torch.bfloat16), expected)


def test_prediction_layers_are_no_part_of_the_model(deepseek: Path) -> None:
    checkpoint = HfCheckpoint(deepseek)
    assert {name.split(".")[2] for name in checkpoint.prediction} == {"4"}
    assert "model.layers.4.eh_proj.weight" in checkpoint.prediction
    assert not any(name.startswith("model.layers.4.") for name in checkpoint.names)


@backends
@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_published_forms_are_accepted_at_launch(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, backend: str
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(name), tmp_path / "model"))
    launch(folder, backend)
    with pytest.raises(ConfigError, match="engine that rounds the weights"):
        launch(folder, backend, "rollout.quantization=fp8", "rollout.server.device=cuda", "sync.verify=false")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_method": "gptq"}, "form that is not read here"),
        ({"quant_method": "awq"}, "quant_method=awq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"activation_scheme": "static"}, "activation_scheme=static"),
        ({"fmt": "e5m2"}, "fmt=e5m2"),
    ],
)
def test_other_quantisations_are_refused_with_the_reason(
    deepseek: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder = changed_config(deepseek, tmp_path, change)
    with pytest.raises(CheckpointError, match=reason) as caught:
        launch(folder, "megatron")
    assert caught.value.fix is not None
    assert "bfloat16" in caught.value.fix


def changed_config(source: Path, folder: Path, change: dict[str, Any]) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    hf = read_hf_config(folder)
    hf["quantization_config"] = {**hf["quantization_config"], **change}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def test_scales_of_other_blocks_are_refused(deepseek: Path, tmp_path: Path) -> None:
    folder = changed_config(deepseek, tmp_path, {"weight_block_size": [16, 32]})
    with pytest.raises(CheckpointError, match=r"do not fit together[\s\S]*\[3, 4\]"):
        HfCheckpoint(folder).read(KV_A)


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2"])
def test_published_names_of_the_number_format_are_known(name: str) -> None:
    """DeepSeek's config.json says `e4m3`, MiniMax's `float8_e4m3fn`."""
    assert quantisation_of(published_config(name), name) == Quantisation("fp8", (128, 128))


def test_an_8_bit_weight_without_scales_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="8-bit weight without scales"):
        HfCheckpoint(tmp_path).read("a.weight")


def exported(source: Path, folder: Path, dtype: str, *, published: bool, **change: Tensor) -> Path:
    """The folder that `ExportForm` makes of weights that a learner in `dtype` has, `change` among them."""
    checkpoint = HfCheckpoint(source)
    form = ExportForm(checkpoint, dtype, published)
    folder.mkdir()
    held = Rounding(dtype)
    weights = {name: checkpoint.read(name).to(getattr(torch, held.dtype_of(name))) for name in checkpoint.names}
    weights |= change
    made = [*form.written(weights.items()), *form.kept()]
    write_index(folder, write_files(folder, "model", made, file_bytes=1 << 16))
    write_companions(folder, source, form.config())
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_the_published_form_of_unchanged_weights_has_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, dtype: str
) -> None:
    source = request.getfixturevalue(name)
    before, after = stored(source), stored(exported(source, tmp_path / "out", dtype, published=True))
    assert before.keys() == after.keys()
    assert [key for key in before if not same_bits(before[key], after[key])] == []
    assert read_hf_config(tmp_path / "out") == read_hf_config(source)


def test_only_the_block_that_changed_gets_another_scale(deepseek: Path, tmp_path: Path) -> None:
    weight = HfCheckpoint(deepseek).read(EXPERT).float()
    weight[17, 5] = 100.0
    after = stored(exported(deepseek, tmp_path / "out", "float32", published=True, **{EXPERT: weight}))
    before = stored(deepseek)
    scales = after[EXPERT + "_scale_inv"] != before[EXPERT + "_scale_inv"]
    assert scales.nonzero().tolist() == [[1, 0]]
    assert float(after[EXPERT + "_scale_inv"][1, 0]) == pytest.approx(100.0 / 448, rel=1e-6)
    back = HfCheckpoint(tmp_path / "out").read(EXPERT).float()
    assert float(back[17, 5]) == 100.0
    kept = torch.ones_like(weight, dtype=torch.bool)
    kept[16:32, :16] = False
    assert torch.equal(back[kept], weight[kept])
    assert float((back - weight).abs().max()) <= 100.0 / 448 / 2


def test_only_the_group_that_changed_gets_another_exponent(gpt_oss: Path, tmp_path: Path) -> None:
    weight = HfCheckpoint(gpt_oss).read(STACKED)
    weight[3, 40, 7] = 24.0
    after = stored(exported(gpt_oss, tmp_path / "out", "bfloat16", published=True, **{STACKED: weight}))
    scales = after[STACKED + "_scales"] != stored(gpt_oss)[STACKED + "_scales"]
    assert scales.nonzero().tolist() == [[3, 7, 1]]
    assert int(after[STACKED + "_scales"][3, 7, 1]) == 127 + 2
    back = HfCheckpoint(tmp_path / "out").read(STACKED)
    assert float(back[3, 40, 7]) == 24.0
    kept = torch.ones_like(weight, dtype=torch.bool)
    kept[3, 32:64, 7] = False
    assert torch.equal(back[kept], weight[kept])


@pytest.mark.parametrize("step", [1e-4, 1e-2, 0.3, 3.0])
@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_no_block_is_further_from_the_trained_weights_than_its_start(
    request: pytest.FixtureRequest, step: float, name: str
) -> None:
    """A new scale is taken only where it is nearer: it rounds weights anew that a small step left where they were."""
    checkpoint = HfCheckpoint(request.getfixturevalue(name))
    tensor = EXPERT if name == "deepseek" else STACKED
    values, scales = (checkpoint.read_stored(part) for part in checkpoint.parts(tensor))
    before = checkpoint.read(tensor).float()
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    after = before * (1 + step * noise)
    if name == "deepseek":
        made = fp8_blocks.requantize(after, before, (values, scales), (16, 16), torch.bfloat16)
        fresh = fp8_blocks.quantize(after, (16, 16), torch.float32)
        written, anew = (fp8_blocks.dequantize(*one, (16, 16), torch.bfloat16).float() for one in (made, fresh))
    else:
        made, fresh = mxfp4.requantize(after, before, (values, scales)), mxfp4.quantize(after)
        written, anew = (mxfp4.dequantize(*one, torch.float32) for one in (made, fresh))
    assert torch.isfinite(written).all()

    def off(found: Tensor) -> Tensor:
        """Squared distance of each block of FP8, or group of MXFP4."""
        squares = (found - after).square()
        if name == "deepseek":
            return squares.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).sum((1, 3))
        return squares.unflatten(1, (-1, 32)).sum(2)

    assert bool((off(written) <= off(before) * 1.01).all())
    assert bool((off(written) <= off(anew) * (1 + 1e-6)).all())
    if step == 1e-4:
        # The largest of a group of MXFP4 is 6, and a little more needs the next exponent.
        share = 0.3 if name == "gpt_oss" else 0.9
        assert float(off(written).sum()) < share * float(off(anew).sum())


def test_a_block_whose_scale_is_zero_gets_one() -> None:
    """As some releases have blocks of zeros."""
    old, scale = torch.zeros(4, 4), torch.zeros(1, 1)
    new = torch.eye(4)
    values, scales = fp8_blocks.requantize(new, old, (old.to(torch.float8_e4m3fn), scale), (4, 4), torch.bfloat16)
    assert torch.equal(fp8_blocks.dequantize(values, scales, (4, 4), torch.float32), new)


def test_numbers_go_to_the_nearest_of_mxfp4() -> None:
    """The even one of two."""
    inputs = torch.linspace(-6.0, 6.0, 385).tolist()[:384]
    weight = torch.tensor(inputs).reshape(12, 32).mT.contiguous()
    weight[0] = 6.0  # so that every group has the exponent 0
    blocks, scales = mxfp4.quantize(weight)
    assert scales.unique().tolist() == [127]
    back = mxfp4.dequantize(blocks, scales, torch.float32)
    grid = torch.tensor(mxfp4.VALUES)
    for value, found in zip(weight.flatten().tolist(), back.flatten().tolist(), strict=True):
        distance = (grid - value).abs()
        nearest = grid[distance == distance.min()].abs().tolist()
        even = [one for one in nearest if mxfp4.VALUES.index(one) % 2 == 0] if len(set(nearest)) > 1 else nearest
        assert abs(found) in even, value


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_a_plain_export_says_so_and_keeps_prediction_layers_dequantised(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    source = request.getfixturevalue(name)
    out = exported(source, tmp_path / "out", "bfloat16", published=False)
    hf, checkpoint, before = read_hf_config(out), HfCheckpoint(out), HfCheckpoint(source)
    assert "quantization_config" not in hf
    assert hf["dtype"] == "bfloat16"
    assert hf.get("num_nextn_predict_layers") == read_hf_config(source).get("num_nextn_predict_layers")
    assert (checkpoint.names, checkpoint.prediction) == (before.names, before.prediction)
    for tensor in checkpoint.names | checkpoint.prediction:
        assert torch.equal(checkpoint.read(tensor), before.read(tensor)), tensor


def test_a_config_without_prediction_tensors_announces_none(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"}))
    form = ExportForm(HfCheckpoint(tmp_path), "float32")
    assert form.config() == {"num_nextn_predict_layers": 0, "dtype": "float32"}


def test_a_server_starts_from_a_folder_without_weights(deepseek: Path, tmp_path: Path) -> None:
    served = folder_to_serve(deepseek, tmp_path, "bfloat16")
    assert not list(served.glob("*.safetensors*"))
    hf = read_hf_config(served)
    assert "quantization_config" not in hf
    assert hf["num_nextn_predict_layers"] == 0
    assert (served / "tokenizer.json").read_bytes() == (deepseek / "tokenizer.json").read_bytes()
    assert folder_to_serve(served, tmp_path / "other", "float32") == served


def test_a_hybrid_starts_from_a_config_of_the_servers_dtype(tmp_path: Path) -> None:
    """SGLang holds one norm in the dtype of config.json, and would round what is pushed."""
    hybrid = make_family("qwen3_next", tmp_path / "hybrid")
    assert folder_to_serve(hybrid, tmp_path, "float32") == hybrid
    served = folder_to_serve(hybrid, tmp_path, "bfloat16")
    assert not list(served.glob("*.safetensors*"))
    assert read_hf_config(served) == {**read_hf_config(hybrid), "dtype": "bfloat16"}


def test_a_text_with_sections_of_positions_is_served_without_them(tmp_path: Path) -> None:
    """SGLang has a table for them beside the weights, which would be in no push."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    start = make_family("qwen3_5_moe", tmp_path / "start", rope_parameters={**rope, **sections})
    hf = read_hf_config(folder_to_serve(start, tmp_path, "float32"))
    assert hf["rope_parameters"] == rope
    assert {**hf, "rope_parameters": {**rope, **sections}} == read_hf_config(start)


def test_kimi_k2_is_a_deepseek_v3_for_libraries() -> None:
    hf = library_config({**published_config("kimi_k2"), "auto_map": {"AutoConfig": "configuration_deepseek.X"}})
    assert hf["model_type"] == "deepseek_v3"
    assert "auto_map" not in hf


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_deepspeed_loads_the_same_weights(request: pytest.FixtureRequest, name: str) -> None:
    """transformers fuses the experts of a layer; its own dequantisation is not asked."""
    from moe_trm.learner.deepspeed.policy import load_policy
    from moe_trm.learner.deepspeed.weights import checkpoint_form

    checkpoint = HfCheckpoint(request.getfixturevalue(name))
    causal = load_policy(checkpoint, "float32", recompute=False).causal
    found = {
        hf_name: tensor
        for key, weight in causal.state_dict().items()
        for hf_name, tensor in checkpoint_form(causal, key, weight).items()
    }
    assert found.keys() == checkpoint.names
    for hf_name, tensor in found.items():
        assert torch.equal(tensor, checkpoint.read(hf_name).float()), hf_name


def test_prediction_layers_apart_from_the_layers_are_kept_too(tmp_path: Path) -> None:
    """As in Qwen3.5, whose config.json counts them under another key."""
    tensors = {"model.layers.0.mlp.gate.weight": torch.ones(2), "mtp.layers.0.mlp.gate.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    hf = {"num_hidden_layers": 1, "mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    checkpoint = HfCheckpoint(tmp_path)
    assert checkpoint.names == {"model.layers.0.mlp.gate.weight"}
    form = ExportForm(checkpoint, "float32")
    assert [name for name, _ in form.kept()] == ["mtp.layers.0.mlp.gate.weight"]
    assert form.config()["mtp_num_hidden_layers"] == 1
    assert library_config(hf)["mtp_num_hidden_layers"] == 0


def test_deepspeed_leaves_prediction_layers_of_plain_weights_alone(tmp_path: Path) -> None:
    """transformers names what it did not expect after fusing the experts."""
    from moe_trm.learner.deepspeed.policy import load_policy

    checkpoint = HfCheckpoint(make_published(published_config("glm_4_5_air"), tmp_path))
    assert any(".mlp.experts.0." in name for name in checkpoint.prediction)
    causal = load_policy(checkpoint, "float32", recompute=False).causal
    assert len(causal.base_model.layers) == 4
