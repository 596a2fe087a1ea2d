"""Models that SGLang would serve as others than config.json describes: its installed source, refusals, remarks."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from launch.start.preflight import check_model_and_layout
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.hf_config import LAYER_KEYS, text_config
from moe_trm.models.registry import FAMILIES, MOE_FAMILIES
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.indexers import check_indexer
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.rollout.sglang.launch import launch_command
from moe_trm.rollout.sglang.served_differences import (
    READ_KEYS,
    ROTATED_HEADS,
    VISION_LEVELS,
    check_cpu_kernels,
    check_cuda_kernels,
    check_epsilons,
    check_intervals,
    check_layers,
    check_options,
    config_overrides,
    remark_on_epsilons,
)
from moe_trm.rollout.vllm.backend import VllmBackend
from moe_trm.tools.doctor.examine import without_weights
from moe_trm.tools.doctor.served import known_difference
from moe_trm.tools.plan.build import Work
from tests.published_models import published_config
from tests.unit.tools.plan.test_search import work as planned

FILES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), "deepseek_v2"),
    "qwen3_5_moe": "qwen3_5",
}
"""Of SGLang, where the name is not the family's."""


def hf_of(family: str, **change: Any) -> dict[str, Any]:
    known = FAMILIES[family]
    shape = {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, "num_local_experts": 8}
    return {"architectures": [known.architecture], **shape, **known.tiny, **change}


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_installed_sglang_reads_these_keys_of_layers(family: str) -> None:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "models" / f"{FILES.get(family, family)}.py").read_text()
    read = {key for key in LAYER_KEYS if re.search(rf"config\.{key}\b(?! = )", source)}
    if family == "glm4_moe_lite":
        assert "config.moe_layer_freq = 1" in source
        read.discard("moe_layer_freq")
    assert read == set(READ_KEYS[FAMILIES[family].architecture])


@pytest.mark.parametrize(
    ("family", "change", "dense"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, "0, 2, 3"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "1, 3"),
        ("glm4_moe", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, "2"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "1, 3"),
    ],
)
def test_dense_layers_that_it_would_fill_with_random_experts_are_refused(
    family: str, change: dict[str, Any], dense: str
) -> None:
    check_layers(hf_of(family), "config.json")
    with pytest.raises(CheckpointError, match="does not read which layers are dense") as caught:
        check_layers(hf_of(family, **change), "config.json")
    assert caught.value.got == f"mixtures of experts in layers {dense}"
    assert next(iter(change)) in caught.value.where


def test_dense_layers_that_it_reads_are_served() -> None:
    for change in ({"first_k_dense_replace": 2}, {"moe_layer_freq": 2, "first_k_dense_replace": 0}):
        check_layers(hf_of("deepseek_v3", **change), "config.json")
    check_layers({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4}, "config.json")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "olmoe"])
def test_an_epsilon_far_from_the_served_one_is_refused_and_a_near_one_told(family: str) -> None:
    same, near = (1e-5, 1e-6) if family == "olmoe" else (1e-6, 1e-5)
    for epsilon, told in ((same, False), (near, True)):
        check_epsilons(hf_of(family, rms_norm_eps=epsilon), "config.json")
        assert bool(remark_on_epsilons(hf_of(family, rms_norm_eps=epsilon))) == told
    with pytest.raises(CheckpointError, match="another epsilon") as caught:
        check_epsilons(hf_of(family, rms_norm_eps=1e-3), "config.json")
    assert "rms_norm_eps" in caught.value.where


def test_other_norms_take_any_epsilon() -> None:
    check_epsilons(hf_of("qwen3_moe", rms_norm_eps=1e-3), "config.json")
    assert not remark_on_epsilons(hf_of("qwen3_moe", rms_norm_eps=1e-3))


