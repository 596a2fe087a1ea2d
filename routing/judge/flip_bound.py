"""The bound on flips of every sample in every layer: counts that the rest of the batch does not explain.

A wrong sample hides in a mean. So each sample is held against its own batch, in each layer and over all of them. With
the lost share `q` (recorded experts that the live router would not choose, over all recorded ones) of `n` tokens:

- `e`, the expected share, is the lower quartile over the batch's samples, so that more than half of them may be wrong.
  It is at most a quarter of `c = 1 - K / E`, which routes without any relation to the live router lose if its load is
  even.
- `q` must lie a third of the way from `e` to `c` (a quarter, over all layers).
- `n KL(q || p)` must reach `EVIDENCE`, with `p` the largest of `2 e`, `SMALLEST` and, in a layer, twice the sample's
  own median over layers: the chance that independent tokens at rate `p` lose so much is at most `exp(-n KL)` (Hoeffding
  1963, theorem 1: it holds for any values in [0, 1], so for a token's share of lost experts). A few tokens may lose all
  by chance, and are no evidence.

Shape letters: S samples, L layers, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from routing.errors import MisalignedError, ReplayProofError
from routing.judge import token_agreement as by_token
from routing.judge.answer_agreement import wrong_answers
from routing.judge.end_agreement import SMALLEST, wrong_ends
from routing.judge.sample_flips import SampleFlips
from routing.judge.token_agreement import EVIDENCE, kl
from routing.layout.row_ids import name_of
from routing.record.sources import ReplayReport

FEW = 32
"""Tokens from which a share is taken as it is."""
NEAR = 0.2
"""Part of the way to chance below which no share is looked at."""
NAMED = 16
"""Samples that a message names. All of them are examined and counted."""


@dataclass(frozen=True)
class Suspect:
    """One sample with its worst layer.

    Attributes:
        key: of the sample (`SampleFlips.keys`).
        layer: the 0-based decoder layer where it stands out most.
        flip_rate: share of its sets there that the live router would not choose.
        lost: share of its recorded experts there that the live router would not choose.
        expected: that share in the sample at the lower quartile of the batch.
        num_tokens: its tokens.
    """

    key: int
    layer: int
    flip_rate: float
    lost: float
    expected: float
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"{name_of(self.key)}, layer {self.layer}: {self.flip_rate:.1%} of {self.num_tokens} sets flip, "
            f"{self.lost:.1%} of the experts are others; {self.expected:.1%} were expected"
        )


class FlipBoundError(ReplayProofError):
    """Every token used its recorded set, but these sets are too far from the live router's own choice.

    Attributes:
        suspects: the samples that stand out, the worst first.
        report: counters of the step.
        alike: no sample stands out of its batch, which is beyond the bound as a whole; `suspects` are the worst ones.
        certain: what is wrong even if the router has moved; None: nothing.
    """

    def __init__(
        self,
        what: str,
        suspects: Sequence[Suspect],
        report: ReplayReport,
        *,
        alike: bool = False,
        certain: MisalignedError | None = None,
    ) -> None:
        self.what, self.suspects, self.report, self.alike = what, tuple(suspects), report, alike
        self.certain = certain
        listed = named(suspects)
        super().__init__(
            f"{what}. Rows or layers are misaligned, or the live router has moved since these samples were taken:"
            f"{listed}"
        )


def named(entries: Sequence[object]) -> str:
    """A line for each of the first `NAMED`, and how many there are besides."""
    more = f"\n  and {len(entries) - NAMED} more" if len(entries) > NAMED else ""
    return "".join(f"\n  {entry}" for entry in entries[:NAMED]) + more


def fresh_fault(flips: SampleFlips, max_flip_rate: float) -> MisalignedError | None:
    """The fault of routes that flip more often than `max_flip_rate` at the very weights that sampled them.

    In a sample, in a layer of the batch, or overall; only rounding can have moved the router there.
    """
    due_SL, flipped = flips.due[flips.fresh], flips.flipped[flips.fresh]
    if not len(due_SL):
        return None

    def beyond(num_due: int, flipped: int, tokens: int) -> bool:
        rate = np.array(flipped / max(num_due, 1))
        return bool(rate > max_flip_rate and tokens * float(kl(rate, np.array(max_flip_rate))) >= EVIDENCE)

    keys, tokens = flips.keys[flips.fresh], due_SL.max(1)
    wrong = [
        f"{name_of(int(keys[place]))}: {flipped[place].sum() / due_SL[place].sum():.1%} of its sets flip"
        for place in range(len(due_SL))
        if beyond(due_SL[place].sum(), flipped[place].sum(), tokens[place])
    ]
    wrong += [
        f"layer {layer}: {flipped[:, layer].sum() / due_SL[:, layer].sum():.1%} of its sets flip"
        for layer in range(due_SL.shape[1])
        if beyond(due_SL[:, layer].sum(), flipped[:, layer].sum(), due_SL[:, layer].sum())
    ]
    if not wrong and not beyond(due_SL.sum(), flipped.sum(), tokens.sum()):
        return None
    return MisalignedError(
        f"the live router would not choose the recorded sets ({flipped.sum() / due_SL.sum():.1%} of them differ; "
        f"replay.max_local_flip_rate is {max_flip_rate:g}), although it has the weights that sampled them. Rounding "
        f"does not explain that:{named(wrong)}\nNothing was trained on this update. Look for a defect of the engine's "
        "route recording, and measure it with `moe-trm doctor`. Where the rollout's weights are rounded to few bits or "
        "have noise on purpose, raise the bound."
    )


def token_fault(flips: SampleFlips, top_k: int, num_experts: int) -> MisalignedError | None:
    """The fault where part of the tokens disagree with their routes (`routing.judge.token_agreement`)."""
    slots, chance = top_k * int(flips.due.any(0).sum()), 1 - top_k / num_experts
    wrong = [
        *wrong_ends(flips.ends, slots, chance),
        *wrong_answers(flips.answers, slots),
        *_wrong_samples(flips),
        *_wrong_layers(flips, top_k, num_experts),
    ]
    disagreement = flips.by_token
    tokens, num_apart, expected = (
        int(part.sum()) for part in (disagreement.tokens, disagreement.apart, disagreement.expected)
    )
    share, usual = num_apart / max(tokens, 1), expected / by_token.UNIT / max(tokens, 1)
    if not wrong and by_token.evidence(share, usual, tokens) < EVIDENCE:
        return None
    ends = int((disagreement.last[disagreement.run > 0] == disagreement.tokens[disagreement.run > 0] - 1).sum())
    begins = int((disagreement.first[disagreement.run > 0] == 0).sum())
    where = f" {ends} samples disagree at their end, {begins} at their beginning." if ends or begins else ""
    return MisalignedError(
        f"{num_apart} of {tokens} tokens ({share:.1%}) agree with their recorded routes no better than with those of "
        f"any other token; {usual:.1%} are expected of rounding or of a router that has moved, which spread over all "
        f"tokens.{where} Part of the routes are not those of their tokens and layers:{named(wrong)}\n"
        "Nothing was trained on this update. Look for a defect of the engine's route recording (its version, its cache "
        "settings), and measure it with `moe-trm doctor`."
    )


def _wrong_samples(flips: SampleFlips) -> list[str]:
    disagreement, wrong = flips.by_token, []
    for place in np.flatnonzero(disagreement.apart):
        tokens, num_apart = int(disagreement.tokens[place]), int(disagreement.apart[place])
        usual = int(disagreement.expected[place]) / by_token.UNIT / tokens
        nats, first, last = (int(part[place]) for part in disagreement[3:])
        run = nats >= EVIDENCE * by_token.UNIT
        if run or by_token.evidence(num_apart / tokens, usual, tokens) >= EVIDENCE:
            at = f", most of them from token {first} to {last}" if run else ""
            wrong.append((num_apart / tokens, f"{name_of(int(flips.keys[place]))}: {num_apart} of {tokens} tokens{at}"))
    return [words for _, words in sorted(wrong, reverse=True)]


def _wrong_layers(flips: SampleFlips, top_k: int, num_experts: int) -> list[str]:
    least, wrong = by_token.least_lost(top_k, 1 - top_k / num_experts), []
    for layer in np.flatnonzero(flips.apart[:, 0]):
        num_apart, lost_apart = (int(number) for number in flips.apart[layer])
        tokens, lost = int(flips.due[:, layer].sum()), int(flips.lost[:, layer].sum())
        usual = by_token.clean_share(top_k, least, tokens - num_apart, lost - lost_apart)
        if by_token.evidence(num_apart / tokens, usual, tokens) >= EVIDENCE:
            wrong.append(f"layer {layer}: {num_apart} of {tokens} tokens, where {usual:.1%} are expected")
    return wrong


class _Shares(NamedTuple):
    tokens: np.ndarray
    lost: np.ndarray
    expected: np.ndarray


def suspects(flips: SampleFlips, top_k: int, num_experts: int) -> list[Suspect]:
    """Samples whose flips the batch does not explain, the worst first."""
    chance = 1 - top_k / num_experts
    layers = np.flatnonzero(flips.due.any(0))
    # Thresholds are at least a quarter of the way to chance: samples rarely come near one.
    if not len(layers) or chance <= 0 or not (flips.lost > flips.due * (top_k * chance * NEAR)).any():
        return []
    by_layer = _shares(flips.due[:, layers], flips.lost[:, layers], top_k, chance)
    evidence = _evidence(by_layer, chance, way=1 / 3)
    due_S1, lost = flips.due.sum(1, keepdims=True), flips.lost.sum(1, keepdims=True)
    over_layers = _shares(due_S1, lost, top_k, chance)
    # The layers of a token are not independent: over all layers, a token counts once.
    over_layers = over_layers._replace(tokens=over_layers.tokens / np.maximum((flips.due > 0).sum(1, keepdims=True), 1))
    sample_evidence = np.maximum(evidence.max(1), _evidence(over_layers, chance, way=1 / 4)[:, 0])
    order = [
        sample_place
        for sample_place in np.argsort(-sample_evidence, kind="stable")
        if sample_evidence[sample_place] >= EVIDENCE
    ]
    return [_suspect(flips, by_layer, layers, sample_place) for sample_place in order]


def worst(flips: SampleFlips, top_k: int, num_experts: int) -> list[Suspect]:
    """All samples of a batch beyond its bound as a whole: those that lost most first, those of few tokens last."""
    layers = np.flatnonzero(flips.due.any(0))
    if not len(layers):
        return []
    by_layer = _shares(flips.due[:, layers], flips.lost[:, layers], top_k, 1 - top_k / num_experts)
    order = np.argsort(-(by_layer.lost * np.minimum(by_layer.tokens, FEW)).max(1), kind="stable")
    return [_suspect(flips, by_layer, layers, sample_place) for sample_place in order]


def _suspect(flips: SampleFlips, by_layer: _Shares, layers: np.ndarray, place: int) -> Suspect:
    column = int(np.argmax(by_layer.lost[place] - by_layer.expected))
    layer, tokens = int(layers[column]), int(by_layer.tokens[place, column])
    return Suspect(
        int(flips.keys[place]),
        layer,
        float(flips.flipped[place, layer] / max(tokens, 1)),
        float(by_layer.lost[place, column]),
        float(by_layer.expected[column]),
        tokens,
    )


def _shares(due_SL: np.ndarray, lost: np.ndarray, top_k: int, chance: float) -> _Shares:
    """Tokens `[S, L]`, lost shares `[S, L]` and the expected share `[L]` of each layer."""
    has_due = due_SL > 0
    shares = np.where(has_due, lost / np.maximum(due_SL * top_k, 1), 0.0)
    expected = _quantiles(np.where(has_due, shares, np.inf), has_due.sum(0), 1 / 4)
    return _Shares(due_SL, shares, np.minimum(expected, chance / 4))


def _quantiles(values: np.ndarray, numbers: np.ndarray, quantile: float) -> np.ndarray:
    """`[L]` quantiles of the `numbers` `[L]` least values of each column of `[S, L]`; 0 where there is none."""
    ordered, columns = np.sort(values, axis=0), np.arange(len(numbers))
    place = np.maximum(numbers - 1, 0) * quantile
    between = (ordered[np.floor(place).astype(int), columns] + ordered[np.ceil(place).astype(int), columns]) / 2
    return np.where(numbers > 0, between, 0.0)


def _evidence(seen: _Shares, chance: float, *, way: float) -> np.ndarray:
    """`[S, L]` `n KL(q || p)` where the share is beyond the threshold, else 0."""
    threshold = seen.expected + (chance - seen.expected) * way
    beyond = seen.lost >= threshold
    if not beyond.any():
        return np.zeros(seen.lost.shape)
    layers = seen.lost.shape[1]
    sample_median = (
        _quantiles(seen.lost.T, np.full(len(seen.lost), layers), 1 / 2)[:, None] if layers > 2 else np.zeros((1, 1))
    )
    usual = np.minimum(2 * np.maximum(np.maximum(seen.expected, sample_median), SMALLEST / 2), 0.9 * threshold)
    divergence = kl(seen.lost, usual)
    return np.where(beyond, seen.tokens * divergence, 0.0)


def fewest_tokens(top_k: int, num_experts: int) -> int:
    """Tokens from which a sample with routes of no relation is a suspect, in an otherwise clean batch."""
    lost = 1 - top_k / num_experts
    return math.ceil(EVIDENCE / float(kl(np.array(lost), np.array(SMALLEST))))
