"""Saved factors of both learners as merged weights and as peft's files, without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.published import make_published
from moe_trm.cli import main as moe_trm
from moe_trm.config.schema import LoraConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name
from moe_trm.learner.lora.files import WEIGHTS, read_adapter
from moe_trm.learner.lora.targets import adapted_modules, modules_of
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.tiny.families import make_family
from moe_trm.tools.export.adapter import export_adapter
from moe_trm.tools.export.checkpoint import export_checkpoint
from tests.published_models import published_config
from tests.unit.tools.export.test_saved_weights import megatron_parameters, save

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "targets": ["attention", "experts", "router"]}


def requested(start: Path, lora: dict[str, Any]) -> frozenset[str]:
    hf = read_hf_config(start)
    return adapted_modules(modules_of(hf, HfCheckpoint(start).names), LoraConfig(**lora), hf)


def half_factors(start: Path, lora: dict[str, Any]) -> dict[str, Tensor]:
    """Of each matrix by its name; the double of them is saved."""
    source, found = HfCheckpoint(start), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(0)
    for module in sorted(requested(start, lora)):
        outputs, inputs = source.shape(f"{module}.weight")
        for factor, shape in ((A, (2, inputs)), (B, (outputs, 2))):
            found[factor_name(module, factor)] = torch.randn(shape, generator=generator) / 8
    return found


def deepspeed_form(start: Path, factors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Stacked, by the names of transformers' model, written down here once more."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in factors.items():
        module, factor, _ = name.rsplit(".", 2)
        letter = factor[-1]
        owner, _, leaf = module.rpartition(".")
        if ".experts." not in module:
            yield f"{module}.lora_weight.parts.0.{letter}", tensor
            continue
        layer, _, expert = owner.rpartition(".")
        place = {"gate_proj": "gate_up_proj.parts.0", "up_proj": "gate_up_proj.parts.1"}.get(leaf, "down_proj.parts.0")
        stacks.setdefault(f"{layer}.lora_{place}.{letter}", {})[int(expert)] = tensor
    for name, by_expert in stacks.items():
        yield name, torch.stack([by_expert[expert] for expert in sorted(by_expert)])


@pytest.mark.parametrize("backend", ["megatron", "deepspeed"])
def test_merged_weights_and_peft_files_of_both_learners(tmp_path: Path, backend: str) -> None:
    start = make_family("qwen3_moe", tmp_path / "start", num_hidden_layers=2, num_experts=4)
    factors = half_factors(start, LORA)
    tensors = iter(factors.items()) if backend == "megatron" else deepspeed_form(start, factors)
    checkpoint = save(tmp_path, start, backend, tensors, dtype="bfloat16", lora=LORA)
    exported, source = HfCheckpoint(export_checkpoint(checkpoint, tmp_path / "out")), HfCheckpoint(start)
    assert exported.names == source.names
    adapted = requested(start, LORA)
    assert len(adapted) == 2 * (4 + 1 + 12)
    for name in exported.names:
        base, module = source.read(name).bfloat16(), name.removesuffix(".weight")
        if module not in adapted:
            assert torch.equal(exported.read(name), base), name
            continue
        a, b = (2 * factors[factor_name(module, factor)].bfloat16().double() for factor in (A, B))
        expected = (base.double() + 2.0 * (b @ a)).bfloat16()
        # The sum is float32: next to the middle of two values it may round to the other one.
        assert float((exported.read(name) == expected).double().mean()) > 0.99, name
        torch.testing.assert_close(exported.read(name).double(), expected.double(), rtol=2**-7, atol=1e-6)
    folder = export_adapter(checkpoint, tmp_path / "adapter")
    found = read_adapter(folder, LoraConfig(**LORA), adapted, source)
    assert all(torch.equal(found[name], (2 * factors[name]).bfloat16()) for name in factors)
    assert len(load_file(folder / WEIGHTS)) == len(factors)


def test_an_export_refuses_what_it_cannot_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = make_family("qwen3_moe", tmp_path / "start", num_hidden_layers=2, num_experts=4)
    factors = half_factors(start, LORA)
    lacking = {name: tensor for name, tensor in factors.items() if ".q_proj." not in name}
    checkpoint = save(tmp_path / "lacking", start, "megatron", iter(lacking.items()), lora=LORA)
    with pytest.raises(CheckpointError, match="does not hold this tensor"):
        export_adapter(checkpoint, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    plain = save(tmp_path / "plain", start, "megatron", megatron_parameters(start))
    assert moe_trm(["export", str(plain), "--adapter", "--out", str(tmp_path / "adapter")]) == 2
    assert "this run trained no adapter" in capsys.readouterr().err


def test_the_command_writes_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = make_family("qwen3_moe", tmp_path / "start", num_hidden_layers=1, num_experts=2)
    lora = {**LORA, "targets": ["router", "q_proj"]}
    checkpoint = save(tmp_path, start, "megatron", iter(half_factors(start, lora).items()), lora=lora)
    assert moe_trm(["export", str(checkpoint), "--adapter"]) == 0
    assert "adapter-000007: the adapter after step 7" in capsys.readouterr().out
    assert sorted(path.name for path in (checkpoint.parent / "adapter-000007").iterdir()) == [
        "adapter_config.json",
        WEIGHTS,
    ]


@pytest.mark.parametrize(
    ("family", "targets", "warned"),
    [("olmoe", ["experts"], True), ("olmoe", ["attention"], False), ("qwen3_moe", ["experts"], False)],
)
def test_an_adapter_that_peft_cannot_load_is_written_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, targets: list[str], warned: bool
) -> None:
    start = make_family(family, tmp_path / "start", num_hidden_layers=1, num_experts=2)
    lora = {**LORA, "targets": targets}
    checkpoint = save(tmp_path, start, "megatron", iter(half_factors(start, lora).items()), lora=lora)
    assert moe_trm(["export", str(checkpoint), "--adapter"]) == 0
    assert ("does not load adapters of OlmoeForCausalLM's experts" in capsys.readouterr().out) == warned


@pytest.mark.parametrize(
    ("release", "targets", "backend"),
    [
        ("deepseek_v3", LORA["targets"], "megatron"),
        ("gpt_oss_20b", ["attention"], "deepspeed"),
        pytest.param("deepseek_v3", LORA["targets"], "deepspeed", marks=pytest.mark.slow),
        pytest.param("gpt_oss_20b", ["attention"], "megatron", marks=pytest.mark.slow),
    ],
)
def test_a_published_export_rounds_merged_matrices_anew_and_leaves_the_base_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], release: str, targets: list[str], backend: str
) -> None:
    """FP8 and layers that predict tokens, or MXFP4, whose experts have no adapters. One matrix did not change."""
    start = make_published(published_config(release), tmp_path / "start")
    lora = {**LORA, "targets": targets}
    factors = {name: tensor / 30 for name, tensor in half_factors(start, lora).items()}
    still = "model.layers.1.self_attn.o_proj"
    factors[factor_name(still, B)].zero_()
    tensors = iter(factors.items()) if backend == "megatron" else deepspeed_form(start, factors)
    checkpoint = save(tmp_path, start, backend, tensors, dtype="bfloat16", lora=lora)
    assert moe_trm(["export", str(checkpoint), "--published", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    plain = HfCheckpoint(export_checkpoint(checkpoint, tmp_path / "plain"))
    given, written = files_of(start), files_of(tmp_path / "out")
    assert given.keys() == written.keys()
    source, out, adapted = HfCheckpoint(start), HfCheckpoint(tmp_path / "out"), requested(start, lora) - {still}
    changed = lost = 0.0
    for name in out.names | out.prediction:
        old, new, trained = source.read(name).float(), out.read(name).float(), plain.read(name).float()
        if name.removesuffix(".weight") not in adapted:
            assert all(torch.equal(bits(given[part]), bits(written[part])) for part in out.parts(name)), name
        elif len(out.parts(name)) == 1:
            assert torch.equal(new, trained), name
        else:
            # Rounding never takes a matrix further from what was trained than its start is.
            assert float((new - trained).norm()) <= 1.01 * float((old - trained).norm()), name
            changed += float((old - trained).square().sum())
            lost += float((new - trained).square().sum())
    if release == "deepseek_v3":
        share = (lost / changed) ** 0.5
        assert 0 < share < 1
        count = sum(len(out.parts(f"{module}.weight")) == 2 for module in adapted)
        assert f"rounding  {share:.0%} of what training changed in {count} tensors" in printed
        assert ("--adapter" in printed) == (share > 0.5)
    else:
        assert "rounding" not in printed


def files_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
