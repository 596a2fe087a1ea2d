"""What the learner does with the machine it finds: layer choice, and the CPU shim's refusal."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from moe_trm.errors import ConfigError
from moe_trm.learner.megatron import cpu_shim
from moe_trm.learner.megatron.layers import check_context, choose_layers, transformer_engine_imports


@pytest.mark.parametrize(
    ("cuda", "transformer_engine", "expected"),
    [(False, False, "cpu"), (False, True, "cpu"), (True, False, "local"), (True, True, "transformer_engine")],
)
def test_layer_choice(cuda: bool, transformer_engine: bool, expected: str) -> None:
    assert choose_layers(cuda=cuda, transformer_engine=transformer_engine) == expected


def test_context_parallelism_on_cuda_needs_transformer_engine() -> None:
    check_context("cpu", 2)
    check_context("transformer_engine", 2)
    check_context("local", 1)
    with pytest.raises(ConfigError, match="needs Transformer Engine"):
        check_context("local", 2)


def test_broken_transformer_engine_counts_as_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
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
