"""The mathematics of slices: what each rank of a server holds of a tensor that is pushed whole.

A group of g consecutive ranks shares a tensor. It is cut along one dimension into p = min(g, heads) equal pieces, and
rank r holds the piece number

    (r mod g) // (g / p),

so that neighbours hold the same one where there are more ranks than heads. Experts are shared otherwise: of E experts
in G groups, rank r of R holds the expert e whole, or its slice, where e // (E / G) = r // (R / G).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Group = Literal["attention", "experts", "shared", "dense", "embedding", "head"]


class Ranks(NamedTuple):
    """The ranks of one server, `total` in all, and how many consecutive ones share a tensor of each kind.

    `experts`: that share one expert; `shared`: experts that every token passes; `dense`: layers without experts.
    """

    total: int = 1
    attention: int = 1
    experts: int = 1
    shared: int = 1
    dense: int = 1
    embedding: int = 1
    head: int = 1

    @property
    def expert_groups(self) -> int:
        """Groups of ranks with experts of their own."""
        return self.total // self.experts

    def holds(self, rank: int, expert: int, num_experts: int) -> bool:
        """True where the rank has this expert, or its slice."""
        return expert // (num_experts // self.expert_groups) == rank // self.experts


ALONE = Ranks()


@dataclass(frozen=True)
class Slicing:
    """The way in which ranks share a tensor.

    Attributes:
        dim: along which it is cut; None: every rank holds all of it.
        group: the ranks that share it.
        heads: most pieces that there can be; 0: any number.
        sections: lengths along `dim` of parts that are cut one by one, the pieces of a rank side by side again; none:
            it is one part.
        multiple: of rows, to which zeros are added before the cut; as many times more where the ranks do not divide it.
        once: the first rank of the group holds all of it, and the others zeros. Then there is no `dim`.
    """

    dim: int | None = None
    group: Group = "attention"
    heads: int = 0
    sections: tuple[int, ...] = ()
    multiple: int = 1
    once: bool = False

    def pieces(self, ranks: Ranks) -> int:
        """The number of different pieces."""
        if self.dim is None and not self.once:
            return 1
        size: int = getattr(ranks, self.group)
        return min(size, self.heads) if self.heads else size

    def piece_of(self, rank: int, ranks: Ranks) -> int:
        """The number of the piece that the rank holds."""
        size: int = getattr(ranks, self.group)
        return rank % size // (size // self.pieces(ranks)) if self.pieces(ranks) > 1 else 0

    def piece(self, tensor: Tensor, number: int, pieces: int) -> Tensor:
        """Piece `number` of so many, a view where it can be.

        Raises `ValueError` where the pieces would not be equal.
        """
        if self.once:
            return tensor if number == 0 else torch.zeros_like(tensor)
        if self.multiple > 1:
            return self._padded(tensor, number, pieces)
        if self.dim is None or pieces == 1:
            return tensor
        slices = list(self._slices(tensor, number, pieces))
        return slices[0] if len(slices) == 1 else torch.cat(slices, self.dim)

    def _slices(self, tensor: Tensor, number: int, pieces: int) -> Iterator[Tensor]:
        assert self.dim is not None
        start = 0
        for length in self.sections or (tensor.shape[self.dim],):
            if length % pieces:
                raise ValueError(f"{length} along dimension {self.dim} are not {pieces} equal pieces")
            yield tensor.narrow(self.dim, start + number * (length // pieces), length // pieces)
            start += length
        if start != tensor.shape[self.dim]:
            raise ValueError(f"sections of {self.sections} in {tensor.shape[self.dim]} along dimension {self.dim}")

    def _padded(self, tensor: Tensor, number: int, pieces: int) -> Tensor:
        rows = len(tensor)
        multiple = self.multiple
        if -(-rows // multiple) * multiple % pieces:
            multiple *= pieces
        length = -(-rows // multiple) * multiple // pieces
        filled = tensor[number * length : (number + 1) * length]
        padding = tensor.new_zeros((length - len(filled), *tensor.shape[1:]))
        return torch.cat([filled, padding]) if len(padding) else filled
