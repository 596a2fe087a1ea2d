"""The mismatch below which correction gains nothing: the seeds' fourth conjecture, where the reward is exact.

`python -m benchmarks.evidence.budget [--seeds N] [--json FILE] [--picture FILE]`. A tabular policy is trained for 200
updates of Adam on batches of 64 answers, of 16 or 64 tokens. The sampler is apart from it by a fixed KL of the token.
Three rules:

- `none`: every answer counts as if the policy had sampled it;
- `token`: token ratios up to 2 (TIS);
- `masked`: rows within TRM-Avg's bound, which rejects a tenth of each batch.

Two kinds of mismatch: `noise` draws its direction anew for every batch, as rounding does; `tilt` keeps one direction
for the whole run, as an engine with another kernel or quantised weights does. Runs of one seed see the same random
numbers, so that gains are paired. The gain is in the exact expected reward at the end.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.evidence.chain import Array, Chain, Divergence, softmax
from benchmarks.evidence.estimators import CAP, Answers
from benchmarks.evidence.tasks import reasoning
from benchmarks.evidence.training import Adam, ascent_of
from benchmarks.figure import COLOURS, Panel, document, lines
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.observe.report.intervals import paired

DOSES = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 0.5)
KINDS = ("noise", "tilt")
RULES = ("token", "masked")
LENGTHS = (16, 64)
UPDATES, BATCH, RATE, REJECTED = 200, 64, 0.003, 0.1
MATTERS = 0.01
"""Expected reward that a gain must be shown to exceed, or not to reach, before it counts."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=8, help="runs of every setting (default: 8)")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"updates of a run (default: {UPDATES})")
    parser.add_argument("--picture", type=Path, help="write the figure here, as SVG")
    args = parser.parse_args(argv)
    rows = list(measure(args.seeds, args.updates))
    report("Gain of correction in the reward at the end, by KL of the token", rows, args.json)
    if args.picture:
        args.picture.write_text(draw(rows), encoding="utf-8")
    return 0


def measure(seeds: int, updates: int) -> Iterator[Row]:
    """One row per kind, dose and rule: the paired gain over no correction, with its 95% interval."""
    for length, kind, dose in itertools.product(LENGTHS, KINDS, DOSES):
        if not dose and kind != KINDS[0]:
            continue
        plain_rewards = [train("none", length, kind, dose, seed, updates) for seed in range(seeds)]
        for rule in RULES:
            rule_rewards = [train(rule, length, kind, dose, seed, updates) for seed in range(seeds)]
            gains = [b - a for a, b in zip(plain_rewards, rule_rewards, strict=True)]
            low, high = paired(gains).interval or (float("nan"), float("nan"))
            yield {
                "tokens": length,
                "kind": kind,
                "token_kl": dose,
                "rule": rule,
                "uncorrected": statistics.fmean(plain_rewards),
                "gain": statistics.fmean(gains),
                "low": low,
                "high": high,
                "says": words_for(low, high),
            }


def words_for(low: float, high: float) -> str:
    """Words for the interval of a gain."""
    if low > 0:
        return "gains"
    if high < 0:
        return "loses"
    return f"not shown, and below {MATTERS:g}" if max(-low, high) < MATTERS else "not shown"


def train(rule: str, length: int, kind: str, dose: float, seed: int, updates: int) -> float:
    """The exact expected reward after training."""
    chain, logits_SV = reasoning(seed, length, success=0.2)
    rng, adam = np.random.default_rng(seed), Adam(RATE)
    fixed_SV = np.random.default_rng(seed + 1000).normal(size=logits_SV.shape)
    for _ in range(updates):
        drawn_SV = rng.normal(size=logits_SV.shape)
        pi_SV = softmax(logits_SV)
        mu_SV = sampler(chain, logits_SV, drawn_SV if kind == "noise" else fixed_SV, dose)
        answers = Answers.sample(chain, mu_SV, pi_SV, BATCH, rng)
        advantages = answers.rewards - answers.rewards.mean()
        logits_SV = logits_SV + adam.step(
            ascent_of(chain, pi_SV, answers, weights(rule, answers.log_ratios) * advantages[:, None])
        )
    return chain.value(softmax(logits_SV))


def sampler(chain: Chain, logits_SV: Array, direction_SV: Array, token_kl: float) -> Array:
    """The policy moved along `direction_SV` until the mean KL of its tokens to the policy is nearly `token_kl`.

    To second order the KL is half the variance of the move; two corrections by the exact KL follow.
    """
    pi_SV = softmax(logits_SV)
    if not token_kl:
        return pi_SV
    centred_SV = direction_SV - (pi_SV * direction_SV).sum(1, keepdims=True)
    variance = float(chain.visits(pi_SV).mean(0) @ (pi_SV * centred_SV**2).sum(1))
    scale = math.sqrt(2 * token_kl / variance)
    for _ in range(2):
        distance = Divergence.between(chain, softmax(logits_SV + scale * direction_SV), pi_SV).token_kl
        scale *= math.sqrt(token_kl / distance)
    return softmax(logits_SV + scale * direction_SV)


def weights(rule: str, log_ratios: Array) -> Array:
    """Weight of every token, `[N, T]`."""
    if rule == "none":
        return np.ones_like(log_ratios)
    if rule == "token":
        capped: Array = np.minimum(np.exp(log_ratios), CAP)
        return capped
    divergences = (np.exp(log_ratios) - 1 - log_ratios).mean(1)
    kept = divergences <= np.quantile(divergences, 1 - REJECTED)
    return np.broadcast_to(kept[:, None], log_ratios.shape).astype(float)


def draw(rows: Sequence[Row]) -> str:
    """SVG: the gain of each rule by dose, one panel per kind and length."""
    parts: list[str] = []
    lowest, highest = (bound(float(row[key]) for row in rows) for bound, key in ((min, "low"), (max, "high")))
    for (down, length), (right, kind) in itertools.product(enumerate(LENGTHS), enumerate(KINDS)):
        points = [row for row in rows if (row["tokens"], row["kind"]) == (length, kind)]
        doses = list(dict.fromkeys(float(row["token_kl"]) for row in points))
        x0, y0 = 70 + 480 * right, 60 + 300 * down
        panel = Panel(x0, x0 + 300, len(doses) + 0.5, min(lowest, -0.01), max(highest, 0.01), top=y0, bottom=y0 + 190)
        ticks = [panel.y_min + (panel.y_max - panel.y_min) * part / 4 for part in range(5)]
        parts += panel.frame(f"Gain, {kind}, {length} tokens", [(tick, f"{tick:+.2f}") for tick in ticks])
        parts.append(f'<path d="M{panel.left} {panel.y(0):.1f}H{panel.right}" stroke="#64748b"/>')
        parts += [panel.below(panel.x(place), f"{dose:g}") for place, dose in enumerate(doses, start=1)]
        parts.append(panel.below((panel.left + panel.right) / 2, "KL of a token between sampler and policy", line=1))
        parts += lines(panel, {rule: [float(row["gain"]) for row in points if row["rule"] == rule] for rule in RULES})
        for rule, colour in zip(RULES, COLOURS, strict=False):
            for place, row in enumerate((row for row in points if row["rule"] == rule), start=1):
                ends = f"M{panel.x(place):.1f} {panel.y(float(row['low'])):.1f}V{panel.y(float(row['high'])):.1f}"
                parts.append(f'<path d="{ends}" stroke="{colour}" opacity="0.6"/>')
    return document(parts, 70 + 480 * len(KINDS), 60 + 300 * len(LENGTHS))


if __name__ == "__main__":
    sys.exit(main())
