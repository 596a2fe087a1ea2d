"""Checks of one answer that are the same for every engine. Shape letter: S sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.sampling_mask.record import SamplingMask

POSITIVE_TOLERANCE = 1e-5
"""Log-probs above this are wrong; below, it is the rounding of a probability of one."""


def check_prompt(prompt_ids: Sequence[int] | None, context: Sequence[int]) -> None:
    """Refuse an answer to other ids than were asked, whatever lies between engine and run.

    Raises `RecordRejected` (`prompt_length`, `other_prompt`).
    """
    if prompt_ids is not None and len(prompt_ids) != len(context):
        raise RecordRejected(
            "prompt_length", "the engine saw another prompt", got=len(prompt_ids), expected=f"{len(context)} tokens"
        )
    if prompt_ids is None or list(prompt_ids) != list(context):
        raise RecordRejected(
            "other_prompt",
            "this is the answer to another prompt",
            got=None if prompt_ids is None else list(prompt_ids[:8]),
            expected=f"the ids that were asked, from {list(context[:8])}",
            fix="Look for a router, proxy or cache that hands on the answers of other requests, or drops fields.",
        )


def check_image_tokens(
    prompt_ids: Sequence[int] | None, output_ids: Sequence[int], context: Sequence[int], model: ServedModel
) -> None:
    """Refuse an answer whose image tokens are others than the learner forwards.

    The engine expands placeholders by itself, and the policy can sample an image token, which no picture belongs to.

    Raises `RecordRejected` (`image_tokens`).
    """
    expected = context.count(model.image)
    got = None if prompt_ids is None else list(prompt_ids).count(model.image or 0)
    sampled = [token for token in output_ids if token in model.reserved]
    if got != expected or sampled:
        raise RecordRejected(
            "image_tokens",
            "the engine's image tokens are not those of the pictures that the learner forwards",
            got=f"{got} in the prompt" if got != expected else f"the reserved id {sampled[0]} in the answer",
            expected=f"{expected} in the prompt, none in the answer",
            fix="Serve the run's own checkpoint folder, whose processor counted the tokens.",
        )


def check_request(request_id: str, begin: str) -> None:
    """Refuse the answer to another request for the same ids: it may be one that another sample has, too.

    Raises `RecordRejected` (`other_request`).
    """
    if not request_id.startswith(begin):
        raise RecordRejected(
            "other_request",
            "this is the answer to another request",
            got=request_id or "no id",
            expected=f"an id from {begin}",
            fix="Look for a router, proxy or cache that hands on the answers of other requests, or drops fields.",
        )


def sampled_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """`[S]` int32. Raises `RecordRejected` (`empty_output`, `token_range`)."""
    if not ids:
        raise RecordRejected("empty_output", "nothing was sampled", got=0, expected="at least 1 token")
    output_S = np.array(ids, np.int32)
    # As an unsigned number, a negative id is above all others.
    if np.maximum.reduce(output_S.view(np.uint32)) >= vocab_size:
        position = int(((output_S < 0) | (output_S >= vocab_size)).argmax())
        raise RecordRejected(
            "token_range",
            "sampled token outside the vocabulary",
            where=f"position {position}",
            got=int(output_S[position]),
            expected=f"0..{vocab_size - 1}",
        )
    return output_S


def checked_logprobs(values: Sequence[float | None], reason: str) -> np.ndarray:
    """As float32. Values out of range, which become infinite, are refused as null is."""
    with np.errstate(over="ignore"):
        array = np.array(values, np.float64).astype(np.float32)
    wrong = ~np.isfinite(array) | (array > POSITIVE_TOLERANCE)
    if wrong.any():
        position = int(wrong.argmax())
        raise RecordRejected(
            reason,
            "not a log-prob",
            where=f"position {position}",
            got=values[position],
            expected="a finite number, at most 0",
        )
    return array


def over_support(mask: SamplingMask, output_S: np.ndarray, full_S: np.ndarray) -> np.ndarray:
    """`[S]` log-prob of each sampled token over its kept support, which holds it exactly once.

    Those of dropped tokens are over the vocabulary: `full_S`.
    """
    assert mask.logprobs is not None
    sizes = np.diff(mask.offsets)
    sampled = full_S.copy()
    sampled[sizes > 0] = mask.logprobs[mask.ids == np.repeat(output_S, sizes)]
    return sampled
