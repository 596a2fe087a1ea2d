"""The CPU support package finds the tensors of a model that SGLang's checker finds, under the same names."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.checksums import wrap, wrap_unpacking

QUANTISED = object()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.bias = None
        self.register_parameter("absent", None)
        self.register_buffer("cos_sin_cache", torch.ones(2))
        self.register_buffer("scores", torch.arange(3))


class Outer(nn.Module):
    """A shared module, a shared tensor, and tensors of its own behind those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.again, self.quant_method = self.first, None
        self.own = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.tied = self.second.weight
        self.left_out = nn.Parameter(torch.zeros(1))
        self.left_out._skip_weight_check = True  # type: ignore[attr-defined]
        self.register_buffer("counted", self.first.get_buffer("scores"))


def hash_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


SGLANG = SimpleNamespace(
    select_comparable_weight=lambda method: QUANTISED if method == "fp8" else None,
    _is_skip_weight_check=lambda name, tensor: "cos_sin" in name or getattr(tensor, "_skip_weight_check", False),
    _hash_tensor=hash_of,
    overall_checksum=lambda checksums: "/".join(f"{name}={checksums[name]}" for name in sorted(checksums)),
)


def checker(model: nn.Module) -> Any:
    def parallelism(role: str) -> Any:
        return SimpleNamespace(model_dump=lambda: {"role": role})

    return SimpleNamespace(_get_model=lambda: model, _parallelism_info=parallelism)


def computed(model: nn.Module, *skipped: Any) -> Any:
    return wrap(lambda *_, role: ("native", role), SGLANG)(checker(model), *skipped, role="target")


def test_tensors_are_those_that_torch_names_in_its_order() -> None:
    model = Outer()
    named = [*model.named_parameters(), *model.named_buffers()]
    wanted = {name: hash_of(tensor) for name, tensor in named if not SGLANG._is_skip_weight_check(name, tensor)}
    found = computed(model)
    assert list(found["checksums"].items()) == list(wanted.items())
    assert found["per_gpu_checksum"] == SGLANG.overall_checksum(wanted)
    assert found["parallelism_info"] == {"role": "target"}
    assert list(wanted) == ["own", "tied", "first.weight", "counted", "second.scores"]


def test_what_changes_between_two_requests_is_seen() -> None:
    """Values, and a tensor in the place of another."""
    model = Outer()
    before = computed(model)["checksums"]
    with torch.no_grad():
        model.first.weight[0, 0] += 1
    model.own = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    after = computed(model)["checksums"]
    assert {name for name in before if before[name] != after[name]} == {"own", "first.weight"}


def test_quantised_weights_and_tensors_to_leave_out_are_sglangs() -> None:
    model = Outer()
    assert computed(model, ["own"]) == ("native", "target")
    assert computed(model, None)["checksums"]
    model.second.quant_method = "fp8"  # type: ignore[assignment]
    assert computed(model) == ("native", "target")


class Part(msgspec.Struct):
    rank: int


class Info(msgspec.Struct):
    checksums: dict[str, str]
    parts: list[Part]


def test_an_answer_is_unpacked_to_what_json_can_hold_and_others_are_sglangs() -> None:
    unpack = wrap_unpacking(lambda obj: ("native", obj), Info)
    assert unpack(Info({"b": "1", "a": "2"}, [Part(0)])) == {"checksums": {"b": "1", "a": "2"}, "parts": [{"rank": 0}]}
    assert unpack(Part(0)) == ("native", Part(0))
