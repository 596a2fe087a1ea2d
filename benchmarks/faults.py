"""Faults that `benchmarks.planted_faults` plants into a checkpoint, with the cause that the doctor should name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SEVERITIES = ("mild", "medium", "severe")

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, object], int], None]
"""Alters a checkpoint's tensors and config.json in place, for a seed."""


@dataclass(frozen=True)
class Planted:
    """A fault at one severity.

    Attributes:
        expected: the cause that the doctor should name; `none` for a control.
        change: of the learner's checkpoint.
        learner: further settings of the learner's side.
        recorded: the recording to learn from.
    """

    name: str
    severity: str
    expected: str
    change: Change | None = None
    learner: tuple[str, ...] = ()
    recorded: str = "clean"


def faults(versions: Sequence[Path]) -> Iterator[Planted]:
    """Every fault that a recording can show. `versions`: later weights of the same model, near to far."""
    yield Planted("clean", "severe", "none")
    yield Planted("clean, top-p 0.8", "severe", "none", recorded="top_p 0.8")
    for severity, folder in zip(SEVERITIES, versions, strict=False):
        yield Planted("weights of another version", severity, "weights", _replaced_by(folder))
    for severity, factor in zip(SEVERITIES, (1.2, 3.0, 30.0), strict=True):
        yield Planted("rope base", severity, "positions", _rope(factor))
    for severity, bits in zip(SEVERITIES, (10, 7, 5), strict=True):
        yield Planted("rounded weights", severity, "precision", _rounded(bits))
    yield Planted("bfloat16 rollout", "severe", "precision", recorded="bfloat16")
    for severity, size in zip(SEVERITIES, (0.05, 0.2, 0.6), strict=True):
        yield Planted("router noise", severity, "routing", _router_noise(size))
    for severity, temperature in zip(SEVERITIES, (1.02, 1.1, 1.4), strict=True):
        yield Planted("temperature", severity, "temperature", learner=(f"rollout.temperature={temperature}",))
    for severity, top_p in zip(SEVERITIES, (0.98, 0.9, 0.8), strict=True):
        yield Planted("mask off", severity, "mask", learner=("sampling_mask.mode=off",), recorded=f"top_p {top_p}")
    for severity, share in zip(SEVERITIES, (0.1, 0.5, 1.0), strict=True):
        yield Planted("one expert permuted", severity, "expert", _permuted(share))


def _replaced_by(folder: Path) -> Change:
    def change(tensors: Tensors, _config: dict[str, object], _seed: int) -> None:
        for path in folder.glob("*.safetensors"):
            tensors.update(load_file(path))

    return change


def _rope(factor: float) -> Change:
    def change(_tensors: Tensors, config: dict[str, object], _seed: int) -> None:
        rope = config["rope_parameters"]
        assert isinstance(rope, dict)
        rope["rope_theta"] *= factor

    return change


def _rounded(bits: int) -> Change:
    """To `bits` bits of significand (bfloat16 has 8)."""

    def change(tensors: Tensors, _config: dict[str, object], _seed: int) -> None:
        for name, tensor in tensors.items():
            mantissa, exponent = torch.frexp(tensor)
            tensors[name] = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)

    return change


def _router_noise(size: float) -> Change:
    def change(tensors: Tensors, _config: dict[str, object], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                tensors[name] = tensor + size * tensor.std() * torch.randn(tensor.shape, generator=generator)

    return change


def _permuted(share: float) -> Change:
    """The rows of one expert's up projection, of which `share` are permuted; which expert depends on the seed."""

    def change(tensors: Tensors, _config: dict[str, object], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        name = f"model.layers.{1 + seed % 2}.mlp.experts.{3 + seed}.up_proj.weight"
        tensor = tensors[name]
        rows = torch.randperm(len(tensor), generator=generator)[: max(2, round(share * len(tensor)))]
        tensors[name] = tensor.clone()
        tensors[name][rows] = tensor[rows.roll(1)]

    return change


def planted_checkpoint(checkpoint: Path, folder: Path, change: Change | None, seed: int) -> Path:
    """A copy of `checkpoint` with the fault in it."""
    shutil.copytree(checkpoint, folder)
    if change:
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        change(tensors, config, seed)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
