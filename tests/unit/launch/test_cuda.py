"""A machine whose GPUs torch cannot use is refused, with torch's own reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launch.start import cuda
from launch.start.cuda import check_gpus, cuda_problem, num_nvidia_gpus
from moe_trm.errors import ConfigError

BUS = {
    "0000:01:00.0": ("0x10de", "0x030200"),
    "0000:01:00.1": ("0x10de", "0x040300"),
    "0000:00:02.0": ("0x8086", "0x030000"),
}


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """A GPU, its sound device, and a display of another vendor."""
    for address, (vendor, kind) in BUS.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(f"{vendor}\n")
        (tmp_path / address / "class").write_text(f"{kind}\n")
    return tmp_path


def failing(message: str) -> Callable[[], None]:
    def init() -> None:
        raise RuntimeError(message)

    return init


def test_gpus_are_counted_on_the_bus(bus: Path) -> None:
    assert num_nvidia_gpus(bus) == 1
    assert num_nvidia_gpus(bus / "none") == 0


@pytest.mark.parametrize(
    ("built_for", "message", "reason", "expected"),
    [
        (None, "", "is built without CUDA", "a torch that is built for CUDA"),
        (
            "13.0",
            "Found no NVIDIA driver on your system. Please check",
            "Found no NVIDIA driver",
            "driver for CUDA 13.0",
        ),
        (
            "13.0",
            "The NVIDIA driver on your system is too old (found version 12020). Please update",
            r"too old \(found version 12020\)",
            "driver for CUDA 13.0",
        ),
    ],
)
def test_gpus_that_torch_cannot_use_are_refused_with_its_reason(
    built_for: str | None, message: str, reason: str, expected: str, bus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "init", failing(message))
    monkeypatch.setattr(cuda, "num_nvidia_gpus", lambda: num_nvidia_gpus(bus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match=reason) as caught:
        check_gpus()
    assert expected in str(caught.value.expected)
    assert "Please" not in cuda_problem()


def test_a_machine_without_gpus_or_with_usable_ones_is_accepted(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "num_nvidia_gpus", lambda: 0)
    check_gpus()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "num_nvidia_gpus", lambda: num_nvidia_gpus(bus))
    check_gpus()
