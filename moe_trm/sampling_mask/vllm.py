"""vLLM's sampling masks decoded into a `SamplingMask`, once, at the edge.

Source: vLLM, `--return-sampling-mask`. `choices[i].sampling_mask` of `/inference/v1/generate` has a list of kept token
ids for each sampled token. Inside of the engine the same is `token_ids` and `offsets`, as compressed sparse rows.

Shape letters: S sampled tokens, M kept ids in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.record import SamplingMask

Rows = Sequence[Sequence[int]]
Compressed = Mapping[str, Sequence[int]]


def decode_mask(payload: Rows | Compressed | None, *, sampled_ids: np.ndarray, vocab_size: int) -> SamplingMask:
    """The mask of one choice, validated, with ascending ids in each row.

    Args:
        payload: a list of kept ids for each sampled token, or a mapping with `token_ids` `[M]` and `offsets` `[S + 1]`.
        sampled_ids: `[S]` token ids of the answer.
        vocab_size: ids are below it.

    Raises:
        RecordRejected: `mask_missing` (no mask), `mask_shape` (not integers, offsets that do not rise from 0 to M, or
            another number of rows), and those of `SamplingMask.validate`: a row without ids, ids out of range, an id
            twice, a sampled id outside its mask.
    """
    if payload is None:
        raise RecordRejected(
            "mask_missing",
            "the answer has no sampling mask",
            expected="sampling_mask of the choice",
            fix="Start the server with --return-sampling-mask, and ask /inference/v1/generate.",
        )
    if isinstance(payload, Mapping):
        ids, offsets = (_integers(payload.get(name), name) for name in ("token_ids", "offsets"))
    else:
        if not all(isinstance(row, Sequence) for row in payload):
            raise _misshapen("no list of lists", type(payload).__name__)
        ids = _integers(list(chain.from_iterable(payload)), "token_ids")
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in payload], dtype=np.int64)])
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise _misshapen("offsets do not rise from 0 to the number of ids", f"{len(offsets)} offsets, {len(ids)} ids")
    # Checked before they are narrowed, so that no id wraps into a legal one.
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise RecordRejected(
            "mask_range",
            "kept id outside the vocabulary",
            got=f"{ids.min()}..{ids.max()}",
            expected=f"0..{vocab_size - 1}",
        )
    mask = SamplingMask(ids.astype(np.int32), offsets.astype(np.int64)).ascending()
    mask.validate(np.asarray(sampled_ids), vocab_size)
    return mask


def _integers(values: Sequence[int] | None, name: str) -> np.ndarray:
    try:
        array = np.asarray(values if values is not None and len(values) else np.zeros(0, np.int64))
    except (ValueError, OverflowError, TypeError) as error:
        raise _misshapen(f"{name} are no integers", str(error)) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _misshapen(f"{name} are no integers", f"{array.dtype} {array.shape}")
    return array


def _misshapen(what: str, got: object) -> RecordRejected:
    return RecordRejected(
        "mask_shape",
        f"a sampling mask of vLLM is malformed: {what}",
        got=got,
        expected="a list of token ids for each sampled token, or token_ids and offsets",
    )
