"""The learner on different machines: layer choice, and the CPU shim's refusal."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron import cpu_shim
from moe_trm.learner.megatron.layers import choose_layers, transformer_engine_problem
from moe_trm.models.registry import FAMILIES, MOE_FAMILIES

BROKEN = "transformer_engine.pytorch does not import: found no CUDA library"
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2}


def settings(**learner: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(learner)


@pytest.mark.parametrize(
    ("requested", "cuda", "problem", "expected"),
    [
        ("auto", False, BROKEN, "cpu"),
        ("auto", False, "", "cpu"),
        ("auto", True, BROKEN, "local"),
        ("auto", True, "", "transformer_engine"),
        ("on", True, "", "transformer_engine"),
        ("off", True, "", "local"),
        ("off", False, BROKEN, "cpu"),
    ],
)
def test_layer_choice(requested: str, cuda: bool, problem: str, expected: str) -> None:
    assert choose_layers(settings(transformer_engine=requested), QWEN, cuda=cuda, problem=problem) == expected


@pytest.mark.parametrize(("cuda", "why"), [(False, "no CUDA device"), (True, "found no CUDA library")])
def test_transformer_engine_is_refused_where_it_is_not(cuda: bool, why: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used here") as caught:
        choose_layers(settings(transformer_engine="on"), QWEN, cuda=cuda, problem=BROKEN if cuda else "")
    assert why in str(caught.value.got)
    assert caught.value.where == "learner.transformer_engine"
    assert ("install" in caught.value.fix) is cuda


def test_context_parallelism_on_cuda_needs_transformer_engine() -> None:
    two = {"parallel": {"context": 2}}
    assert choose_layers(settings(**two), QWEN, cuda=False, problem=BROKEN) == "cpu"
    assert choose_layers(settings(**two), QWEN, cuda=True, problem="") == "transformer_engine"
    for learner, problem in ((two, BROKEN), ({**two, "transformer_engine": "off"}, "")):
        with pytest.raises(ConfigError, match="needs Transformer Engine") as caught:
            choose_layers(settings(**learner), QWEN, cuda=True, problem=problem)
        assert problem in str(caught.value.got)


@pytest.mark.parametrize("family", [name for name in MOE_FAMILIES if not FAMILIES[name].not_in_megatron])
def test_latent_attention_on_cuda_needs_transformer_engine(family: str) -> None:
    hf = {"architectures": [FAMILIES[family].architecture], "num_hidden_layers": 2, **FAMILIES[family].tiny}
    refused = pytest.raises(ConfigError, match="latent attention on CUDA needs Transformer Engine")
    for learner, problem in (({}, BROKEN), ({"transformer_engine": "off"}, "")):
        with refused if "kv_lora_rank" in hf else nullcontext():
            assert choose_layers(settings(**learner), hf, cuda=True, problem=problem) == "local"
    assert choose_layers(settings(), hf, cuda=True, problem="") == "transformer_engine"
    assert choose_layers(settings(), hf, cuda=False, problem=BROKEN) == "cpu"


def test_broken_transformer_engine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("transformer_engine"):
                raise RuntimeError("found no CUDA library")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert transformer_engine_problem() == BROKEN


def test_importable_transformer_engine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("transformer_engine")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    assert transformer_engine_problem() == ""


def test_cpu_shim_refuses_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="machine with CUDA"):
        cpu_shim.install()
    assert torch.cuda.current_device is before


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is not installed where CUDA is")
def test_modules_that_name_cuda_get_tensors_of_the_cpu_and_else_torch_itself() -> None:
    there = cpu_shim._TorchOnCpu("torch")
    for device in ("cuda", "cuda:0", torch.device("cuda"), "cpu", None):
        made = there.tensor([1.5], dtype=torch.float64, device=device, pin_memory=True)
        assert (made.device.type, made.dtype, made.tolist()) == ("cpu", torch.float64, [1.5])
    assert there.zeros([2], device="cuda").tolist() == [0, 0]
    assert there.zeros(2, device="meta").device.type == "meta"
    assert there.Tensor is torch.Tensor
    assert there.cuda is torch.cuda
