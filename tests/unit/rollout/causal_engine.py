"""A stand-in for the engine whose every number is a function of the ids before it: any shift, gap or stale row shows.

It answers with the JSON that SGLang sends, which then goes through the real parser.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.parse import parse_turn
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import SampledTurn, SamplingParams
from tests.unit.doubles import StandInEngine

MODEL = ServedModel("Qwen3MoeForCausalLM", vocab_size=16, num_layers=3, moe_layer_ids=(0, 2), num_experts=8, top_k=2)
END = 1
"""The model's end token."""


def digest(prefix: Sequence[int]) -> bytes:
    return blake2b(bytes(prefix), digest_size=32).digest()


def route_row(prefix: Sequence[int]) -> np.ndarray:
    """`[D, K]` experts of the last id of `prefix`."""
    data = digest(prefix)
    return np.array([np.random.default_rng(data[layer]).permutation(8)[:2] for layer in range(3)], "<i4")


def next_token(prefix: Sequence[int]) -> int:
    return digest(prefix)[4] % 16


def support(prefix: Sequence[int]) -> tuple[list[int], list[float], float]:
    """Kept ids (the sampled one first), their log-probs, and the sampled one's over the vocabulary."""
    data = digest(prefix)
    share = 0.3 + data[5] / 400
    token = next_token(prefix)
    return [token, (token + 1) % 16], [math.log(share), math.log(1 - share)], math.log(share * 0.9)


class CausalEngine(StandInEngine):
    """`turn` of `RolloutEngine`.

    Args:
        versions: the weight version of each answer, in order; the last one for all that follow.
        wanted: what is recorded.
        skip_rows: route rows left out at the start of every answer but the first: a gap.
        stale: begin later answers' routes one row early with a row of an earlier answer: NeMo-RL#3485's stale row.
        retractions: of each answer, in order; the last one for all that follow.
    """

    def __init__(
        self,
        versions: Sequence[int] = (0,),
        requested: RequestedFields | None = None,
        *,
        skip_rows: int = 0,
        stale: bool = False,
        retractions: Sequence[int] = (0,),
    ) -> None:
        self.versions, self.requested = list(versions), requested or RequestedFields(routes=True, mask=True)
        self.skip_rows, self.stale, self.retractions = skip_rows, stale, list(retractions)
        self.asked: list[tuple[int, int, SamplingParams]] = []
        """Context length, first row and parameters of each answer."""

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        version = self.versions[min(len(self.asked), len(self.versions) - 1)]
        self.asked.append((len(context), start, params))
        tokens = list(context)
        meta: dict[str, list[Any]] = {"output_token_logprobs": [], "masks": [], "kept": []}
        reason = "length"
        while len(tokens) - len(context) < params.max_new_tokens and reason == "length":
            kept, kept_logprobs, full = support(tokens)
            tokens.append(kept[0])
            meta["output_token_logprobs"].append([full, kept[0], None])
            meta["masks"].append(kept)
            meta["kept"].append(kept_logprobs)
            if kept[0] in params.stop_token_ids:
                reason = "stop"
        sampled = len(tokens) - len(context)
        rows = [route_row(tokens[: row + 1]) for row in range(start, len(tokens) - 1)]
        if start and self.skip_rows:
            rows = rows[self.skip_rows :]
        if start and self.stale:
            rows = [route_row(tokens[:1]), *rows]
        body = {
            "output_ids": tokens[len(context) :],
            "prompt_token_ids": list(context),
            "meta_info": {
                "finish_reason": {"type": reason},
                "prompt_tokens": len(context),
                "num_retractions": self.retractions[min(len(self.asked), len(self.retractions)) - 1],
                "weight_versions": [{"version": str(version), "start": 0, "end": sampled}],
                "output_token_logprobs": meta["output_token_logprobs"],
                "output_token_sampling_mask": meta["masks"],
                "output_token_sampling_logprobs": meta["kept"],
                "routed_experts": base64.b64encode(np.array(rows, "<i4").tobytes()).decode(),
            },
        }
        requested = RequestedFields(routes=False, mask=False) if bare else self.requested
        return parse_turn(json.dumps(body).encode(), context, MODEL, requested, start=start)


class DigitTokens(Tokens):
    """One id per character of `0123456789abcdef`, without a checkpoint."""

    def __init__(self) -> None:
        self.vocab_size, self.max_positions, self.stop_token_ids = 16, None, (END,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("0123456789abcdef"[token] for token in token_ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(int(character, 16) for character in text)

    def encode_continuation(self, messages: Sequence[object], last_token: int) -> tuple[int, ...]:
        return (END, 2)[last_token == END :]