@pytest.mark.parametrize("backend", ["megatron", "deepspeed"])
def test_launch_and_doctor_say_so(backend: str, tmp_path: Path) -> None:
    def config(**settings: Any) -> Config:
        return Config.model_validate(
            {"model": {"checkpoint": str(tmp_path)}, "learner": {"backend": backend}, **settings}
        )

    def write(hf: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(hf))

    write(published_config("qwen3_30b_a3b") | {"decoder_sparse_step": 2})
    layout, _ = without_weights(config(), 1)
    assert layout.status == "fail"
    assert "does not read which layers are dense" in layout.says
    check_model_and_layout(config(rollout={"engine": "bundle", "bundle": "b"}), 1)
    write(published_config("glm_4_7_flash"))
    check_model_and_layout(config(), 1)
    (told,) = known_difference(config().rollout, str(tmp_path))
    assert told.status == "warn"
    assert "epsilon 1e-05, transformers and the learners with 1e-06" in told.says
    write(published_config("deepseek_v3"))
    assert not [*known_difference(config().rollout, str(tmp_path))]


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_qk_norm", False), ("use_routing_bias", None), ("scoring_func", "softmax"), ("rotary_dim", 64)],
)
def test_minimax_m2_without_what_sglang_must_be_told_is_refused(key: str, value: object) -> None:
    hf = published_config("minimax_m2")
    check_options(hf, "config.json")
    check_options({"architectures": ["MixtralForCausalLM"]}, "config.json")
    other = {name: held for name, held in hf.items() if name != key}
    if key == "rotary_dim":
        other["partial_rotary_factor"] = 0.5
    with pytest.raises(
        CheckpointError, match=f"(?s)serves another model than this one.*config.json, {key}.*no such key"
    ):
        check_options(other, "config.json")
    if key != "rotary_dim":
        with pytest.raises(CheckpointError, match=key):
            check_options({**hf, key: value}, "config.json")


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_model_with_an_indexer_is_served_by_no_server(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_of(family)))
    config = Config.model_validate({"model": {"checkpoint": str(tmp_path)}})
    for backend in (SglangBackend(), VllmBackend()):
        if family in ("deepseek_v32", "glm_moe_dsa"):
            with pytest.raises(CheckpointError, match=r"(?s)sends no positions.*rollout\.engine=bundle"):
                backend.check(Served.of(config))
        else:
            check_indexer(hf_of(family), "config.json")


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_hybrid_is_served_where_every_nth_layer_has_full_attention(family: str) -> None:
    hf, kinds = hf_of(family), ["linear_attention", "full_attention"]
    check_intervals(hf, "config.json")
    if family not in ("qwen3_next", "qwen3_5_moe"):
        assert config_overrides(hf) == {}
        return
    assert config_overrides(hf) == {"full_attention_interval": 4}
    assert config_overrides({**hf, "layer_types": kinds * 2}) == {"full_attention_interval": 2}
    check_intervals({**hf, "layer_types": kinds * 2}, "config.json")
    published = {**hf, "full_attention_interval": 4}
    assert config_overrides(published) == {}
    for other in (
        {**hf, "layer_types": [kinds[0], kinds[1], kinds[1], kinds[0]]},
        {**hf, "layer_types": kinds[:1] * 4},
        {**published, "layer_types": kinds * 2},
    ):
        with pytest.raises(CheckpointError, match=r"(?s)serves another model.*full_attention_interval"):
            check_intervals(other, "config.json")


