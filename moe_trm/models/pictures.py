"""Models that are given pictures: the text in whose place one goes, and the ids that stand for it. Imports no torch.

A picture of `t * h * w` patches (its grid) is `t * h * w / merge**2` tokens, each with the same id. The placeholder in
a prompt is one such token between two that open and close it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from moe_trm.errors import CheckpointError

_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS: Mapping[str, str] = {"Qwen3VLMoeForConditionalGeneration": _QWEN}
"""By architecture, the text in whose place a picture goes. Others are trained on text alone."""


@dataclass(frozen=True)
class PictureTokens:
    """Tokens of one model.

    Attributes:
        placeholder: text in whose place a picture goes.
        image: id that stands for a part of a picture.
        reserved: ids that no text may have outside of a placeholder: a sampled one would be read as a picture.
    """

    placeholder: str
    image: int
    reserved: frozenset[int]


def picture_tokens(full_config: Mapping[str, Any], where: str) -> PictureTokens:
    """The tokens of the model in the whole config.json; `where` is the file.

    Raises `CheckpointError` for a model that is given no pictures here.
    """
    architecture = (full_config.get("architectures") or [""])[0]
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = [full_config.get(key) for key in keys]
    if architecture not in PLACEHOLDERS or not all(isinstance(number, int) for number in ids):
        raise CheckpointError(
            "this model is given no pictures here",
            where=where,
            got=f"{architecture or 'no architecture'} with task.image_field",
            expected=f"{', '.join(PLACEHOLDERS)}, with {', '.join(keys)} in config.json",
            fix="Leave task.image_field out for prompts of text alone, or use a checkpoint of this family.",
        )
    if form := full_config.get("quantization_config") or (full_config.get("text_config") or {}).get(
        "quantization_config"
    ):
        raise CheckpointError(
            "a quantised release is not read with its vision tower",
            where=f"{where}, quantization_config",
            got=form.get("quant_method"),
            expected="plain weights",
            fix="Use the release in bfloat16.",
        )
    return PictureTokens(PLACEHOLDERS[architecture], int(ids[0] or 0), frozenset(int(number or 0) for number in ids))


def expanded(token_ids: Sequence[int], image: int, counts: Sequence[int]) -> tuple[int, ...]:
    """The ids of a prompt with `counts[i]` tokens in place of its i-th image token.

    Raises `ValueError` for another number of image tokens than counts.
    """
    if token_ids.count(image) != len(counts):
        raise ValueError(f"{token_ids.count(image)} placeholders for {len(counts)} pictures")
    remaining = iter(counts)
    return tuple(token for number in token_ids for token in [number] * (next(remaining) if number == image else 1))


def collapsed(token_ids: Sequence[int], image: int) -> list[int]:
    """Inverse of `expanded`: a run of image tokens, which a placeholder's other tokens bound, becomes one."""
    runs = ((number, len([*run])) for number, run in groupby(token_ids))
    return [token for number, length in runs for token in [number] * (1 if number == image else length)]
