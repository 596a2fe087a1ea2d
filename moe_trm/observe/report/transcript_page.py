"""Transcripts as a page: sampled tokens shaded by log-ratio, rejected tokens struck out, given tokens marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from moe_trm.observe.report.html import document, number
from moe_trm.observe.report.session_tree import session_tree
from moe_trm.observe.report.session_turns import session_turns
from moe_trm.observe.report.token_rows import Transcript, name_of, shortened

PALEST, DARKEST = -4.0, 0.0
"""Powers of ten of the log-ratio's size at which shading begins and is full."""


def transcript_page(step: int, transcripts: Sequence[Transcript], pieces: Sequence[Sequence[str]]) -> str:
    """The transcripts of one step; `pieces` are the texts of their tokens."""
    articles = "\n".join(
        _article(number, *article_parts) for number, article_parts in enumerate(zip(transcripts, pieces, strict=True))
    )
    body = f"<header><h1>Transcripts of step {step}</h1>{_LEGEND}</header>\n{articles}"
    return document(f"Transcripts of step {step}", body, {"step": step, "rollouts": _data(transcripts, pieces)})


def _data(transcripts: Sequence[Transcript], pieces: Sequence[Sequence[str]]) -> list[Mapping[str, object]]:
    rollouts: list[Mapping[str, object]] = []
    for entry, texts in zip(transcripts, pieces, strict=True):
        record = entry.row.record
        logprobs: list[float | None] = [None] * record.num_tokens
        for place, value in zip(record.sampled.nonzero()[0].tolist(), record.rollout_logprobs.tolist(), strict=True):
            logprobs[place] = value
        rollouts.append(
            {
                "sample_id": record.sample_id,
                "row": record.row,
                "session": list(record.session),
                "prompt_id": record.prompt_id,
                "reward": record.reward,
                "reward_parts": dict(record.reward_parts),
                "expected": record.expected,
                "advantage": entry.advantage,
                "ratio": entry.ratio,
                "texts": list(texts),
                "ids": record.tokens.tolist(),
                "kinds": entry.kinds,
                "turns": record.turn_ids.tolist(),
                "rollout_logprobs": logprobs,
                "log_ratio": list(entry.log_ratio),
                "weight": list(entry.weight),
                "keep": list(entry.keep),
            }
        )
    return rollouts


def _article(place: int, entry: Transcript, texts: Sequence[str]) -> str:
    record, kinds = entry.row.record, entry.kinds
    tokens = "".join(_token(entry, kinds, index, text) for index, text in enumerate(texts))
    rejected = sum(value is False for value in entry.keep)
    facts = [
        f"reward {number(record.reward)}",
        *(f"{escape(name)} {number(value)}" for name, value in record.reward_parts.items()),
        f"advantage {number(entry.advantage)}",
        f"{number(float(record.num_sampled))} tokens sampled",
        f"{number(float(rejected))} rejected",
        f"ended by {escape(record.finish_reason)}",
        f"weight version {number(float(record.versions.min()))}"
        + (f" to {number(float(record.versions.max()))}" if record.versions.min() != record.versions.max() else ""),
    ]
    expected = f'<p class="note">expected answer: {escape(shortened(record.expected))}</p>' if record.expected else ""
    return (
        f'<article class="card rollout"><h2>{escape(name_of(record))}, prompt {escape(str(record.prompt_id))}</h2>'
        f'<p class="about">{" · ".join(facts)}</p>{expected}'
        f"{session_tree(record.session, record.row, record.reward)}"
        f'<div class="tokens" tabindex="0" data-rollout="{place}" aria-label="Tokens; arrow keys tell each one\'s '
        f'figures">{tokens}</div>{session_turns(record, texts)}</article>'
    )


def _token(entry: Transcript, kinds: Sequence[str], index: int, text: str) -> str:
    value = entry.log_ratio[index]
    shown = escape(text).replace("\n", "↵\n") if text else "·"
    if value is None:
        return f'<span class="{kinds[index]}">{shown}</span>'
    shade = _shade(value)
    rejected = " rejected" if entry.keep[index] is False else ""
    return (
        f'<span class="sampled {"more" if value > 0 else "less"}{rejected}" style="--shade:{shade:.2f}">{shown}</span>'
    )


def _shade(log_ratio: float) -> float:
    if log_ratio == 0:
        return 0.0
    size = math.log10(abs(log_ratio)) if math.isfinite(log_ratio) else DARKEST
    return min(1.0, max(0.0, (size - PALEST) / (DARKEST - PALEST)))


_LEGEND = (
    '<p class="about tokens key"><span class="sampled less" style="--shade:.8">less</span> and '
    '<span class="sampled more" style="--shade:.8">more</span> probable for the learner than for the rollout engine: '
    "palest at a log-ratio of 1e-4, full at 1. "
    '<span class="sampled less rejected" style="--shade:.8">Struck out</span>: rejected by the correction. '
    '<span class="given">Framed</span>: given by a tool or template, not sampled, never scored. '
    '<span class="prompt">Grey</span>: the prompt, or what came before this row of a session. '
    "Point at a token, or use the arrow keys, for its figures.</p>"
)
