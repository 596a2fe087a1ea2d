"""Tensors of models that also read images: the text's, by the names of the text model alone.

The text of Qwen lies under `model.language_model.`, its vision encoder under `model.visual.`; Kimi's under
`language_model.`, `vision_tower.` and `mm_projector.`. The matrices of a layer's experts are in two tensors,
`gate_up_proj` `[E, 2I, H]` and `down_proj` `[E, H, I]`, or in one tensor each, as in text models.
Shape letters: E experts, O outputs, I expert width, H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from moe_trm.models.family import HfConfig
from moe_trm.models.hf_config import expert_width, num_experts

_TEXT = {"model.language_model.": "model.", "language_model.": ""}
"""Beginnings of names in the files, and of the names of a text model."""
_VISION = ("model.visual.", "vision_tower.", "mm_projector.")
_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class ExpertRows:
    """Where the matrix of an expert lies in the tensor of all experts of its layer.

    Attributes:
        sizes: E and O of the tensor, as config.json announces them.
        expert: its number.
        start, stop: rows of the matrix among the O.
    """

    sizes: tuple[int, int]
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class PublishedPlace:
    """Where the files have a tensor of the text.

    Attributes:
        published: the name of a tensor there.
        rows: the part of that tensor; None: all of it.
    """

    published: str
    rows: ExpertRows | None = None


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
    published = dict[str, PublishedPlace]()
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
                    name, ExpertRows(sizes, expert, start, stop)
                )
    return published
