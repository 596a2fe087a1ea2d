"""A Hugging Face checkpoint folder, read one tensor at a time, as plain weights whatever form its files have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_trm.errors import CheckpointError
from moe_trm.models import fp8_blocks, int4_groups, mxfp4
from moe_trm.models.hf_config import read_full_config, reads_images, text_config
from moe_trm.models.multimodal import PublishedPlace, is_vision, places
from moe_trm.models.quantisation import SCALES, SHAPE, parts_of, quantisation_of
from moe_trm.models.tensors import is_prediction

_EXPECTED = {
    "fp8": "float8_e4m3fn [O, I] with a scale for each {} x {} weights",
    "mxfp4": f"uint8 [E, O, I / {mxfp4.GROUP}, {mxfp4.GROUP // 2}] with one of {SCALES} for each last row",
    "int4": f"int32 [O, I / {int4_groups.PER_WORD}] with a scale for each {{}} x {{}} weights, and {SHAPE} of O and I",
}
"""The parts of a weight by the method of its quantisation."""
_COMPLETE = "Copy or download the checkpoint again, completely."


class HfCheckpoint:
    """Lazy access to the safetensors of a checkpoint folder; only the tensors asked for are read from disk.

    Weights in FP8, MXFP4 or INT4 are dequantised as they are read (`moe_trm.models.quantisation`), in the dtype of
    config.json.
    The text of a model that also reads images has the names of a text model (`moe_trm.models.multimodal`).

    Attributes:
        folder: where it lies.
        names: of all tensors of the model.
        prediction: of tensors of the layers that predict several tokens at once. Nothing trains or serves them.
        vision: of tensors of the vision encoder. Nothing trains or serves them.
        quantisation: the form of the weights; None: plain tensors.

    Raises:
        CheckpointError: no safetensors, an index that names missing files, a damaged file, or a form that is not read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of = self._index()
        self._handles: dict[str, Any] = {}
        config = read_full_config(folder) if (self.folder / "config.json").is_file() else {}
        hf = text_config(config)
        self.quantisation = quantisation_of(hf, f"{self.folder}/config.json")
        self._parts = parts_of(self._file_of, self.quantisation)
        self._places = places(self._parts, hf) if reads_images(config) else {}
        self._parts |= {name: self._parts[place.published] for name, place in self._places.items()}
        all_names = frozenset(self._places or self._parts)
        self.prediction = frozenset(name for name in all_names if is_prediction(name, hf))
        self.vision = frozenset(filter(is_vision, self._places))
        self.names = all_names - self.prediction - self.vision

    def read(self, name: str) -> Tensor:
        """The tensor `name` on CPU: in the checkpoint's dtype, or dequantised."""
        if rows := self.place(name).rows:
            self.shape(name)
            (stored,) = self.parts(name)
            return self.plain(name, [rows.part(self._handle(stored).get_slice(stored))])
        parts = [self._handle(part).get_tensor(part) for part in self.parts(name)]
        return self.plain(name, parts)

    def read_row(self, name: str, row: int, num_rows: int) -> Tensor:
        """Row `row` alone of the tensor `name`, which must have `num_rows` of them.

        Raises `CheckpointError` where it has not.
        """
        slices = [self._handle(part).get_slice(part) for part in self.parts(name)]
        if slices[0].get_shape()[0] != num_rows:
            raise CheckpointError(
                "tensor has another number of rows than config.json announces",
                where=f"{self.folder}, {name}",
                got=slices[0].get_shape()[0],
                expected=num_rows,
                fix="Use the config.json that belongs to these weights.",
            )
        return self.plain(name, [tensor_slice[row] for tensor_slice in slices])

    def place(self, name: str) -> PublishedPlace:
        """The tensor of the published model that holds the tensor `name`: itself, or another."""
        return self._places.get(name) or PublishedPlace(name)

    def parts(self, name: str) -> tuple[str, ...]:
        """Names in the files of what the tensor `name` is made of: itself, or values and scales."""
        return self._parts.get(name, (name,))

    @property
    def stored_names(self) -> frozenset[str]:
        """Of all tensors, as the files have them."""
        return frozenset(self._file_of)

    def read_stored(self, stored: str) -> Tensor:
        """A tensor of the files, as it is there."""
        tensor: Tensor = self._handle(stored).get_tensor(stored)
        return tensor

    def file_of(self, name: str) -> str:
        """The file of the folder that holds the tensor `name`, or its values."""
        return self._file_of[self.parts(name)[0]]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`, whose values are not read."""
        stored = self.parts(name)[0]
        shape = tuple(self._handle(stored).get_slice(stored).get_shape())
        place = self.place(name)
        if rows := place.rows:
            if (inputs := rows.inputs(shape)) is None:
                raise CheckpointError(
                    "tensor has another shape than config.json announces",
                    where=f"{self.folder}, {stored}",
                    got=list(shape),
                    expected=f"{rows.sizes[0]} experts of {rows.sizes[1]} outputs",
                    fix="Use the config.json that belongs to these weights.",
                )
            return rows.stop - rows.start, inputs
        if stored == place.published:
            return shape
        if self.quantisation is not None and self.quantisation.method == "int4":
            return *shape[:-1], shape[-1] * int4_groups.PER_WORD
        *outer, outputs, groups, _ = shape
        return *outer, groups * mxfp4.GROUP, outputs

    def plain(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The tensor `name` of what its `parts` hold: the tensor itself, or values and scales dequantised.

        Raises `CheckpointError` where they do not fit together.
        """
        form, where = self.quantisation, f"{self.folder}, {name}"
        if len(parts) == 1:
            if parts[0].dtype.itemsize == 1 and parts[0].dtype.is_floating_point:
                raise CheckpointError(
                    "an 8-bit weight without scales",
                    where=where,
                    got=f"{parts[0].dtype}, and {_lacking(form is not None)}",
                    expected="its scales beside it, in the checkpoint's index and files",
                    fix=_COMPLETE,
                )
            return parts[0]
        assert form is not None, "only quantised tensors have parts"
        weight, scale = parts[:2]
        dtype = getattr(torch, form.dtype)
        if form.method == "int4":
            sizes = len(weight), weight.shape[-1] * int4_groups.PER_WORD
            fits = scale.dim() == 2 and (len(scale), scale.shape[1] * form.block[1]) == sizes
            if fits and weight.dtype == torch.int32 and parts[2].tolist() == list(sizes):
                return int4_groups.dequantize(weight, scale, dtype)
        elif form.method == "mxfp4":
            fits = scale.shape == weight.shape[:-1] and weight.dtype == scale.dtype == torch.uint8
            if fits and weight.shape[-1] * 2 == mxfp4.GROUP:
                return mxfp4.dequantize(weight, scale, dtype)
        elif weight.dim() == 2:
            blocks = [-(-size // step) for size, step in zip(weight.shape, form.block, strict=True)]
            if list(scale.shape) == blocks and weight.dtype == torch.float8_e4m3fn:
                return fp8_blocks.dequantize(weight, scale, form.block, dtype)
        raise CheckpointError(
            "values and scales of a weight do not fit together",
            where=where,
            got=f"{weight.dtype} {list(weight.shape)} with {scale.dtype} {list(scale.shape)}",
            expected=_EXPECTED[form.method].format(*form.block),
            fix="Use the config.json that belongs to these weights.",
        )

    def _handle(self, stored: str) -> Any:
        if stored not in self._file_of:
            raise CheckpointError(
                "tensor missing from the checkpoint",
                where=f"{self.folder}, {stored}",
                got=f"{len(self._file_of)} other tensors",
                expected=stored,
                fix="config.json asks for a tensor the files do not hold. " + _COMPLETE,
            )
        file = self._file_of[stored]
        if file not in self._handles:
            self._handles[file] = self._open(file)
        return self._handles[file]

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            for file in sorted(set(file_of.values())):
                if not (self.folder / file).is_file():
                    raise CheckpointError(
                        "checkpoint file missing",
                        where=str(self.folder),
                        got=f"no {file}",
                        expected="every file that model.safetensors.index.json names",
                        fix=_COMPLETE,
                    )
            return file_of
        if not (self.folder / "model.safetensors").is_file():
            raise CheckpointError(
                "checkpoint has no weights",
                where=str(self.folder),
                got="no safetensors",
                expected="model.safetensors, or shards with model.safetensors.index.json",
                fix=_COMPLETE,
            )
        return dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt", device="cpu")
        except SafetensorError as error:
            raise CheckpointError(
                "checkpoint file is damaged",
                where=str(self.folder / file),
                got=str(error),
                expected="a complete safetensors file",
                fix=_COMPLETE,
            ) from error


def _lacking(is_quantised: bool) -> str:
    return "no scales in its files" if is_quantised else "no quantization_config in config.json"
