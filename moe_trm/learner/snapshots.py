"""Copies of a learner's weights in host memory, by name.

They are the frozen reference, and the versions that sampled rollouts still in flight. Each rank keeps its own part, so
a model of any size fits wherever its training state does. Values are kept bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from moe_trm.errors import LearnerError
from moe_trm.learner.checkpoint.pieces import Piece, PieceReader
from moe_trm.sync.rounding import Rounding

_SAVED = "snapshot/"
_REST = "-rest"
"""Ending of the copy that holds what an average loses to rounding."""


class Weights(Protocol):
    """The model's weights, without the optimizer, as pieces of global tensors."""

    def save_weights(self, kind: str) -> list[Piece]:
        """Host copies of this rank's part of the present weights, under `KIND/NAME`."""

    def load_weights(self, kind: str, reader: PieceReader) -> None:
        """Give the model the weights `KIND/NAME`. The optimizer's own copy stays as it is."""


class Snapshots:
    """Named copies of the parameters and buffers of `modules`.

    Args:
        modules: this rank's model chunks. Their tensors are exchanged in place, so wrappers and optimizers that hold
            them stay valid.
        inputs_first: stacked experts are `[E, I, O]` (experts, inputs, outputs), not `[E, O, I]`.
        computes_in: rounding of the weights in every pass (`computing`); None: passes use them as they are.
        trained_only: parameters without a gradient never change, and are in no copy. Such copies cannot be rounded.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        *,
        inputs_first: bool = False,
        computes_in: Rounding | None = None,
        trained_only: bool = False,
    ) -> None:
        assert not (trained_only and computes_in), "the rounding of a sum is not that of its parts"
        self._modules, self._inputs_first, self._computes_in = modules, inputs_first, computes_in
        self._trained_only = trained_only
        self._held: dict[str, list[Tensor]] = {}
        self._saved: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The names held, oldest first."""
        return tuple(self._held)

    def take(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        """Keep the present weights under `name`, in place of an older copy of that name. Returns their bytes.

        `saved`: `save` saves the copy. `rounding`: parameters, but not buffers, are kept as the engine has them after
        such a push.
        """
        assert not (self._trained_only and rounding), "the rounding of a sum is not that of its parts"
        self._held.pop(name, None)
        held = self._copy()
        self._held[name] = held if rounding is None else self._rounded(held, rounding)
        (self._saved.add if saved else self._saved.discard)(name)
        return sum(tensor.nbytes for tensor in self._held[name])

    def blend(self, name: str, share: float) -> int:
        """Move the copy `name` by `share` of its distance towards the present weights; a new one begins as they are.

        A copy of a few bits would lose small moves. So parameters are kept as a sum of two copies in the model's dtype,
        the second under `NAME-rest` with what the first rounds away, which gives bfloat16 16 bits. `save` saves both,
        and an average goes on after a resumption with the same bits. Buffers are the present ones.

        Returns the bytes of both.
        """
        rest, weights, count = f"{name}{_REST}", self._copy(), sum(1 for _ in self._parameters())
        if name not in self._held:
            self._held[name] = weights
            self._held[rest] = [*(torch.zeros_like(tensor) for tensor in weights[:count]), *weights[count:]]
        else:
            high, low = self._held[name], self._held[rest]
            for average, lost, new in zip(high[:count], low[:count], weights[:count], strict=True):
                exact = average.double() + lost.double()
                exact += share * (new.double() - exact)
                average.copy_(exact)
                lost.copy_(exact - average.double())
            high[count:] = low[count:] = weights[count:]
        self._saved |= {name, rest}
        return sum(tensor.nbytes for kept_name in (name, rest) for tensor in self._held[kept_name])

    def forget(self, name: str) -> None:
        """Free the copy `name`. Raises `LearnerError` when there is none."""
        self._get(name)
        del self._held[name]
        self._saved.discard(name)

    def save(self, weights: Weights) -> list[Piece]:
        """The copies that were taken to be saved, as pieces of global tensors."""
        pieces = []
        for name in sorted(self._saved):
            with self.using(name):
                pieces += weights.save_weights(_SAVED + name)
        return pieces

    def load(self, weights: Weights, reader: PieceReader) -> None:
        """Take the copies that a checkpoint holds, on any layout.

        The model has the weights of one of them afterwards.
        """
        for name in sorted({tensor.split("/")[1] for tensor in reader.names(_SAVED)}):
            weights.load_weights(_SAVED + name, reader)
            self.take(name, saved=True)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """The model has the weights `name` inside the `with` (None: its own), and its own again afterwards, whatever
        happened.

        Raises `LearnerError` where there is no copy of that name.
        """
        if name is None:
            yield
            return
        weights, backup = self._get(name), self._copy()
        self._write(weights)
        try:
            yield
        finally:
            self._write(backup)

    @contextmanager
    def computing(self, name: str | None = None) -> Iterator[None]:
        """Weights of a pass, forward or with backward: `name`'s, or the model's own, rounded where passes are to be.

        Afterwards the model has its own weights again, bit for bit, whatever happened. Gradients that were taken inside
        are those at the rounded weights, and count for the own ones as they are: the straight-through estimator.
        Without rounding it is `using`. With it, each pass takes two copies of the weights through host memory.

        Raises:
            LearnerError: no copy of that name.
        """
        if self._computes_in is None:
            with self.using(name):
                yield
            return
        backup = self._copy()
        self._write(self._rounded(backup if name is None else self._get(name), self._computes_in))
        try:
            yield
        finally:
            self._write(backup)

    def _get(self, name: str) -> list[Tensor]:
        if name not in self._held:
            raise LearnerError(
                "no snapshot of this name",
                where="learner",
                got=name,
                expected=", ".join(self._held) or "none has been taken",
                fix="Take it with `snapshot` before the weights move.",
            )
        return self._held[name]

    def _parameters(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from (
                parameter for parameter in module.parameters() if parameter.requires_grad or not self._trained_only
            )

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._parameters()
        for module in self._modules:
            yield from module.buffers()

    def _copy(self) -> list[Tensor]:
        return [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]

    @torch.no_grad()
    def _rounded(self, values: Sequence[Tensor], rounding: Rounding) -> list[Tensor]:
        """Copies of parameters as the engine has them after such a push, and the buffers as they are."""
        names = [name for module in self._modules for name, _ in module.named_parameters()]
        rounded = [
            value.clone().copy_(rounding.held(name, value, inputs_first=self._inputs_first))
            for name, value in zip(names, values, strict=False)
        ]
        return [*rounded, *values[len(names) :]]

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors(), values, strict=True):
            tensor.copy_(value)
