"""Tensors that several ranks hold alike, compared by digests: data-parallel copies, and what tensor ranks share.

A replica that is off by itself trains and scores its rows with other weights, while the push has those of one rank. No
figure of the mismatch need show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from moe_trm.errors import ReplicaError
from moe_trm.learner.data_group import DataGroup

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS_AT_ONCE = 1 << 22
"""Of which the products are in memory, 8 bytes each."""

_ROUNDING = 1e-5
"""Of norms: the same numbers, added in another order."""


def bits(tensor: Tensor) -> Tensor:
    """The flat elements of a tensor, their bits read as integers."""
    return tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def digest(tensor: Tensor) -> Tensor:
    """Scalar int64 of a tensor's bits b_i on its device: the sum of (2 i + 1) b_i modulo 2^64.

    It changes with any one element, since its factor is odd, and with any two that change places.
    """
    elements = bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, len(elements), _ELEMENTS_AT_ONCE):
        part = elements[begin : begin + _ELEMENTS_AT_ONCE].long()
        places = torch.arange(begin, begin + len(part), device=tensor.device)
        total += (part * (2 * places + 1)).sum()
    return total


def compare_replicas(held: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Raise `ReplicaError` on every rank where ranks hold different bits under the same name. Collective.

    `held`: this rank's tensors; parts of one tensor that differ between ranks have different names. Ranks exchange 24
    bytes for each tensor.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    assert dist.group.WORLD is not None
    # The first row is the same everywhere: ranks that hold nothing send something, too.
    names, digests = {0: ""}, [torch.zeros((), dtype=torch.int64, device=device)]
    for name, tensor in held:
        names[_number(name)] = name
        digests.append(digest(tensor).to(device))
    ranks_here = torch.full((len(names),), dist.get_rank(), device=device)
    rows = torch.stack([torch.tensor(list(names), device=device), ranks_here, torch.stack(digests)], dim=1)
    group = DataGroup(dist.group.WORLD, device)
    numbers, ranks, digests_held = group.gather(rows.flatten()).view(-1, 3).cpu().unbind(1)
    tensors, place = torch.unique(numbers, return_inverse=True)
    smallest, largest = (
        torch.zeros_like(tensors).scatter_reduce(0, place, digests_held, way, include_self=False)
        for way in ("amin", "amax")
    )
    differing = (smallest != largest).nonzero().flatten()
    if not len(differing):
        return
    # All ranks are here, with the same figures; only holders of the tensor know its name.
    holders = place == differing[0]
    is_first_holder = int(ranks[holders].min()) == dist.get_rank()
    encoded = names[int(tensors[differing[0]])].encode() if is_first_holder else b""
    name_bytes = bytes(group.gather(torch.tensor(list(encoded), dtype=torch.uint8)).tolist())
    values = dict(zip(ranks[holders].tolist(), digests_held[holders].tolist(), strict=True))
    raise _fault(name_bytes.decode(), values, f"{len(differing)} of {len(tensors) - 1} tensors differ")


def agreed_norm(norm: float, device: torch.device) -> float:
    """The gradient's norm, the same number on every rank: the largest of theirs. Collective.

    Replicas have the same gradient, so norms differ by rounding at most. Raises `ReplicaError` on every rank where they
    differ by more, or where some alone are not finite: the step must not be made.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return norm
    values = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([norm], dtype=torch.float64, device=device))
    norms = torch.cat(values)
    finite = norms.isfinite()
    if not bool(finite.any()):
        return norm
    smallest, largest = float(norms.min()), float(norms.max())
    if bool(finite.all()) and largest - smallest <= _ROUNDING * largest:
        return largest
    raise ReplicaError(
        "learner ranks have gradients of different norms",
        where="the optimizer step, which was not made",
        got=", ".join(f"rank {rank}: {value:.9g}" for rank, value in enumerate(norms.tolist())),
        expected=f"the same norm on all ranks, within {_ROUNDING:g} of it",
        fix="A rank has other weights, or a sum over ranks went wrong on it. Start the run again: it goes on from its "
        "checkpoint. If it comes back, test the memory of that rank's device.",
    )


def _fault(name: str, values: Mapping[int, int], extent: str) -> ReplicaError:
    """The error, from the digests by rank: it names ranks without the digest of most, or all where none has most."""
    (common_digest, num_common), *_ = Counter(values.values()).most_common()
    odd_ranks = sorted(
        rank for rank, value in values.items() if 2 * num_common <= len(values) or value != common_digest
    )
    return ReplicaError(
        "learner ranks hold different values of a tensor that they share",
        where=f"{name}, {'rank' if len(odd_ranks) == 1 else 'ranks'} {', '.join(map(str, odd_ranks))}",
        got=f"{len(set(values.values()))} different digests on ranks {', '.join(map(str, sorted(values)))}; {extent}",
        expected="the same bits on all of these ranks",
        fix="Start it again: it goes on from its last checkpoint, which all ranks load. That may hold the wrong values "
        "already: resume from an older one where figures broke before. If it comes back, test the memory of that rank.",
    )


def _number(name: str) -> int:
    """64 bits of a name, as a signed number."""
    return int(xxhash.xxh3_64_intdigest(name.encode())) - (1 << 63)
