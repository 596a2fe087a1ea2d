"""The form of an exported checkpoint: plain tensors in one dtype, or the form of the one that training started from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models import fp8_blocks, int4_groups, mxfp4
from moe_trm.models.hf_config import plain_config, read_full_config, reads_images, without_prediction_layers
from moe_trm.sync.rounding import DTYPES, Rounding


@dataclass
class ChangeLoss:
    """The change that training made to weights of 8 or 4 bits, and what their form cannot hold of it.

    Attributes:
        tensors: that changed.
        changed: squared norm of trained - start.
        lost: squared norm of written - trained.
    """

    tensors: int = 0
    changed: float = 0.0
    lost: float = 0.0

    def add(self, trained: Tensor, start: Tensor, written: Tensor) -> None:
        """Count one tensor; one that did not change counts nothing."""
        if torch.equal(trained, start):
            return
        self.tensors += 1
        self.changed += float((trained.float() - start.float()).square().sum(dtype=torch.float64))
        self.lost += float((written.float() - trained.float()).square().sum(dtype=torch.float64))

    @property
    def share(self) -> float:
        """|written - trained| / |trained - start|; 0 where nothing changed."""
        return math.sqrt(self.lost / self.changed) if self.changed else 0.0


@dataclass(frozen=True)
class ExportForm:
    """The form in which an export writes the learner's weights.

    Attributes:
        source: the checkpoint that training started from.
        dtype: of the learner's weights.
        published: every tensor is written in the form that `source` has it in: its dtype, FP8, MXFP4 or INT4. Blocks of
            weights that did not change keep their bits. False: plain tensors in `dtype`.
        loss: counts what the published form loses of the training; None: nothing is counted.
        trains_vision: the learner's tensors have those of the vision tower.
    """

    source: HfCheckpoint
    dtype: str
    published: bool = False
    loss: ChangeLoss | None = None
    trains_vision: bool = False

    def written(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the checkpoint for the learner's, which come in any order.

        Matrices that lie in one tensor of `source` are held until it is complete. It is never written with gaps.
        """
        stacks, gaps = dict[str, Tensor](), dict[str, int]()
        for name, tensor in tensors:
            place = self.source.place(name)
            if place.rows is None:
                yield from self.stored(name, tensor).items()
                continue
            ((stack_name, part),) = self.stored(name, tensor).items()
            if stack_name not in stacks:
                stacks[stack_name] = torch.empty(place.rows.whole(part.shape[-1]), dtype=part.dtype)
                gaps[stack_name] = stacks[stack_name].numel()
            place.rows.part(stacks[stack_name]).copy_(part)
            gaps[stack_name] -= part.numel()
            if not gaps[stack_name]:
                yield stack_name, stacks.pop(stack_name)
        assert not stacks, f"incomplete: {sorted(stacks)[:3]}"

    def stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors written for the learner's tensor `name`, by their names in `source`: one, or values and scales.

        Rows of a tensor of `source` have its name.
        """
        if not self.published:
            return {self.source.place(name).published: Rounding(self.dtype).pushed(name, tensor)}
        names, form = self.source.parts(name), self.source.quantisation
        old = [self.source.read_stored(part) for part in names] if len(names) > 1 else [self.source.read(name)]
        # As the learner got it, so that what it left alone compares equal.
        dtype = DTYPES[Rounding(self.dtype).dtype_of(name)]
        new, original = tensor.detach().cpu().to(dtype), self.source.read(name).to(dtype)
        if len(names) == 1 or form is None:
            return {names[0]: torch.where(new == original, old[0], new.to(old[0].dtype)).contiguous()}
        made: tuple[Tensor, ...]
        if form.method == "fp8":
            read_in = getattr(torch, form.dtype)
            made = fp8_blocks.requantize(new, original, (old[0], old[1]), form.block, read_in, powers=form.powers)
        elif form.method == "mxfp4":
            made = mxfp4.requantize(new, original, (old[0], old[1]))
        else:
            # The shape stays as it is.
            made = *int4_groups.requantize(new, original, (old[0], old[1])), old[2]
        if self.loss is not None:
            self.loss.add(new, original, self.source.plain(name, made))
        return dict(zip(names, (part.contiguous() for part in made), strict=True))

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that nothing trains: of layers that predict several tokens at once, and of the vision encoder.

        They equal `source`'s bit for bit, or its dequantisation where the export is plain.
        """
        vision = frozenset[str]() if self.trains_vision else self.source.vision
        for name in sorted(self.source.prediction | vision):
            if self.published:
                yield from ((part, self.source.read_stored(part)) for part in self.source.parts(name))
            else:
                yield name, self.source.read(name)

    def config(self) -> dict[str, Any]:
        """config.json of the export, from `source`'s."""
        full_config = read_full_config(self.source.folder)
        if not reads_images(full_config):
            return self._announced(full_config)
        return {**self._announced(full_config), "text_config": self._announced(full_config["text_config"])}

    def _announced(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        announced = dict(hf) if self.source.prediction else without_prediction_layers(hf)
        if self.published:
            return announced
        announced.pop("torch_dtype", None)
        return {**plain_config(announced), "dtype": self.dtype}
