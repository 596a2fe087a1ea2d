"""Tensors of models that also read images: the text's, by the names of the text model alone.

The text of Qwen lies under `model.language_model.`, its vision encoder under `model.visual.`; Kimi's under
`language_model.`, `vision_tower.` and `mm_projector.`. The matrices of a layer's experts are in two tensors,
`gate_up_proj` `[E, 2I, H]` and `down_proj` `[E, H, I]`, or in one tensor each, as in text models. Qwen3-VL has the two
transposed, `[E, H, 2I]` and `[E, I, H]`.
Shape letters: E experts, O outputs, I expert width, H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_trm.models.family import HfConfig
from moe_trm.models.hf_config import expert_width, num_experts

_TEXT = {"model.language_model.": "model.", "language_model.": ""}
"""Beginnings of names in the files, and of the names of a text model."""
_VISION = ("model.visual.", "vision_tower.", "mm_projector.")
_TRANSPOSED = ("qwen3_vl_moe_text",)
"""`model_type` of texts whose experts' matrices are published with inputs before outputs."""
_STACK_NAME = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class ExpertRows:
    """Place of an expert's matrix in the tensor of all experts of its layer.

    Attributes:
        sizes: E and O of the tensor, as config.json announces them.
        expert: its number.
        start, stop: rows of the matrix among the O.
        transposed: the tensor has its O last: `[E, inputs, O]`.
    """

    sizes: tuple[int, int]
    expert: int
    start: int
    stop: int
    transposed: bool = False

    def part(self, tensor: Any) -> Any:
        """The matrix `[stop - start, inputs]` in a tensor of all experts, or in a slice of a file."""
        if self.transposed:
            return tensor[self.expert, :, self.start : self.stop].T
        return tensor[self.expert, self.start : self.stop]

    def inputs(self, shape: Sequence[int]) -> int | None:
        """Columns of the matrix in a tensor of this shape; None where it is not the one that is announced."""
        experts, outputs = (shape[0], shape[-1]) if self.transposed else (shape[0], shape[1])
        if len(shape) != 3 or (experts, outputs) != self.sizes:
            return None
        return shape[1] if self.transposed else shape[2]

    def whole(self, inputs: int) -> tuple[int, ...]:
        """Shape of the tensor of all experts."""
        experts, outputs = self.sizes
        return (experts, inputs, outputs) if self.transposed else (experts, outputs, inputs)


@dataclass(frozen=True)
class PublishedPlace:
    """Place of a tensor of the text in the files.

    Attributes:
        published: the name of a tensor there.
        rows: the part of that tensor; None: all of it.
    """

    published: str
    rows: ExpertRows | None = None


def expert_stack(hf_name: str, model_type: str) -> bool:
    """True for a tensor of all experts of a layer that `model_type` publishes transposed.

    transformers 5.19 transposes it where the shape tells, while it is read; it never does while it is saved.
    """
    return model_type in ("qwen3_vl_moe", *_TRANSPOSED) and _STACK_NAME.search(hf_name) is not None


def is_vision(hf_name: str) -> bool:
    """True for a tensor of the vision encoder."""
    return hf_name.startswith(_VISION)


def places(parts: Mapping[str, Collection[str]], hf: HfConfig) -> Mapping[str, PublishedPlace]:
    """By its name in the text model, where each tensor lies; tensors of other parts keep their names.

    Args:
        parts: the published tensors, and the tensors in files that each is made of.
        hf: config.json of the text.
    """
    experts, width, hidden = num_experts(hf), expert_width(hf), int(hf["hidden_size"])
    published, transposed = dict[str, PublishedPlace](), hf.get("model_type") in _TRANSPOSED
    for name, stored in parts.items():
        prefix = next(filter(name.startswith, _TEXT), "")
        plain_name = _TEXT.get(prefix, "") + name.removeprefix(prefix)
        stacked = _STACKED.fullmatch(plain_name)
        if stacked is None or len(stored) > 1:
            published[plain_name] = PublishedPlace(name)
            continue
        outputs = {"gate_proj": (0, width), "up_proj": (width, 2 * width)}
        if stacked[2] == "down_proj":
            outputs = {"down_proj": (0, hidden)}
        sizes = experts, max(stop for _, stop in outputs.values())
        for expert in range(experts):
            for matrix, (start, stop) in outputs.items():
                published[f"{stacked[1]}.{expert}.{matrix}.weight"] = PublishedPlace(
                    name, ExpertRows(sizes, expert, start, stop, transposed)
                )
    return published
