"""Checkpoints that do not fit their config.json, or the learner, are refused with what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch.start.preflight import check_launch
from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.deepspeed.settings import check_model
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.megatron.layout import check_layout
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.registry import FAMILIES, MOE_FAMILIES
from moe_trm.models.tiny.families import make_family

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]

backends = pytest.mark.parametrize("backend", ["megatron", "deepspeed"])


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("glm4_moe", tmp_path_factory.mktemp("glm"))


def changed(source: Path, folder: Path, change: Change) -> Path:
    """`source` with other tensors or another config.json, as two shards in `folder`."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors, hf = load_file(folder / "model.safetensors"), read_hf_config(source)
    (folder / "model.safetensors").unlink()
    change(tensors, hf)
    (folder / "config.json").write_text(json.dumps(hf))
    names = sorted(tensors)
    shards = {"first.safetensors": names[::2], "second.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def launch(checkpoint: Path, backend: str, *overrides: str) -> None:
    """Everything that `moe-trm train` checks before it starts anything."""
    config = checkpoint / "run.yaml"
    config.write_text(json.dumps({"model": {"checkpoint": str(checkpoint)}, "learner": {"backend": backend}}))
    check_launch(load(str(config), list(overrides)), world_size=3)


def rename(tensors: dict[str, Tensor], _hf: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.router.weight"] = tensors.pop("model.layers.1.mlp.gate.weight")


def drop_bias(tensors: dict[str, Tensor], _hf: dict[str, Any]) -> None:
    del tensors["model.layers.2.mlp.gate.e_score_correction_bias"]


def other_family(_tensors: dict[str, Tensor], hf: dict[str, Any]) -> None:
    hf |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 16, "first_k_dense_replace": 0}


def untied(tensors: dict[str, Tensor], _hf: dict[str, Any]) -> None:
    del tensors["lm_head.weight"]


def tied(_tensors: dict[str, Tensor], hf: dict[str, Any]) -> None:
    hf["tie_word_embeddings"] = True


def quantised(_tensors: dict[str, Tensor], hf: dict[str, Any]) -> None:
    hf["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@backends
@pytest.mark.parametrize(
    ("change", "reason", "advice"),
    [
        (rename, r"1 missing: .*gate\.weight.*1 without a place.*router\.weight", "renamed"),
        (drop_bias, "1 missing: .*e_score_correction_bias", "completely"),
        (other_family, "block_sparse_moe", "another model's"),
        (untied, "no output weight", "tie_word_embeddings=true"),
        (tied, "output weight and embedding differ", "tie_word_embeddings=false"),
        (quantised, "no tensor has scales", "quantization_config"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_at_launch(
    glm: Path, tmp_path: Path, backend: str, change: Change, reason: str, advice: str
) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        launch(changed(glm, tmp_path, change), backend)
    assert caught.value.fix is not None
    assert advice in caught.value.fix


@backends
def test_a_missing_shard_is_refused_at_launch(glm: Path, tmp_path: Path, backend: str) -> None:
    folder = changed(glm, tmp_path, lambda _tensors, _hf: None)
    launch(folder, backend)
    (folder / "second.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no second\.safetensors") as caught:
        launch(folder, backend)
    assert caught.value.fix is not None
    assert "completely" in caught.value.fix


@pytest.mark.parametrize(
    ("backend", "reason"), [("megatron", "16 experts, 3 ranks"), ("deepspeed", "every rank computes all experts")]
)
def test_experts_that_do_not_divide_over_the_ranks_are_refused_at_launch(glm: Path, backend: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        launch(glm, backend, "learner.parallel.expert=3")
    assert "learner.parallel" in str(caught.value)


def test_layers_behind_the_last_and_a_copy_of_tied_weights_are_no_fault(glm: Path, tmp_path: Path) -> None:
    def extend(tensors: dict[str, Tensor], hf: dict[str, Any]) -> None:
        hf["tie_word_embeddings"] = True
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.4.eh_proj.weight"] = tensors["lm_head.weight"].clone()

    launch(changed(glm, tmp_path, extend), "megatron")


def test_qwen_with_biases_in_attention_trains_on_deepspeed(tmp_path: Path) -> None:
    """Megatron refuses it and advises DeepSpeed."""
    folder = make_family("qwen3_moe", tmp_path / "biased", attention_bias=True)
    assert "model.layers.0.self_attn.o_proj.bias" in HfCheckpoint(folder).names
    with pytest.raises(CheckpointError, match="attention_bias") as caught:
        launch(folder, "megatron")
    assert "learner.backend=deepspeed" in str(caught.value)
    launch(folder, "deepspeed")


def config(**parallel: int) -> Config:
    return Config.model_validate({"model": {"checkpoint": "model"}, "learner": {"parallel": parallel}})


def tiny_config(family: str, **change: object) -> dict[str, Any]:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    known = FAMILIES[family]
    return {"architectures": [known.architecture], **shape, **known.tiny, **change}


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_families_are_accepted_and_experts_must_divide_over_the_ranks(family: str) -> None:
    hf = {"num_experts_per_tok": 2, **tiny_config(family)}
    if lacking := FAMILIES[family].not_in_megatron:
        with pytest.raises(CheckpointError, match=rf"(?s){lacking}.*learner\.backend=deepspeed"):
            check_layout(config(expert=2), "0.16.1", hf)
        return
    check_layout(config(expert=2), "0.16.1", hf)
    with pytest.raises(ConfigError, match=r"experts, 3 ranks"):
        check_layout(config(expert=3), "0.16.1", hf)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("NemotronHForCausalLM", r"got: +.*NemotronHForCausalLM.*learner\.backend=deepspeed"),
        ("Glm4vMoeForConditionalGeneration", r"as that of Qwen3\.5-MoE is; nearest .* \(Glm4MoeForCausalLM\)"),
        ("Qwen3VLMoeForConditionalGeneration", r"has no text_config"),
        ("Qwen3_5MoeForConditionalGeneration", r"has no text_config"),
        ("MambaForCausalLM", "got: +.*MambaForCausalLM"),
    ],
)
def test_models_that_are_not_supported_now_are_refused_with_what_is_nearest(architecture: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)architecture is not supported.*{reason}"):
        check_layout(config(), "0.16.1", {"architectures": [architecture]})


def test_other_models_with_a_text_part_are_refused_by_both_learners() -> None:
    hf = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"vocab_size": 128}}
    says = (
        r"(?s)Qwen3_5ForConditionalGeneration: the text part .* is not read here.*nearest is a checkpoint of its text"
    )
    with pytest.raises(CheckpointError, match=says):
        check_layout(config(), "0.16.1", hf)
    with pytest.raises(CheckpointError, match=says):
        check_model(config(), hf)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "attention_factor": 1.2}}, "attention_factor=1.2"),
    ],
)
def test_what_a_family_does_not_have_here_is_refused(family: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        check_layout(config(), "0.16.1", {"num_experts_per_tok": 4, **tiny_config(family, **change)})
    assert caught.value.fix is not None
    assert "deepspeed" in caught.value.fix


def test_experts_with_biases_that_ranks_cannot_share_are_refused() -> None:
    hf = {"num_experts_per_tok": 4, **tiny_config("gpt_oss")}
    check_layout(config(tensor=2, expert=2), "0.19.2", hf)
    with pytest.raises(ConfigError, match="has biases, which each rank"):
        check_layout(config(tensor=2, expert_tensor=2), "0.19.2", hf)


def test_experts_in_one_tensor_must_be_as_many_as_config_json_says(tmp_path: Path) -> None:
    checkpoint = HfCheckpoint(make_family("gpt_oss", tmp_path))
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(checkpoint.read_row(name, 3, 8), checkpoint.read(name)[3])
    with pytest.raises(CheckpointError, match=r"another number of rows[\s\S]*8[\s\S]*16"):
        checkpoint.read_row(name, 3, 16)


def test_attention_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="norms the queries of all heads together"):
        check_layout(config(tensor=2, expert=2), "0.19.2", {"num_experts_per_tok": 4, **tiny_config("olmoe")})
