"""The learner on different machines: layer choice, and the CPU shim's refusal."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.megatron import cpu_shim
from moe_trm.learner.megatron.layers import choose_layers, transformer_engine_imports


def settings(**learner: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(learner)


@pytest.mark.parametrize(
    ("wanted", "cuda", "transformer_engine", "expected"),
    [
        ("auto", False, False, "cpu"),
        ("auto", False, True, "cpu"),
        ("auto", True, False, "local"),
        ("auto", True, True, "transformer_engine"),
        ("on", True, True, "transformer_engine"),
        ("off", True, True, "local"),
        ("off", False, False, "cpu"),
    ],
)
def test_layer_choice(wanted: str, cuda: bool, transformer_engine: bool, expected: str) -> None:
    chosen = choose_layers(settings(transformer_engine=wanted), cuda=cuda, transformer_engine=transformer_engine)
    assert chosen == expected


@pytest.mark.parametrize(("cuda", "why"), [(False, "no CUDA device"), (True, "does not import")])
def test_transformer_engine_is_refused_where_it_is_not(cuda: bool, why: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used here") as caught:
        choose_layers(settings(transformer_engine="on"), cuda=cuda, transformer_engine=not cuda)
    assert why in str(caught.value.got)
    assert caught.value.where == "learner.transformer_engine"
    assert ("install" in caught.value.fix) is cuda


def test_context_parallelism_on_cuda_needs_transformer_engine() -> None:
    two = {"parallel": {"context": 2}}
    assert choose_layers(settings(**two), cuda=False, transformer_engine=False) == "cpu"
    assert choose_layers(settings(**two), cuda=True, transformer_engine=True) == "transformer_engine"
    for learner, usable in ((two, False), ({**two, "transformer_engine": "off"}, True)):
        with pytest.raises(ConfigError, match="needs Transformer Engine"):
            choose_layers(settings(**learner), cuda=True, transformer_engine=usable)


def test_broken_transformer_engine_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("transformer_engine"):
                raise RuntimeError("found no CUDA library")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert transformer_engine_imports() is False


def test_importable_transformer_engine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("transformer_engine")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    assert transformer_engine_imports() is True


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
