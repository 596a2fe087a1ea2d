"""The machine: releases, whether every part imports, and the device's rate: `python -m benchmarks.gpu.machine OUT`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

IMPORTS = ("megatron.core", "deepspeed", "sgl_kernel", "sglang.srt.server_args", "transformer_engine.pytorch")
PACKAGES = ("torch", "transformers", "sglang", "sglang-kernel", "megatron-core", "deepspeed", "transformer-engine")
WIDTH, REPEATS = 8192, 10


def release(package: str) -> str:
    """The installed release; empty: none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def import_error(module: str) -> str:
    """The last line that `import module` prints in a process of its own; empty where it imports."""
    words = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:200] if done.returncode else ""


def bfloat16_tflops() -> float:
    """10^12 operations per second of a matrix product of this device."""
    matrix = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    matrix @ matrix
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(REPEATS):
        matrix @ matrix
    torch.cuda.synchronize()
    return 2 * WIDTH**3 * REPEATS / (time.perf_counter() - start_s) / 1e12


def main(out: Path) -> None:
    figures: dict[str, object] = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        figures |= {"gpu": torch.cuda.get_device_name(), "bf16 TFLOP/s": round(bfloat16_tflops())}
    figures |= {package: release(package) or "not installed" for package in PACKAGES}
    figures |= {f"import {module}": import_error(module) or "works" for module in IMPORTS}
    out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
