"""Worker extension: loads a push from its folder, and digests what it reads.

vLLM adds this class to its worker (`--worker-extension-cls`), so `self` is that worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open


class WeightLoader:
    """Methods that `collective_rpc` calls in every worker."""

    model_runner: Any

    def moe_trm_load(self, folder: str) -> dict[str, str]:
        """Load every tensor of the safetensors files in `folder`.

        Returns the XXH3-128 of the bytes of each, by its name. Raises `ValueError` for a folder without tensors, which
        vLLM would load without a word.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"no safetensors files in {folder}")
        digests: dict[str, str] = {}
        _set_up_experts_again(self.model_runner.get_model())
        self.model_runner.reload_weights(weights_iterator=_tensors(files, digests))
        return digests


def _tensors(files: list[Path], digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_tensor(name)
                if name in digests:
                    raise ValueError(f"{name} is in two files")
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                digests[name] = xxhash.xxh3_128_hexdigest(data)
                yield name, tensor


def _set_up_experts_again(model: torch.nn.Module) -> None:
    """Let the experts of a CPU be packed by this load, too.

    vLLM 0.30 packs them where their kernel is set up, and that is at the first load only
    (`UnquantizedFusedMoEMethod._setup_kernel`). A later load would leave them unpacked, which the kernel misreads
    without a word. A method without a kernel sets it up.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(getattr(method, "unquantized_backend", None), "name", "") == "CPU":
            method.moe_kernel = None
