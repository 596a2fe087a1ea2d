"""Worker extension: loads a push from its folder or from broadcasts, and digests what it reads.

vLLM adds this class to its worker (`--worker-extension-cls`), so `self` is that worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from torch.distributed import PrefixStore, TCPStore

TIMEOUT = timedelta(seconds=300)
"""Longest wait for a sender, at every broadcast."""

Tensors = Iterable[tuple[str, torch.Tensor]]
Bucket = tuple[str, list[tuple[str, str, list[int]]]]
"""A broadcast: its group, and name, dtype and shape of the tensors whose bytes follow each other in it."""


class WeightLoader:
    """Methods that `collective_rpc` calls in every worker."""

    model_runner: Any
    groups: dict[str, dist.ProcessGroupGloo]

    def moe_trm_load(self, folder: str) -> dict[str, str]:
        """Load every tensor of the safetensors files in `folder`.

        Returns the XXH3-128 of the bytes of each, by its name. Raises `ValueError` for a folder without tensors, which
        vLLM would load without a word.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"no safetensors files in {folder}")
        return self._reload(_read(files))

    def moe_trm_join(self, meetings: list[tuple[str, str, int]]) -> None:
        """Form a group with each sender, from its name, address and port. Blocks until the senders have come."""
        if dist.get_world_size() != 1:
            raise ValueError("a broadcast reaches servers of one worker; others load folders")
        self.groups = {name: _joined(name, address, port) for name, address, port in meetings}

    def moe_trm_receive(self, buckets: list[Bucket]) -> dict[str, str]:
        """As `moe_trm_load`, from broadcasts, in order."""
        return self._reload(_received(self.groups, buckets))

    def _reload(self, tensors: Tensors) -> dict[str, str]:
        digests: dict[str, str] = {}
        _set_up_experts_again(self.model_runner.get_model())
        self.model_runner.reload_weights(weights_iterator=_digested(tensors, digests))
        return digests


def _read(files: list[Path]) -> Tensors:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)


def _joined(name: str, address: str, port: int) -> dist.ProcessGroupGloo:
    """The group of one sender and this worker; its keys have the prefixes of `moe_trm.sync.distributed.join_group`."""
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return dist.ProcessGroupGloo(keys, 1, 2, TIMEOUT)


def _received(groups: dict[str, dist.ProcessGroupGloo], buckets: list[Bucket]) -> Tensors:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    for group, entries in buckets:
        dtypes = [getattr(torch, dtype) for _, dtype, _ in entries]
        sizes = [prod(shape) * dtype.itemsize for (_, _, shape), dtype in zip(entries, dtypes, strict=True)]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        groups[group].broadcast([data], options).wait()
        for (name, _, shape), dtype, part in zip(entries, dtypes, data.split(sizes), strict=True):
            yield name, part.view(dtype).reshape(shape)


def _digested(tensors: Tensors, digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        if name in digests:
            raise ValueError(f"{name} is there twice")
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
