"""Log-probs that a server gives of tokens it decodes greedily, and of tokens that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_trm.errors import EngineError
from moe_trm.rollout.servers.backend import Array
from moe_trm.rollout.sglang.api import EngineApi


async def greedy_tokens(api: EngineApi, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
    """See `ServerClient.decoded`."""
    return await _asked(api, token_ids, {"max_new_tokens": count, "ignore_eos": True}, "output", count)


async def scores_of(api: EngineApi, token_ids: Sequence[int]) -> Array:
    """See `ServerClient.prefilled`. A prefill whose log-probs begin at the first token takes none from the cache."""
    ids, logprobs = await _asked(api, token_ids, {"max_new_tokens": 1}, "input", len(token_ids), logprob_start_len=0)
    # SGLang writes 0 for the last id of the vocabulary, which it takes for the place of an image.
    if any(got not in (own, 0) for got, own in zip(ids.tolist(), token_ids, strict=True)):
        raise EngineError("the rollout server scored other tokens", got=ids.tolist(), expected=list(token_ids))
    return logprobs[1:]  # nothing comes before the first


async def _asked(
    api: EngineApi, token_ids: Sequence[int], params: Mapping[str, object], side: str, count: int, **more: int
) -> tuple[Array, Array]:
    """`count` ids and their log-probs, of the tokens that came in (`input`) or out (`output`)."""
    sampling = {"temperature": 1.0, "top_k": 1, **params}
    body = {"input_ids": list(token_ids), "sampling_params": sampling, "return_logprob": True, **more}
    answer: Any = await api.post("/generate", body)
    entries = answer.get("meta_info", {}).get(f"{side}_token_logprobs") or []
    if len(entries) != count:
        raise EngineError(
            "the rollout server did not score every token", where="/generate", got=len(entries), expected=count
        )
    # SGLang has no log-prob for the first token that it is given.
    logprobs = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float64)
    return np.array([entry[1] for entry in entries], np.int64), logprobs
