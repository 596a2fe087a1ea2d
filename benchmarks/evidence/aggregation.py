"""Over how many tokens should ratios be multiplied? The seeds' first conjecture, on tasks whose gradient is exact.

`python -m benchmarks.evidence.aggregation [--seeds N] [--json FILE] [--picture FILE]`. The conjecture: for answers of
200 tokens and more, neither token-level nor sequence-level importance sampling has the largest progress proxy

    P(g) = <grad J, E g>^2 / (tr Var(g) + |Bias(g)|^2),

but something between the two. Lengths are 64 to 1,024 tokens. The policies are apart by a fixed KL of the token, in a
random direction or along the sampler's gradient. `P` is taken of a batch of answers, and given as a share of `P` on
policy. The gradient, the bias of nothing and the moments of sequence ratios are exact. Other estimators are averages
over 4,096 answers.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.evidence.chain import DIRECTIONS, at_distance, softmax
from benchmarks.evidence.estimators import FAMILIES, Answers, exact, moments
from benchmarks.evidence.tasks import reasoning
from benchmarks.figure import Panel, document, lines
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.observe.report.intervals import paired

LENGTHS = (64, 128, 256, 512, 1024)
TOKEN_KL = (1e-4, 1e-3, 1e-2)
BATCHES = (128, 4096)
RECOVERY = {"a mistake stays": 0.0, "mistakes are made good": 1 / 64}
NUM_ANSWERS = 4096
EXTREMES = ("token", "sequence")
WAYS = ("random", "gradient")
"""Directions between the policies; the picture has the first."""
SHOWN = ("no ratio", "token", "token, at most 2", "turn", "prefix, at most 2", "geometric mean", "sequence, at most 2",
         "sequence")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=8, help="random tasks (default: 8)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of an answer (64 ... 1024)")
    parser.add_argument("--picture", type=Path, help="write the figure here, as SVG")
    args = parser.parse_args(argv)
    rows = list(measure(args.lengths, args.seeds))
    report("Share of the on-policy progress proxy: mean over tasks, and its 95% interval", rows, args.json)
    for way in WAYS:
        print(f"{way}: {verdict([row for row in rows if row['direction'] == way])}")
    if args.picture:
        args.picture.write_text(draw(rows, args.lengths), encoding="utf-8")
    return 0


def measure(lengths: Sequence[int], seeds: int) -> Iterator[Row]:
    """One row per direction, task, distance, batch, length and estimator; its share above token ratios is paired."""
    for way, (task, recovery), token_kl, length in itertools.product(WAYS, RECOVERY.items(), TOKEN_KL, lengths):
        shares = [shares_of(seed, length, recovery, token_kl, way) for seed in range(seeds)]
        for batch, name in itertools.product(BATCHES, FAMILIES):
            values = [task_shares[batch, name] for task_shares in shares]
            low, high = paired(values).interval or (float("nan"), float("nan"))
            gains = [value - task_shares[batch, "token"] for value, task_shares in zip(values, shares, strict=True)]
            gain_low, gain_high = paired(gains).interval or (float("nan"), float("nan"))
            yield {
                "direction": way,
                "task": task,
                "token_kl": token_kl,
                "batch": batch,
                "tokens": length,
                "estimator": name,
                "share": statistics.fmean(values),
                "low": low,
                "high": high,
                "above_token": statistics.fmean(gains),
                "above_token_low": gain_low,
                "above_token_high": gain_high,
            }


def shares_of(seed: int, length: int, recovery: float, token_kl: float, way: str) -> Mapping[tuple[int, str], float]:
    """P of every estimator on one task, as a share of P on policy, by batch and name."""
    chain, logits_SV = reasoning(seed, length, recovery=recovery)
    rng = np.random.default_rng(1_000_003 * seed + length)
    mu_SV = softmax(logits_SV)
    direction_SV = DIRECTIONS[way](chain, mu_SV, rng.normal(size=logits_SV.shape))
    pi_SV = at_distance(chain, logits_SV, direction_SV, token_kl)
    gradient_SV, on_policy = chain.gradient(pi_SV), exact(chain, pi_SV, pi_SV, 1.0)
    answers = Answers.sample(chain, mu_SV, pi_SV, NUM_ANSWERS, rng)
    proxy_shares = {}
    for name, weights in FAMILIES.items():
        if name in ("sequence", "geometric mean"):
            estimate = exact(chain, mu_SV, pi_SV, 1.0 if name == "sequence" else 1 / length)
        else:
            estimate = moments(chain, mu_SV, pi_SV, answers, weights(answers.log_ratios))
        for batch in BATCHES:
            proxy_shares[batch, name] = estimate.progress(gradient_SV, batch) / on_policy.progress(gradient_SV, batch)
    return proxy_shares


def verdict(rows: Sequence[Row]) -> str:
    """The cells of 256 tokens and more, counted by which estimator is best."""
    best: dict[str, int] = {}
    clear = 0
    cells = itertools.groupby(rows, key=lambda row: (row["task"], row["token_kl"], row["batch"], row["tokens"]))
    for (*_, tokens), cell in cells:
        if int(tokens) < 200:
            continue
        ranked = sorted(cell, key=lambda row: -float(row["share"]))
        best[str(ranked[0]["estimator"])] = best.get(str(ranked[0]["estimator"]), 0) + 1
        extreme = max(float(row["high"]) for row in ranked if row["estimator"] in EXTREMES)
        clear += ranked[0]["estimator"] not in EXTREMES and float(ranked[0]["low"]) > extreme
    counts = ", ".join(f"{name} in {count}" for name, count in sorted(best.items(), key=lambda item: -item[1]))
    return f"Best from 256 tokens on: {counts} of {sum(best.values())}; clearly above token and sequence in {clear}."


def draw(rows: Sequence[Row], lengths: Sequence[int]) -> str:
    """SVG: the share by length, one panel per task and distance, at the smaller batch."""
    parts: list[str] = []
    for (down, task), (right, token_kl) in itertools.product(enumerate(RECOVERY), enumerate(TOKEN_KL)):
        x0, y0 = 60 + 500 * right, 50 + 300 * down
        panel = Panel(x0, x0 + 300, len(lengths) + 0.5, 0, 1.3, top=y0, bottom=y0 + 190)
        parts += panel.frame(f"{task}, KL {token_kl:g} a token", [(share / 4, f"{25 * share}%") for share in range(5)])
        parts += [panel.below(panel.x(place), str(length)) for place, length in enumerate(lengths, start=1)]
        parts.append(panel.below((panel.left + panel.right) / 2, "tokens of an answer", line=1))
        shown = (WAYS[0], task, token_kl, BATCHES[0])
        points = [row for row in rows if (row["direction"], row["task"], row["token_kl"], row["batch"]) == shown]
        parts += lines(
            panel, {name: [float(row["share"]) for row in points if row["estimator"] == name] for name in SHOWN}
        )
    return document(parts, 60 + 500 * len(TOKEN_KL), 50 + 300 * len(RECOVERY))


if __name__ == "__main__":
    sys.exit(main())
