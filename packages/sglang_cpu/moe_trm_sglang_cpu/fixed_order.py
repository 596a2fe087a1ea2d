"""Sums in an order that does not depend on what else is in a batch, on a CPU and in float32.

A row's product with a matrix is the same to the bit only among products of one shape: with few rows torch's library
takes other kernels, which add up in another order. Here all rows go through products of `ROWS` rows, and functions
whose last numbers take a scalar path through whole vectors. torch's own registry of kernels brings them to all code of
a process. A rollout server and a learner that both do so compute alike.

Shape letters: B rows, C columns that ask, S columns that are seen, N query heads, G key/value heads, D head dimension,
M, K, L sizes of matrices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS = 32
"""Rows of every product."""
KEYS = 64
"""Keys of every product in attention, and a multiple of the numbers of a vector."""


@contextmanager
def fixed_order() -> Iterator[None]:
    """All code of this process computes so until the end of the `with`."""
    library = install()
    try:
        yield
    finally:
        library._destroy()


def install() -> Any:
    """Register the kernels; they stay as long as what is returned is not destroyed."""
    fixed = _Products()
    kernels: dict[str, Callable[..., Tensor]] = {
        "mm": fixed.mm,
        "mm.out": fixed.mm_out,
        "bmm": fixed.bmm,
        "addmm": fixed.addmm,
        "sigmoid": partial(_whole_vectors, _kernel("sigmoid")),
        "silu": partial(_whole_vectors, _kernel("silu")),
    }
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns of every kernel that takes the place of its own.
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    return library


def _kernel(name: str) -> Callable[..., Tensor]:
    """torch's own kernel for a CPU."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return partial(torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed, keys)


class _Products:
    """Products of float32 matrices, `ROWS` rows at a time. Others are torch's own."""

    def __init__(self) -> None:
        self._mm, self._bmm = _kernel("mm"), _kernel("bmm")

    def mm(self, one_MK: Tensor, other_KL: Tensor) -> Tensor:
        if not _is_fixed(one_MK, other_KL):
            return self._mm(one_MK, other_KL)
        rows = _lots(one_MK)
        return self._bmm(rows, other_KL.expand(len(rows), -1, -1)).flatten(0, 1)[: len(one_MK)]

    def mm_out(self, one_MK: Tensor, other_KL: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(self.mm(one_MK, other_KL))

    def addmm(self, added: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return self.mm(first, second) * alpha + added * beta

    def bmm(self, one_BMK: Tensor, other_BKL: Tensor) -> Tensor:
        if not _is_fixed(one_BMK, other_BKL):
            return self._bmm(one_BMK, other_BKL)
        num, count = one_BMK.shape[:2]
        rows = _lots(one_BMK)
        lots = len(rows) // num
        repeated = other_BKL if lots == 1 else other_BKL.repeat_interleave(lots, 0)
        return self._bmm(rows, repeated).unflatten(0, (num, lots)).flatten(1, 2)[:, :count]  # type: ignore[no-untyped-call, no-any-return]


def _is_fixed(first: Tensor, second: Tensor) -> bool:
    return first.dtype == torch.float32 and first.numel() > 0 and second.numel() > 0


def _lots(rows: Tensor) -> Tensor:
    """`[..., M, K]` as `[lots, ROWS, K]`, the last lot of each matrix filled up with zeros."""
    count, width = rows.shape[-2:]
    return pad(rows, (0, 0, 0, -count % ROWS)).reshape(-1, ROWS, width)


def _whole_vectors(kernel: Callable[..., Tensor], values: Tensor) -> Tensor:
    """A function of each number, without numbers left over behind the last whole vector."""
    flat = values.flatten()
    return kernel(pad(flat, (0, -len(flat) % KEYS)))[: len(flat)].view(values.shape)


def attend(query_BCND: Tensor, key_BSGD: Tensor, value_BSGD: Tensor, hidden_BCS: Tensor, scale: float) -> Tensor:
    """Attention over the keys that are not hidden, `[B, C, N, D]`. Hidden keys add zeros, however many they are.

    `exp(s - max s) [v, 1]` is added up over lots of `KEYS` keys, one after the other. The last column, of ones, becomes
    what divides the others.
    """
    groups, extra = key_BSGD.shape[2], -key_BSGD.shape[1] % KEYS
    rows, columns, heads, dim = query_BCND.shape
    shape = columns, heads // groups
    query = query_BCND.reshape(rows, columns, groups, -1, dim).transpose(1, 2).reshape(rows * groups, -1, dim)
    lots = [pad(tensor, (0, 0, 0, 0, 0, extra)).transpose(1, 2).flatten(0, 1) for tensor in (key_BSGD, value_BSGD)]
    keys, values = torch.split(lots[0], KEYS, 1), torch.split(pad(lots[1], (0, 1), value=1.0), KEYS, 1)
    scores = torch.cat([query @ key.mT for key in keys], -1) * scale
    hidden = pad(hidden_BCS, (0, extra), value=True).repeat_interleave(groups, 0)
    scores = scores.view(len(scores), *shape, -1).masked_fill(hidden.unsqueeze(2), -torch.inf).flatten(1, 2)
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    total, *later = (weight @ value for weight, value in zip(torch.split(weights, KEYS, -1), values, strict=True))
    for part in later:
        total = total + part
    context = (total[..., :-1] / total[..., -1:]).view(rows, groups, *shape, -1)
    return context.transpose(1, 2).flatten(2, 3)
