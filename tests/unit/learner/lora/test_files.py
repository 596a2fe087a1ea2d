"""Adapters in peft's files: names and shapes as it documents them, back again, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_trm.config.schema import Config, LoraConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name
from moe_trm.learner.lora.base import Identity
from moe_trm.learner.lora.files import CONFIG, WEIGHTS, read_adapter, target_modules, write_adapter
from moe_trm.learner.lora.requested import requested_adapters
from moe_trm.learner.lora.targets import adapted_modules, matrix_modules
from moe_trm.models.hf_config import read_hf_config

HIDDEN, HEADS, EXPERT = 8, 12, 6
SHAPES = {
    "model.embed_tokens.weight": (20, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HEADS, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (4, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (4, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.mlp.gate.weight": (2, HIDDEN),
    **{f"model.layers.0.mlp.experts.{e}.gate_proj.weight": (EXPERT, HIDDEN) for e in range(2)},
    **{f"model.layers.0.mlp.experts.{e}.up_proj.weight": (EXPERT, HIDDEN) for e in range(2)},
    **{f"model.layers.0.mlp.experts.{e}.down_proj.weight": (HIDDEN, EXPERT) for e in range(2)},
    "lm_head.weight": (20, HIDDEN),
}
LORA = LoraConfig(rank=3, alpha=6.0, targets=("attention", "experts", "router"))
HF = {"num_hidden_layers": 1, "num_experts": 2}


@pytest.fixture
def checkpoint(tmp_path: Path) -> HfCheckpoint:
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF))
    return HfCheckpoint(tmp_path)


def modules() -> frozenset[str]:
    return adapted_modules(SHAPES, LORA, HF)


def factors() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in sorted(modules()):
        outputs, inputs = SHAPES[f"{module}.weight"]
        found |= {factor_name(module, A): torch.randn(3, inputs), factor_name(module, B): torch.randn(outputs, 3)}
    return found


def written(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    write_adapter(folder, factors(), LORA, matrix_modules(SHAPES, HF), "base")
    if changes:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_names_and_shapes_are_those_that_peft_documents(tmp_path: Path) -> None:
    folder = written(tmp_path / "adapter")
    found = {name: tuple(tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}
    layer = "base_model.model.model.layers.0"
    assert found[f"{layer}.self_attn.q_proj.lora_A.weight"] == (3, HIDDEN)
    assert found[f"{layer}.self_attn.q_proj.lora_B.weight"] == (HEADS, 3)
    assert found[f"{layer}.mlp.gate.lora_B.weight"] == (2, 3)
    assert found[f"{layer}.mlp.experts.1.down_proj.lora_A.weight"] == (3, EXPERT)
    assert len(found) == 2 * (4 + 1 + 6)
    config = json.loads((folder / CONFIG).read_text())
    assert {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "lora_dropout": 0.0}.items() <= config.items()
    assert config["base_model_name_or_path"] == "base"
    assert config["target_modules"] == [
        "down_proj", "gate", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip


def test_short_names_mean_the_adapted_modules_alone() -> None:
    """As peft looks for them: a name that is equal, or ends in a dot and the target."""
    every = {f"model.layers.{n}.mlp.{x}_proj" for n in range(2) for x in ("up", "down")} | {
        f"model.layers.1.mlp.experts.{e}.up_proj" for e in range(2)
    }
    chosen = {name for name in every if "experts" in name or name.endswith("down_proj")}
    targets = target_modules(chosen, every)
    assert "down_proj" in targets
    assert "up_proj" not in targets
    assert {n for n in every if any(n == t or n.endswith(f".{t}") for t in targets)} == chosen


def test_an_adapter_comes_back_bit_for_bit(tmp_path: Path, checkpoint: HfCheckpoint) -> None:
    torch.manual_seed(1)
    folder = written(tmp_path / "adapter")
    torch.manual_seed(1)
    expected = factors()
    found = read_adapter(folder, LORA, modules(), checkpoint)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = Config.model_validate(
        {"model": {"checkpoint": "x"}, "learner": {"lora": {**LORA.model_dump(), "adapter": str(folder)}}}
    )
    requested = requested_adapters(config.learner, config.seed, read_hf_config(checkpoint.folder), checkpoint)
    assert requested is not None
    assert requested.factor_names == expected.keys()
    module = "model.layers.0.mlp.gate"
    assert torch.equal(requested.start.factors(module, 2, HIDDEN)[1], expected[factor_name(module, B)])


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 4},
        {"lora_alpha": 7},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"peft_type": "IA3"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"fan_in_fan_out": True},
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    tmp_path: Path, checkpoint: HfCheckpoint, changes: dict[str, object]
) -> None:
    folder = written(tmp_path / "adapter", **changes)
    with pytest.raises(CheckpointError, match="another kind than this run trains") as caught:
        read_adapter(folder, LORA, modules(), checkpoint)
    assert next(iter(changes)) in caught.value.where


@pytest.mark.parametrize("what", ["missing", "more", "shape", "nan"])
def test_factors_that_do_not_fit_are_refused(tmp_path: Path, checkpoint: HfCheckpoint, what: str) -> None:
    folder = written(tmp_path / "adapter")
    tensors = load_file(folder / WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    if what == "missing":
        del tensors[name]
    elif what == "more":
        tensors[name.replace("q_proj", "q_norm")] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:-1] if what == "shape" else tensors[name] * float("nan")
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"other matrices|does not fit the model"):
        read_adapter(folder, LORA, modules(), checkpoint)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, checkpoint: HfCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="no configuration that can be read"):
        read_adapter(tmp_path / "nowhere", LORA, modules(), checkpoint)
    folder = written(tmp_path / "adapter")
    (folder / WEIGHTS).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="no weights that can be read"):
        read_adapter(folder, LORA, modules(), checkpoint)


def test_adapters_know_their_base_and_their_scale() -> None:
    own = Identity(7, LORA)
    own.check(own.counters())
    for other, what in (
        (Identity(8, LORA).counters(), "another model"),
        (Identity(7, LoraConfig(rank=3, alpha=3.0)).counters(), "another scale"),
        ({}, "another model"),
    ):
        with pytest.raises(CheckpointError, match=what):
            own.check(other)
