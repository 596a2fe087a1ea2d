"""Log-probs that a server gives of tokens it decodes greedily, and of tokens that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_trm.errors import EngineError
from moe_trm.rollout.servers.backend import Array
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.vllm.answers import VllmAnswers
from moe_trm.rollout.vllm.parse import NO_LOGPROB

# Temperature 0 is greedy, and its log-probs are those at temperature 1.
GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


async def greedy_tokens(http: EngineHttp, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
    """See `ServerBackend.decoded`."""
    [choice] = (await _asked(http, token_ids, max_tokens=count, logprobs=0))["choices"]
    ids, entries = choice["token_ids"], choice["logprobs"]["content"]
    if len(ids) != count or len(entries) != count:
        raise EngineError(
            "the rollout server ended early",
            where=http.url,
            got=f"{len(ids)} tokens, {len(entries)} log-probs",
            expected=count,
        )
    return np.array(ids, np.int64), _numbers([entry["logprob"] for entry in entries])


async def scores_of(http: EngineHttp, token_ids: Sequence[int]) -> Array:
    """See `ServerBackend.prefilled`. A prefill whose log-probs are asked for takes none from the prefix cache."""
    prompt_logprobs = (await _asked(http, token_ids, max_tokens=1, prompt_logprobs=0))["prompt_logprobs"] or []
    scored = [entry.get(str(token)) for entry, token in zip(prompt_logprobs[1:], token_ids[1:], strict=False)]
    if len(prompt_logprobs) != len(token_ids) or None in scored:
        raise EngineError(
            "the server's answer is not of the tokens that it was sent",
            where=http.url,
            got=f"log-probs of {len(prompt_logprobs)} tokens",
            expected=f"those of {len(token_ids)} tokens",
            fix="It has to be a vLLM server whose model has the policy's tokens.",
        )
    return _numbers([entry["logprob"] for entry in scored])


async def _asked(http: EngineHttp, token_ids: Sequence[int], **params: int) -> Any:
    body = {"token_ids": [*token_ids], "sampling_params": {**GREEDY, **params}}
    return await http.post(VllmAnswers.generate_path, body)


def _numbers(logprobs: Sequence[float]) -> Array:
    """NaN where there is no log-prob."""
    values = np.array(logprobs, np.float64)
    return np.where(values > NO_LOGPROB, values, np.nan)