def test_a_server_on_cuda_has_heads_and_a_dtype_that_its_kernels_know() -> None:
    """Both were seen on an H100. The sizes are those of the installed source."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "layers" / "rotary_embedding" / "base.py").read_text()
    assert f"self.head_size not in {[*ROTATED_HEADS]}" in source
    fits, odd = hf_of("qwen3_moe", head_dim=128), hf_of("qwen3_moe", head_dim=32)
    check_cuda_kernels(fits, "bfloat16", "c", deterministic=False)
    check_cuda_kernels(odd, "float16", "c", deterministic=False)
    check_cuda_kernels(fits, "float32", "c", deterministic=True)
    with pytest.raises(CheckpointError, match="heads of this size") as caught:
        check_cuda_kernels(odd, "bfloat16", "c", deterministic=False)
    assert (caught.value.where, caught.value.got) == ("c, head_dim", "32")
    with pytest.raises(ConfigError, match="no norms in float32") as refused:
        check_cuda_kernels(fits, "float32", "c", deterministic=False)
    assert refused.value.where == "rollout.server.dtype"


@pytest.mark.parametrize(("device", "refused"), [("cpu", False), ("cuda", True)])
def test_a_server_on_a_cpu_serves_heads_of_every_size(tmp_path: Path, device: str, refused: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_of("qwen3_moe", head_dim=32)))
    config = Config.model_validate(
        {"model": {"checkpoint": str(tmp_path)}, "rollout": {"server": {"device": device, "dtype": "bfloat16"}}}
    )
    with pytest.raises(CheckpointError, match="heads") if refused else nullcontext():
        launch_command(Served.of(config), tmp_path, 7, "k.yaml")


def test_mamba_layers_need_a_gpu(tmp_path: Path) -> None:
    """The installed mixer computes with Triton's kernels, whatever the device."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "layers" / "attention" / "mamba" / "mamba.py").read_text()
    imported = (
        r"from sglang\.kernels\.ops\.mamba\.triton_ops import \(\s+mamba_chunk_scan_combined,\s+selective_state_update"
    )
    assert re.search(imported, source)
    check_cpu_kernels(hf_of("qwen3_moe"), "c")
    sizes = AutoConfig.for_model("nemotron_h").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "architectures": ["NemotronHForCausalLM"]}))
    for device, refused in (("cpu", True), ("cuda", False)):
        config = Config.model_validate(
            {
                "model": {"checkpoint": str(tmp_path)},
                "learner": {"backend": "deepspeed"},
                "rollout": {"server": {"device": device}},
            }
        )
        with pytest.raises(CheckpointError, match="no Mamba layers on a CPU") if refused else nullcontext():
            SglangBackend().check(Served.of(config))


@pytest.mark.parametrize("levels", [1, 3, 4])
def test_pictures_need_three_levels_of_the_vision_tower(levels: int, tmp_path: Path) -> None:
    """The installed source adds three; the planner and both starts ask the same rule."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "models" / "qwen3_vl_moe.py").read_text()
    assert f"self.deepstack_embed_to_decoder_layer = range({VISION_LEVELS})" in source
    text = {key: value for key, value in published_config("qwen3_30b_a3b").items() if key != "architectures"}
    ids = {f"{name}_token_id": number for number, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    vision = {"deepstack_visual_indexes": [*range(levels)]}
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(whole | ids | {"model_type": "qwen3_vl_moe"}))
    (tmp_path / "rows.jsonl").write_text("")
    shared = {"model": {"checkpoint": str(tmp_path)}, "learner": {"backend": "deepspeed"}}
    task = {"name": "jsonl", "prompts": str(tmp_path / "rows.jsonl"), "eval_size": 0}
    pictured = Config.model_validate({**shared, "task": {**task, "image_field": "images"}, "train": {"eval_every": 0}})
    layout, *_ = without_weights(pictured, 1)
    other = levels != VISION_LEVELS
    with pytest.raises(CheckpointError, match="adds three levels") if other else nullcontext() as caught:
        SglangBackend().check(Served.of(pictured))
    work = Work(text_config(whole), planned("qwen3_30b_a3b", pictured).assumptions, "config.json", whole | ids)
    with pytest.raises(CheckpointError, match="adds three levels") if other else nullcontext():
        work.check_served(pictured)
    assert layout.status == ("fail" if other else "ok")
    assert ("adds three levels" in layout.says) == other
    if caught is not None:
        assert caught.value.where.endswith("config.json, vision_config.deepstack_visual_indexes")
        assert caught.value.got == f"{levels} levels with task.image_field"
    SglangBackend().check(Served.of(Config.model_validate({**shared, "task": task, "train": {"eval_every": 0}})))
