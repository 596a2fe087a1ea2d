"""Qwen3.5-MoE as it is released: its text is trained, and images, MTP layers and config.json are written back."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.published import make_published
from launch.start.checks import Check
from moe_trm.errors import CheckpointError
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_form import ExportForm
from moe_trm.models import fp8_blocks
from moe_trm.models.hf_config import read_full_config, read_hf_config, text_config
from moe_trm.models.registry import family_of
from moe_trm.models.tensors import tensor_names
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.start_folder import folder_to_serve
from moe_trm.tasks.tokens import Tokens
from moe_trm.tools.doctor.served import _geometry
from moe_trm.tools.export.checkpoint import export_checkpoint
from tests.published_models import published_config
from tests.unit.learner.test_family_checkpoints import launch
from tests.unit.learner.test_published_checkpoints import exported, same_bits, stored
from tests.unit.tools.export.test_saved_adapters import LORA, half_factors
from tests.unit.tools.export.test_saved_weights import save

RELEASE = "qwen3_5_35b_a3b"
TEXT = "model.language_model."
EXPERTS = "layers.1.mlp.experts"
LENGTHS = (5, 70, 3)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of a layer in two tensors, as published."""
    return make_published(published_config(RELEASE), tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def saved(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as transformers saves it: a tensor for each matrix, and no MTP layer."""
    folder = Path(shutil.copytree(release, tmp_path_factory.mktemp("saved"), dirs_exist_ok=True))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    tensors = {name: tensor for name, tensor in stored(release).items() if not name.startswith("mtp.")}
    for name in [name for name in tensors if ".experts." in name]:
        stem, kind = name.rsplit(".", 1)
        for expert, both in enumerate(tensors.pop(name)):
            parts = both.chunk(2) if kind == "gate_up_proj" else [both]
            for matrix, part in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                tensors[f"{stem}.{expert}.{matrix}_proj.weight"] = part.clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def fp8(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts in FP8; config.json says so outside of the text."""
    folder, block = tmp_path_factory.mktemp("fp8"), (16, 16)
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    tensors = stored(saved)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name], tensors[name + "_scale_inv"] = fp8_blocks.quantize(tensors[name], block, torch.float32)
    save_file(tensors, folder / "model.safetensors")
    described = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic", "fmt": "e4m3"}
    whole = {**read_full_config(saved), "quantization_config": described}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture(params=["release", "saved"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def whole_model(folder: Path) -> Any:
    """transformers' model with text and images, every tensor of it from `folder`."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    model, loaded = Qwen3_5MoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not loaded["missing_keys"]
    assert not {name for name in loaded["unexpected_keys"] if not name.startswith("mtp.")}
    return model.eval()


def test_the_text_has_the_names_of_a_text_model(release: Path, saved: Path) -> None:
    hf = read_hf_config(release)
    assert hf["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert hf["dtype"] == "bfloat16"
    checkpoint = HfCheckpoint(release)
    assert checkpoint.names == tensor_names(family_of(hf, RELEASE), hf) == HfCheckpoint(saved).names
    assert {name.partition(".")[0] for name in checkpoint.prediction} == {"mtp"}
    assert {name.split(".")[1] for name in checkpoint.vision} == {"visual"}
    apart = checkpoint.prediction | checkpoint.vision
    assert {name for name in stored(release) if not name.startswith((TEXT, "lm_head"))} == apart
    for name in checkpoint.names:
        assert same_bits(checkpoint.read(name), HfCheckpoint(saved).read(name)), name
        assert checkpoint.shape(name) == tuple(checkpoint.read(name).shape), name
    launch(release, "deepspeed")
    with pytest.raises(CheckpointError, match=r"gated delta rule"):
        launch(release, "megatron")


def test_the_published_description_is_that_of_all_published_tensors() -> None:
    """The release has 1,811 tensors: 693 of the text, 333 of the vision encoder, 785 of the layer behind."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    whole = published_config(RELEASE)
    with torch.device("meta"):
        model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig.from_dict(whole))
    sizes = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    vision = [size for name, size in sizes.items() if name.startswith("model.visual.")]
    assert (len(sizes) - len(vision), len(vision)) == (693, 333)
    assert sum(vision) / 1e9 == pytest.approx(0.447, rel=0.001)
    assert 2 * (sum(sizes.values()) - sum(vision)) == 69_321_221_376


def test_log_probs_are_those_of_the_whole_model(folder: Path) -> None:
    checkpoint = HfCheckpoint(folder)
    ids = torch.randint(3, 120, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    causal = load_policy(checkpoint, "float32", recompute=False).causal
    packed = load_policy(checkpoint, "float32", recompute=False, packed=True).causal.base_model
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    whole = whole_model(folder)
    with torch.no_grad():
        requested = whole(ids, use_cache=False).logits.log_softmax(-1)
        assert float(requested.std()) > 0.1
        found = causal(ids, use_cache=False).logits.log_softmax(-1)
        torch.testing.assert_close(found, requested, rtol=0, atol=1e-5)
        pack = packed(input_ids=ids, use_cache=False, position_ids=positions, sequence_lengths=LENGTHS)
        scored = causal.lm_head(pack.last_hidden_state).log_softmax(-1)
        for own, sequence in zip(scored.split(LENGTHS, 1), ids.split(LENGTHS, 1), strict=True):
            alone = whole(sequence, use_cache=False).logits.log_softmax(-1)
            torch.testing.assert_close(own, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["release", "saved", "fp8"])
def test_the_published_form_of_unchanged_weights_has_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, dtype: str
) -> None:
    folder = request.getfixturevalue(name)
    out = exported(folder, tmp_path / "out", dtype, published=True)
    before, after = stored(folder), stored(out)
    assert before.keys() == after.keys()
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    if HfCheckpoint(folder).prediction:
        assert read_full_config(out) == read_full_config(folder)


@pytest.mark.parametrize("published", [True, False])
def test_only_what_was_trained_is_written_anew(folder: Path, tmp_path: Path, *, published: bool) -> None:
    checkpoint = HfCheckpoint(folder)
    change = {
        name: checkpoint.read(name).float() * 2
        for name in (f"model.{EXPERTS}.3.up_proj.weight", "model.layers.3.self_attn.q_proj.weight", "lm_head.weight")
    }
    out = exported(folder, tmp_path / "out", "float32", published=published, **change)
    after, before = stored(out), stored(folder)
    assert after.keys() == before.keys()
    apart = checkpoint.vision | checkpoint.prediction
    assert [name for name in apart if not same_bits(after[name], before[name])] == []
    written = HfCheckpoint(out)
    for name in checkpoint.names:
        assert torch.equal(written.read(name).float(), change.get(name, checkpoint.read(name).float())), name
    config = read_full_config(out)
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert config["vision_config"] == read_full_config(folder)["vision_config"]
    assert config["text_config"]["dtype"] == ("bfloat16" if published else "float32")
    loaded = whole_model(out).state_dict()
    assert torch.equal(
        loaded[f"{TEXT}{EXPERTS}.gate_up_proj"][3].chunk(2)[1], change[f"model.{EXPERTS}.3.up_proj.weight"]
    )
    assert torch.equal(loaded["model.visual.pos_embed.weight"], before["model.visual.pos_embed.weight"].float())


def test_a_plain_export_of_fp8_has_the_published_names(fp8: Path, saved: Path, tmp_path: Path) -> None:
    out = exported(fp8, tmp_path / "out", "bfloat16", published=False)
    assert stored(out).keys() == stored(saved).keys()
    assert "quantization_config" not in read_full_config(out)
    for name in HfCheckpoint(fp8).names:
        assert torch.equal(HfCheckpoint(out).read(name), HfCheckpoint(fp8).read(name)), name


def test_a_tensor_with_gaps_is_never_written(release: Path) -> None:
    form = ExportForm(HfCheckpoint(release), "float32")
    name = f"model.{EXPERTS}.3.up_proj.weight"
    with pytest.raises(AssertionError, match="incomplete"):
        list(form.written([(name, form.source.read(name))]))


def test_experts_that_do_not_fit_config_json_are_refused(release: Path, tmp_path: Path) -> None:
    shutil.copytree(release, tmp_path, dirs_exist_ok=True)
    whole = read_full_config(release)
    whole["text_config"]["moe_intermediate_size"] //= 2
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=r"another shape than config\.json announces"):
        HfCheckpoint(tmp_path).read(f"model.{EXPERTS}.3.up_proj.weight")


def test_ties_are_said_outside_of_the_text() -> None:
    """As transformers reads them."""
    whole = published_config(RELEASE)
    assert text_config({**whole, "tie_word_embeddings": True})["tie_word_embeddings"]
    inner = {**whole["text_config"], "tie_word_embeddings": True}
    assert not text_config({**whole, "text_config": inner})["tie_word_embeddings"]


def test_the_rollout_gets_the_text(release: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = folder_to_serve(release, tmp_path, "bfloat16")
    assert "started on the text of" in caplog.text
    hf = json.loads((served / "config.json").read_text())
    assert hf["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert hf["model_type"] == "qwen3_5_moe_text"
    assert not list(served.glob("*.safetensors*"))
    model = ServedModel.from_checkpoint(release)
    assert (model.architecture, model.num_experts, model.num_layers) == ("Qwen3_5MoeForCausalLM", 16, 4)
    tokens = Tokens(release)
    assert (tokens.vocab_size, tokens.max_positions) == (128, 512)


def test_the_doctor_refuses_a_server_of_the_whole_release(release: Path, tmp_path: Path) -> None:
    served = folder_to_serve(release, tmp_path, "float32")

    def check(folder: Path) -> Check:
        backend = SimpleNamespace(model_folder=AsyncMock(return_value=folder))
        return asyncio.run(_geometry(cast("Any", backend), str(release), cast("Any", SimpleNamespace(url="U"))))

    assert check(served).status == "ok"
    assert check(release).status == "fail"
    assert "its text alone" in check(release).says


def test_a_saved_run_is_exported_under_the_published_names(release: Path, tmp_path: Path) -> None:
    """The pieces are of transformers' text model; here each is the double of the start."""
    policy = load_policy(HfCheckpoint(release), "float32", recompute=False)
    tensors = ((name, one.detach()) for name, one in policy.causal.named_parameters())
    checkpoint = save(tmp_path, release, "deepspeed", tensors)
    out = export_checkpoint(checkpoint, tmp_path / "out", published=True)
    before, after = stored(release), stored(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        factor = 1 if name.startswith(("model.visual.", "mtp.")) else 2
        assert same_bits(after[name], tensor * factor), name
    assert read_full_config(out) == read_full_config(release)


def test_adapters_are_merged_into_tensors_of_all_experts(release: Path, tmp_path: Path) -> None:
    """The other half of such a tensor comes from the start, long after."""
    lora = {**LORA, "targets": ["up_proj"]}
    factors = half_factors(release, lora)
    checkpoint = save(tmp_path, release, "megatron", iter(factors.items()), lora=lora)
    before, after = stored(release), stored(export_checkpoint(checkpoint, tmp_path / "out"))
    assert before.keys() == after.keys()
    gate, up = after[f"{TEXT}{EXPERTS}.gate_up_proj"].chunk(2, 1)
    old_gate, old_up = before[f"{TEXT}{EXPERTS}.gate_up_proj"].float().chunk(2, 1)
    assert torch.equal(gate.float(), old_gate)
    assert not torch.equal(up.float(), old_up)
