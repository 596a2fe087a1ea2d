"""Expected answer of the engine's `/weights_checker`, computed from Hugging Face tensors one at a time.

Every rank of the engine hashes each tensor that it holds (`engine_tensors`): on the CPU the first 8 bytes of the
SHA-256 of its contiguous bytes, on CUDA the hash of `gpu_hash`. A fused tensor is the concatenation of the slices of
its parts along the leading axis. So its hash covers the slices' bytes in order, and neither the fused tensor nor
the slice of a rank need exist here. What several ranks hold alike is hashed once.

Source: SGLang 0.5.23, `srt/utils/weight_checker.py` and `tensor_hash`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moe_trm.errors import SyncError
from moe_trm.rollout.servers.backend import Digests
from moe_trm.rollout.sglang.engine_tensors import EngineShape, layout_of
from moe_trm.rollout.sglang.gpu_hash import GpuTensorHash
from moe_trm.sync.tensors import tensor_bytes


class Hasher(Protocol):
    """The hash of an engine's device, of tensors whose bytes follow each other."""

    def update(self, tensor: Tensor, /) -> None: ...

    def hexdigest(self) -> str: ...


class CpuTensorHash:
    """That of a CPU."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def update(self, tensor: Tensor) -> None:
        """Take the next bytes."""
        self._sha256.update(tensor_bytes(tensor))

    def hexdigest(self) -> str:
        """The first 8 bytes of the SHA-256."""
        return self._sha256.hexdigest()[:16]


class EngineChecksums:
    """Accumulator of the checksums of an engine of this shape, for the tensors `names` of a push in any order.

    A part that arrives early is held until its turn. Threads may add at the same time, if none adds to the engine
    tensor of another (`parts`).
    """

    def __init__(self, names: Iterable[str], shape: EngineShape) -> None:
        self._shape, self._layout = shape, layout_of(frozenset(names), shape)
        self._order = self._layout.parts
        held_by = self._layout.held_by
        self._held_by = {**held_by, **{tensor: held_by[fused] for fused, tensor in self._layout.sums.items()}}
        self._hashers: dict[str, list[Hasher]] = {
            tensor: [GpuTensorHash() if shape.device == "cuda" else CpuTensorHash() for _ in {*numbers}]
            for tensor, numbers in self._held_by.items()
        }
        self._taken = dict.fromkeys(self._order, 0)
        self._held: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of the push, once. Raises `SyncError` where the ranks cannot share it in equal pieces."""
        fused = self._layout.tensor_of[name]
        self._held[name] = tensor
        parts = self._order[fused]
        while self._taken[fused] < len(parts) and parts[self._taken[fused]] in self._held:
            part = parts[self._taken[fused]]
            self._hash(fused, part, self._held.pop(part))
            self._taken[fused] += 1

    def add_bytes(self, name: str, data: memoryview, dtype: torch.dtype) -> bool:
        """Take the next tensor of its engine tensor by its bytes, once.

        False where they are not what the engine hashes, because it casts, turns, pads or slices the tensor, or where
        others come first: then nothing is taken.
        """
        fused = self._layout.tensor_of[name]
        place = self._taken[fused]
        if self._layout.as_is[fused] != dtype or self._order[fused][place] != name:
            return False
        self._hashers[fused][0].update(torch.frombuffer(data, dtype=torch.uint8))
        self._taken[fused] = place + 1
        return True

    def parts(self) -> tuple[Sequence[str], ...]:
        """The parts of each engine tensor, in order."""
        return tuple(self._order.values())

    def result(self) -> Digests:
        """Checksum by engine tensor, of each rank. Raises `SyncError` when a tensor never came."""
        missing = [name for fused, parts in self._order.items() for name in parts[self._taken[fused] :]]
        if missing:
            raise SyncError(
                "tensors of the push are missing", got=_some(missing), expected="every tensor of the manifest"
            )
        digests = {tensor: [h.hexdigest() for h in hashers] for tensor, hashers in self._hashers.items()}
        return [
            {tensor: digests[tensor][numbers[rank]] for tensor, numbers in self._held_by.items()}
            for rank in range(self._shape.ranks.total)
        ]

    def _hash(self, fused: str, part: str, tensor: Tensor) -> None:
        place, cut = self._taken[fused], self._layout.cuts[part]
        dtype, held = self._layout.dtypes[fused]
        takers: dict[int, list[int]] = {}
        for number, recipe in enumerate(self._layout.recipes[fused]):
            if (piece := recipe[place]) is not None:
                takers.setdefault(piece, []).append(number)
        pieces = cut.pieces(self._shape.ranks)
        for piece, numbers in takers.items():
            try:
                held_slice = cut.piece(tensor, piece, pieces).to(dtype).to(held)
            except ValueError as error:
                raise _uneven(part, error) from error
            held_slice = (held_slice.mT if self._shape.turned(part) else held_slice).contiguous()
            for number in numbers:
                self._hashers[fused][number].update(held_slice)
            if fused in self._layout.sums:
                for number in numbers:
                    self._hashers[self._layout.sums[fused]][number].update(held_slice + 1)


def compare(expected: Mapping[str, str], reported: Mapping[str, str], where: str) -> None:
    """Raise `SyncError` that names the tensors unless the engine reports exactly the expected checksums."""
    differing = sorted(name for name in expected.keys() & reported.keys() if expected[name] != reported[name])
    absent = sorted(expected.keys() - reported.keys())
    unknown = sorted(reported.keys() - expected.keys())
    if not (differing or absent or unknown):
        return
    parts = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("differ", differing), ("not in the engine", absent), ("never pushed", unknown))
        if names
    ]
    raise SyncError(
        "the engine does not hold the weights that were pushed",
        where=where,
        got="; ".join(parts),
        expected=f"{len(expected)} tensors with the checksums of the push",
        fix=(
            "Do not train on its samples. Push again; if it repeats, look for damaged storage or another writer of "
            "the push folder."
        ),
    )


def _uneven(name: str, error: ValueError) -> SyncError:
    return SyncError(
        "the ranks of the engine cannot share a tensor in equal pieces",
        where=name,
        got=str(error),
        fix="Set rollout.server.tensor_parallel to a number that divides the model's heads and widths.",
    )


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
