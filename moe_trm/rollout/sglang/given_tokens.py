"""Log-probs that a server gives of tokens it decodes greedily, and of tokens that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moe_trm.errors import EngineError
from moe_trm.rollout.servers.backend import Array
from moe_trm.rollout.servers.http import EngineHttp


async def greedy_tokens(http: EngineHttp, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
    """See `ServerBackend.decoded`."""
    ids, logprobs = await _asked(http, token_ids, {"max_new_tokens": count, "ignore_eos": True}, "output")
    if len(ids) != count:
        raise EngineError("the rollout server ended early", where=http.url, got=f"{len(ids)} tokens", expected=count)
    return np.array(ids, np.int64), logprobs


async def cached_tokens(http: EngineHttp, token_ids: Sequence[int]) -> int | None:
    """See `ServerBackend.cached`."""
    body = {"input_ids": [*token_ids], "sampling_params": {"max_new_tokens": 1, "top_k": 1}}
    count = (await http.post("/generate", body)).get("meta_info", {}).get("cached_tokens")
    return count if isinstance(count, int) else None


async def scores_of(http: EngineHttp, token_ids: Sequence[int]) -> Array:
    """See `ServerBackend.prefilled`. A prefill whose log-probs begin at the first token takes none from the cache."""
    ids = [*token_ids]
    scored_ids, logprobs = await _asked(http, ids, {"max_new_tokens": 1}, "input", logprob_start_len=0)
    # SGLang writes 0 for the last id of the vocabulary, which it takes for the place of an image.
    if scored_ids not in (ids, [0 if token == max(ids) else token for token in ids]):
        raise EngineError(
            "the server's answer is not of the tokens that it was sent",
            where=http.url,
            got=f"log-probs of {len(scored_ids)} tokens",
            expected=f"those of {len(ids)} tokens",
            fix="It has to be an SGLang server whose model has the policy's tokens.",
        )
    return logprobs[1:]  # nothing comes before the first


async def _asked(
    http: EngineHttp, token_ids: Sequence[int], params: Mapping[str, object], side: str, **more: int
) -> tuple[list[int], Array]:
    """Ids and log-probs of the tokens that came in (`input`) or out (`output`); what has no log-prob has NaN."""
    sampling = {"temperature": 1.0, "top_k": 1, **params}
    body = {"input_ids": [*token_ids], "sampling_params": sampling, "return_logprob": True, **more}
    answer = await http.post("/generate", body)
    entries = answer.get("meta_info", {}).get(f"{side}_token_logprobs") or []
    logprobs = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float64)
    return [entry[1] for entry in entries], logprobs
