"""vLLM's sampling masks: both forms decoded alike, and every violation refused with its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.vllm import decode_mask

SAMPLED = np.array([5, 9, 2])
ROWS = [[7, 5], [9], [0, 2, 19]]


@pytest.mark.parametrize("payload", [ROWS, {"token_ids": [7, 5, 9, 0, 2, 19], "offsets": [0, 2, 3, 6]}])
def test_both_forms_are_one_mask(payload: Any) -> None:
    mask = decode_mask(payload, sampled_ids=SAMPLED, vocab_size=20)
    assert mask.ids.tolist() == [5, 7, 9, 0, 2, 19]
    assert mask.offsets.tolist() == [0, 2, 3, 6]
    assert (mask.ids.dtype.name, mask.offsets.dtype.name) == ("int32", "int64")


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, "mask_missing"),
        ("AAAA", "mask_shape"),
        ([5, 9, 2], "mask_shape"),
        ([["5"], ["9"], ["2"]], "mask_shape"),
        ([[5.0], [9.0], [2.0]], "mask_shape"),
        ([[True], [9], [2]], "mask_violation"),
        ([[5], [9]], "mask_shape"),
        ([[5], [9], [2], [1]], "mask_shape"),
        ([[5], [], [2]], "mask_empty"),
        ([[5], [9], [2, 20]], "mask_range"),
        ([[5], [9], [2, -1]], "mask_range"),
        ([[5, (1 << 32) + 5], [9], [2]], "mask_range"),
        ([[5, 5], [9], [2]], "mask_duplicate"),
        ([[5], [8], [2]], "mask_violation"),
        ({"token_ids": [5, 9, 2]}, "mask_shape"),
        ({"offsets": [0, 1, 2, 3]}, "mask_shape"),
        ({"token_ids": [5, 9, 2], "offsets": []}, "mask_shape"),
        ({"token_ids": [5, 9, 2], "offsets": [0, 1, 2]}, "mask_shape"),
        ({"token_ids": [5, 9, 2], "offsets": [1, 1, 2, 3]}, "mask_shape"),
        ({"token_ids": [5, 9, 2], "offsets": [0, 2, 1, 3]}, "mask_shape"),
        ({"token_ids": [[5, 9, 2]], "offsets": [0, 1, 2, 3]}, "mask_shape"),
        ({"token_ids": [5, [9], 2], "offsets": [0, 1, 2, 3]}, "mask_shape"),
    ],
)
def test_malformed_masks_are_refused(payload: Any, reason: str) -> None:
    with pytest.raises(RecordRejected) as error:
        decode_mask(payload, sampled_ids=SAMPLED, vocab_size=20)
    assert error.value.reason == reason


def test_an_answer_without_tokens_has_an_empty_mask() -> None:
    assert decode_mask([], sampled_ids=np.zeros(0, np.int64), vocab_size=20).num_rows == 0
