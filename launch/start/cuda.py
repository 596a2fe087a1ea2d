"""CUDA on this machine: why torch has no device, and whether the machine has GPUs that torch should see."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from moe_trm.errors import ConfigError

PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""A vendor on the PCI bus, and the beginning of the classes of its GPUs."""


def cuda_problem() -> str:
    """Why torch has no CUDA device, in its own words; empty where it has one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return "no CUDA device"


def num_nvidia_gpus(devices: Path = PCI) -> int:
    """GPUs on the PCI bus, whether or not there is a driver for them."""
    return sum(
        _read(device / "vendor") == NVIDIA and _read(device / "class").startswith(DISPLAY)
        for device in devices.glob("*")
    )


def check_gpus() -> None:
    """Refuse a machine with GPUs that torch cannot use: the run would go to its CPU. Raises `ConfigError`.

    An empty `CUDA_VISIBLE_DEVICES` is a decision for the CPU.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not (num_gpus := num_nvidia_gpus()):
        return
    if problem := cuda_problem():
        needs = f"a driver for CUDA {torch.version.cuda}" if torch.version.cuda else "a torch that is built for CUDA"
        raise ConfigError(
            "torch cannot use the NVIDIA GPUs of this machine",
            where="this machine",
            got=f"{num_gpus} on the PCI bus; {problem}",
            expected=needs,
            fix="Look at nvidia-smi and docs/install.md. CUDA_VISIBLE_DEVICES= in the environment means the CPU.",
        )


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip() if file.exists() else ""
