"""A growing sequence: sampled answers, and text of a tool or user between them. Pure: no engine, no tokenizer.

Ids are only ever appended. Row convention between answers: the last token of an answer is not forwarded in that answer,
so its route does not exist yet. The next answer brings it, with the routes of all appended tokens. Each answer is
therefore requested with the routes from row `known_rows` on, and no row is requested twice. The row that gave a token
its log-prob is the row that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.rollout.turn import routes_rejected
from moe_trm.sampling_mask.record import join
from moe_trm.types import Prompt, RolloutRecord, SampledTurn
from routing import RouteError, RouteRecord
from routing.record.groups import extend


class Conversation:
    """One sample in the making.

    Args:
        prompt: where it begins.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._tokens: list[int] = list(prompt.token_ids)
        self._sampled = [False] * len(prompt.token_ids)
        self._turn_ids = [0] * len(prompt.token_ids)
        self._turns: list[SampledTurn] = []
        self._starts: list[int] = []
        self._trained: list[bool] = []
        self._routes: RouteRecord | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids so far: the context of the next answer."""
        return tuple(self._tokens)

    @property
    def turns(self) -> tuple[SampledTurn, ...]:
        """The answers so far."""
        return tuple(self._turns)

    @property
    def known_rows(self) -> int:
        """Rows whose routes are known: all before the last sampled token."""
        return self._routes.num_rows if self._routes is not None else 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample. They belong to the turn of the answer after them."""
        self._extend(token_ids, sampled=False)

    def add(self, turn: SampledTurn, *, trained: bool = True) -> None:
        """The engine's answer to `tokens`. With `trained` False it is the context of what follows, as a prompt is.

        Raises:
            RecordRejected: `route_*`, routes that do not continue those known; `route_missing`, of one answer but not
                of another.
        """
        if self._turns and (turn.routes is None) != (self._routes is None):
            raise RecordRejected(
                "route_missing",
                "only some answers have routes",
                where=f"turn {len(self._turns)}",
                expected="all or none",
            )
        if turn.routes is not None:
            self._routes = _continue(self._routes, turn.routes)
        self._starts.append(len(self._tokens))
        self._trained.append(trained)
        self._extend(turn.tokens.tolist(), sampled=trained)
        self._turns.append(turn)

    def record(
        self,
        *,
        sample_id: int,
        group_id: int,
        keep_changed: bool,
        finish_reason: str | None = None,
        row: int = 0,
    ) -> RolloutRecord:
        """The record, up to the last sampled token: the policy never saw the text appended after it.

        `keep_changed`: keep a sample whose routes the engine computed again, without them; else reject it.
        `finish_reason`: of the whole; None: the last answer's.

        Raises `RecordRejected`: `empty_output` (no answer), `version_span` and `retracted` (recomputed routes, after
        the weights changed and under unchanged ones).
        """
        assert not self._turns or self._trained[-1], "a row ends with an answer that it trains"
        if not self._turns:
            raise RecordRejected("empty_output", "nothing was sampled", got=0, expected="at least 1 answer")
        length = len(self._sampled) - self._sampled[::-1].index(True)
        trained_turns = [turn for turn, trained in zip(self._turns, self._trained, strict=True) if trained]
        masks = [turn.sampling_mask for turn in trained_turns if turn.sampling_mask is not None]
        servers = {turn.server for turn in trained_turns}
        record = RolloutRecord(
            sample_id=sample_id,
            group_id=group_id,
            prompt_id=self._prompt.prompt_id,
            tokens=np.array(self._tokens[:length], np.int32),
            sampled=np.array(self._sampled[:length], bool),
            turn_ids=np.array(self._turn_ids[:length], np.int16),
            rollout_logprobs=_joined([turn.rollout_logprobs for turn in trained_turns]),
            full_logprobs=_joined([turn.full_logprobs for turn in trained_turns]),
            versions=_joined([turn.versions for turn in trained_turns]),
            routes=self._trusted_routes(keep_changed=keep_changed),
            sampling_mask=join(masks) if masks else None,
            finish_reason=finish_reason or self._turns[-1].finish_reason,
            row=row,
            server=servers.pop() if len(servers) == 1 else None,
            pictures=self._prompt.pictures,
        )
        return record.bound()

    def _extend(self, token_ids: Sequence[int], *, sampled: bool) -> None:
        self._tokens.extend(map(int, token_ids))
        self._sampled.extend([sampled] * len(token_ids))
        self._turn_ids.extend([len(self._turns)] * len(token_ids))

    def _trusted_routes(self, *, keep_changed: bool) -> RouteRecord | None:
        """The routes, without those that the engine may have recomputed (`SampledTurn.recomputed`)."""
        routes = self._routes
        for number, (turn, start) in enumerate(zip(self._turns, self._starts, strict=True)):
            if routes is not None and turn.recomputed:
                if not keep_changed:
                    raise _recomputed(turn, number)
                # The row that predicts the token after the recomputed ones is its own; all rows before it may not be.
                routes = routes.uncover(slice(0, start + turn.recomputed - 1))
        return routes


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _recomputed(turn: SampledTurn, number: int) -> RecordRejected:
    if turn.retracted:
        return RecordRejected(
            "retracted",
            "the engine ran out of memory while this sample was generated and computed its routes again: they are not "
            "those that its log-probs come from",
            where=f"turn {number}",
            got="num_retractions above 0",
            expected="0",
            fix=(
                "Raise rollout.server.max_total_tokens, lower rollout.server.max_running_requests, or set "
                "replay.missing=native."
            ),
        )
    return RecordRejected(
        "version_span",
        "weights changed while this sample was generated: its routes are not all those of the weights that sampled",
        where=f"turn {number}",
        got=f"versions {sorted(set(turn.versions.tolist()))}",
        expected="one version in each answer",
        fix=(
            "Set pipeline.partial to what this run does at a push, keep others from updating the server, or set "
            "replay.missing=native."
        ),
    )


def _continue(so_far: RouteRecord | None, further: RouteRecord) -> RouteRecord:
    if so_far is None:
        return further
    try:
        return extend(so_far, further, so_far.num_rows)
    except RouteError as error:
        raise routes_rejected(error) from error
