"""Pictures of a micro-batch as the model takes them.

Shape letters: B rows, R tokens, N pictures, P patches, C values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from moe_trm.errors import LearnerError
from moe_trm.models.picture_processor import PictureProcessor
from moe_trm.types import TokenBatch

KEPT = 64
"""Pictures whose patches are kept: the samples of a group have the same, and each is forwarded several times."""


class PictureInputs:
    """Makes the model's keywords for the pictures of a micro-batch.

    Args:
        processor: of the checkpoint, the one that counted the tokens of the prompts.
        image: id of image tokens.
        dtype: of the patches.
    """

    def __init__(self, processor: PictureProcessor, image: int, dtype: torch.dtype) -> None:
        self._processor, self._image, self._dtype = processor, image, dtype
        self._patches = lru_cache(KEPT)(lambda data: processor.patches([data]))

    def of(self, batch: TokenBatch, device: torch.device) -> Mapping[str, Tensor]:
        """`pixel_values` `[P, C]`, `image_grid_thw` `[N, 3]`, and `mm_token_type_ids` `[B, R]`, 1 on image tokens.

        Nothing for rows of text alone.

        Raises:
            LearnerError: a row whose image tokens are not those of its pictures.
        """
        is_image = batch.input_ids.cpu() == self._image
        made = []
        for row in range(len(is_image)):
            patches = [self._patches(data) for data in (batch.pictures[row] if batch.pictures else ())]
            expected = sum(self._processor.tokens_of(grid[0].tolist()) for _, grid in patches)
            if int(is_image[row].sum()) != expected:
                raise LearnerError(
                    "a row has not the image tokens of its pictures",
                    where=f"row {batch.sample_ids[row] if batch.sample_ids else row}",
                    got=f"{int(is_image[row].sum())} image tokens",
                    expected=f"{expected} of {len(patches)} pictures",
                    fix="Use the same checkpoint folder, and the same transformers, for controller and learner.",
                )
            made += patches
        if not made:
            return {}
        return {
            "pixel_values": torch.cat([values for values, _ in made]).to(device, self._dtype),
            "image_grid_thw": torch.cat([grid for _, grid in made]).to(device),
            "mm_token_type_ids": is_image.int().to(device),
        }
