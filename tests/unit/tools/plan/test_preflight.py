"""The planner refuses what a start refuses, and what it proposes passes the checks of a start."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch.start.preflight import check_model_and_layout
from moe_trm.cli import main
from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, MoeTrmError, SeveralRefusals
from moe_trm.models.hf_config import text_config
from moe_trm.tools.plan import search as planner
from moe_trm.tools.plan.build import Work
from moe_trm.tools.plan.cluster import Cluster
from moe_trm.tools.plan.commands import WORKLOAD
from moe_trm.tools.plan.gpus import gpu_of
from moe_trm.tools.plan.search import search
from tests.published_models import NAMES, published_config
from tests.unit.tools.plan import releases
from tests.unit.tools.plan.test_search import work

POSITIONS = "a server sends no positions"
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3_2": (published_config("deepseek_v3_2"), POSITIONS),
    "glm_5": (published_config("glm_5"), POSITIONS),
    "glm_5 in nvfp4": ({**published_config("glm_5"), **NVFP4}, POSITIONS),
    "qwen3 in nvfp4": ({**published_config("qwen3_30b_a3b"), **NVFP4}, "quantised in a form that is not read here"),
    "mimo": ({**published_config("qwen3_30b_a3b"), "architectures": ["MiMoV2FlashForCausalLM"]}, "not supported"),
    "nemotron": ({**published_config("qwen3_30b_a3b"), "architectures": ["NemotronHForCausalLM"]}, "not supported"),
}


def start_of(config: Config, hf: dict[str, Any], folder: Path) -> Config:
    """A configuration with a checkpoint folder that has this config.json alone."""
    (folder / "config.json").write_text(json.dumps(hf))
    return config.model_copy(update={"model": config.model.model_copy(update={"checkpoint": str(folder)})})


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_start_refuses_is_not_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, says = REFUSED[name]
    with pytest.raises(MoeTrmError, match=says):
        check_model_and_layout(start_of(load(WORKLOAD), hf, tmp_path), 8)
    assert main(["plan", "--hf-config", str(tmp_path / "config.json"), "--nodes", "16"]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert not told.out


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8", "MXFP4"])
def test_a_form_that_stands_beside_config_json_is_refused_by_both(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = start_of(load(WORKLOAD), published_config("qwen3_30b_a3b"), tmp_path)
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match=f"quant_method=modelopt, quant_algo={algorithm}"):
        check_model_and_layout(config, 8)
    assert main(["plan", "--hf-config", str(tmp_path / "config.json"), "--nodes", "16"]) == 2
    assert f"quant_algo={algorithm}" in capsys.readouterr().err


def test_a_quantised_cache_leaves_the_weights_plain(tmp_path: Path) -> None:
    config = start_of(load(WORKLOAD), published_config("qwen3_30b_a3b"), tmp_path)
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    check_model_and_layout(config, 8)
    beside.write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json is not valid JSON"):
        check_model_and_layout(config, 8)


def test_advice_is_not_what_is_set_already(tmp_path: Path) -> None:
    hf, _ = REFUSED["mimo"]
    config = load(WORKLOAD, ["learner.backend=deepspeed"])
    with pytest.raises(CheckpointError) as refused:
        search(config, Work(hf, work("qwen3_30b_a3b", config).assumptions, "c"), Cluster(16, 8, gpu_of("h100"), 1))
    assert "learner.backend" not in refused.value.fix


@cache
def workload(backend: str) -> Config:
    return load(WORKLOAD, [f"learner.backend={backend}"])


@pytest.mark.parametrize("backend", ["megatron", "deepspeed"])
@pytest.mark.parametrize("name", releases.DISTINCT)
def test_plan_and_start_agree_on_published_releases(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, settled = releases.release_config(name), list[Config]()

    def settle(config: Config, _: Work) -> Config:
        settled.append(config)
        return config

    # No layout is searched: what is planned from here on differs in sizes alone.
    monkeypatch.setattr(planner, "_with_micro_batches", settle)
    monkeypatch.setattr(planner, "_splits", lambda *_: iter(()))
    config = workload(backend)
    model = Work(text_config(hf), work("qwen3_30b_a3b", config).assumptions, "c", hf)
    try:
        search(config, model, Cluster(32, 8, gpu_of("h200"), 1), 8)
    except MoeTrmError as refused:
        reasons = refused.reasons if isinstance(refused, SeveralRefusals) else [refused]
        unpadded = start_of(config, hf, tmp_path)
        start = unpadded.model_copy(update={"batch": unpadded.batch.model_copy(update={"layout": "padded"})})
        with pytest.raises(MoeTrmError) as at_start:
            check_model_and_layout(start, 8)
        assert all(reason.what in str(at_start.value) for reason in reasons)
    else:
        (chosen,) = settled
        # Plans are for GPUs, and SGLang has no Mamba layers on a CPU.
        device = "cuda" if "mamba_num_heads" in hf else "auto"
        server = chosen.rollout.server.model_copy(update={"device": device})
        on_gpus = chosen.model_copy(update={"rollout": chosen.rollout.model_copy(update={"server": server})})
        check_model_and_layout(start_of(on_gpus, hf, tmp_path), 8)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_what_is_planned_passes_the_checks_of_a_start(name: str, tmp_path: Path) -> None:
    hf, config = published_config(name), load(WORKLOAD, ["rollout.max_new_tokens=4096"])
    shared = work("qwen3_30b_a3b", config).assumptions
    result = search(config, Work(text_config(hf), shared, "c", hf), Cluster(32, 8, gpu_of("h200"), 1), 8)
    assert result.plans
    for plan in result.plans:
        check_model_and_layout(start_of(plan.config, hf, tmp_path), plan.ranks)
