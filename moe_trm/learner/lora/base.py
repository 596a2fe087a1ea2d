"""The base that adapters belong to: a checksum by which a checkpoint of adapters knows its model again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.config.schema import LoraConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.replicas import bits

CHECKSUM, SCALE = "lora_base_checksum", "lora_scale_millionths"
_MODULUS = 1 << 47


def base_checksum(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> int:
    """A number that changes with any bit of the base, the same on every layout. Collective over ranks of `device`.

    Each element's bits count as an integer, times a number that its tensor's name gives; the sum over the model is
    taken modulo 2^47. It does not see elements that change places within a tensor. Over all ranks, `tensors` have each
    element once, beside zeros.
    """
    total = 0
    for name, tensor in tensors:
        total_bits = bits(tensor).sum(dtype=torch.int64)
        weight = int.from_bytes(hashlib.sha256(name.encode()).digest()[:5], "big") | 1
        total = (total + int(total_bits) * weight) % _MODULUS
    total_sum = torch.tensor(total, dtype=torch.int64, device=device)
    dist.all_reduce(total_sum)
    return int(total_sum) % _MODULUS


class Identity:
    """The base and the scale of adapters in training, as counters of a checkpoint.

    Args:
        checksum: of the base.
        lora: the adapters.
    """

    def __init__(self, checksum: int, lora: LoraConfig) -> None:
        self._counters = {CHECKSUM: checksum, SCALE: round(1e6 * lora.scale)}

    def counters(self) -> dict[str, int]:
        """State for a checkpoint, the same on every rank."""
        return dict(self._counters)

    def check(self, counters: Mapping[str, int]) -> None:
        """Raise `CheckpointError` where adapters with these counters belong to another base or scale."""
        for name, what, fix in (
            (CHECKSUM, "model", "Set model.checkpoint to the one that the run started from."),
            (SCALE, "scale", "Set learner.lora.alpha and learner.lora.rank as they were."),
        ):
            if counters.get(name) != self._counters[name]:
                raise CheckpointError(
                    f"the checkpoint's adapters belong to another {what}",
                    where=name,
                    got=counters.get(name, "a checkpoint without adapters"),
                    expected=self._counters[name],
                    fix=fix,
                )
