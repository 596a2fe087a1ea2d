"""Reject rate of every rule, overall and by kind of row.

`python -m benchmarks.mask_rate [--bundle DIR | --checkpoint DIR] [--json FILE] [key=value ...]` judges a
recorded run (`record.bundle`), or a short run that it makes itself on a checkpoint with the real engines.

Rules that compare one score with one threshold are tried on a grid of thresholds. Each threshold is chosen to reject a
given share of rows (of tokens, for rules on tokens). Presets and other rules are used as they are. The last row, `of
the run`, has the rules that the recorded run was configured with, its own functions among them. A row counts as
rejected when it lost a token. The measured rate of TRM-Max is shown beside 1 - (1 - p)^T: the rate if tokens violated
independently with the measured probability p.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.mask_rate_results import Prediction, Rates
from benchmarks.options import command_line
from benchmarks.short_run import record_run, starting_checkpoint
from benchmarks.table import Row, report
from moe_trm import corrections
from moe_trm.config.schema import Config
from moe_trm.corrections import BoundRule, Evidence
from moe_trm.diagnostics.bounds import acceptance_probability
from moe_trm.errors import MoeTrmError
from moe_trm.learner.protocol import Learner
from moe_trm.recording.scores import ScoredUpdate
from moe_trm.step.minibatch import gather_minibatch
from moe_trm.step.recipe import recipe
from moe_trm.tools.whatif.offline import RecordedLearner
from moe_trm.tools.whatif.recording import load

RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
QUOTED = (0.01, 0.05, 0.1)
DECILES = 10
OF_THE_RUN = "of the run"
FIXED: Mapping[str, Mapping[str, float | str]] = {"ln_trm": {"delta": 0.01}}
"""Thresholds that are not calibrated and have no default."""
KEY = """
target: share of rows, or of tokens for a rule on tokens, that the threshold was chosen to reject; -: as published.
rows, tokens: shares rejected; shortest, longest: of rows in the first and last tenth by length; adv, correct, wrong: of
rows by sign of the advantage, and by a reward above 0. ess: effective sample size of the weights, of 1.
p of a token: chance of a score beyond max_kl; 1-(1-p)^T: rejected rows if tokens were independent."""
"""Columns of the tables in words."""
PLAIN = {"trm_max_avg", "seq_mean_k1", "seq_sum_k1", "token_k1"}
"""Rules that need thresholds by hand: the presets and the rules they are made of show them."""


def evidences(updates: Iterable[ScoredUpdate]) -> list[Evidence]:
    """Each update's whole minibatch."""
    recording = RecordedLearner()
    learner, batches = cast(Learner, recording), []
    for update in updates:
        part = recording.hold(update, needs_anchors=True)
        batches.append(gather_minibatch(part, learner.score(part.batches, part.sources), learner).evidence)
    return batches


class Strata:
    """Rows of all updates by length, sign of the advantage and reward. Rows without sampled tokens count nowhere.

    Deciles hold equally many rows: rows of one length are dealt to two of them by chance.
    """

    def __init__(self, batches: Sequence[Evidence]) -> None:
        self.has_tokens = _rows(batches, lambda e: e.mask.any(1)).astype(bool)
        self.length = _rows(batches, lambda e: e.mask.sum(1))[self.has_tokens]
        self.advantage = _rows(batches, lambda e: (e.advantages * e.mask).sum(1))[self.has_tokens]
        self.reward = _rows(batches, lambda e: e.rewards)[self.has_tokens]
        ties = np.random.default_rng(0).permutation(len(self.length))
        rank = np.argsort(np.lexsort((ties, self.length)))
        self.decile = rank * DECILES // max(len(rank), 1)

    def by_decile(self, values: np.ndarray) -> tuple[float, ...]:
        """Mean of `values` of the rows of each decile."""
        return tuple(_mean(values[self.decile == place]) for place in range(DECILES))

    def lengths(self) -> tuple[float, ...]:
        """Mean length of each decile."""
        return self.by_decile(self.length)


def rates(
    name: str, bound: Sequence[BoundRule], batches: Sequence[Evidence], strata: Strata, target: float | None
) -> Rates:
    """Rates of the rules `bound` applied together."""
    joint = corrections.compose(bound, whole_minibatch=True)
    decided = [joint(evidence) for evidence in batches]
    lost = np.concatenate(
        [(~correction.keep & e.mask).any(1).numpy() for correction, e in zip(decided, batches, strict=True)]
    )[strata.has_tokens]
    kept = np.concatenate([correction.keep[e.mask].numpy() for correction, e in zip(decided, batches, strict=True)])
    weights = np.concatenate(
        [
            (correction.weights * correction.keep)[e.mask].double().numpy()
            for correction, e in zip(decided, batches, strict=True)
        ]
    )
    square = float((weights**2).mean())
    setting = {
        f"{bound_rule.rule.name}.{key}": value
        for bound_rule in bound
        for key, value in bound_rule.thresholds.items()
        if value is not None
    }
    return Rates(
        name, setting, target,
        rows=_mean(lost), tokens=1 - _mean(kept), ess=float(weights.mean()) ** 2 / square if square else 0.0,
        deciles=strata.by_decile(lost),
        positive=_mean(lost[strata.advantage > 0]), negative=_mean(lost[strata.advantage < 0]),
        correct=_mean(lost[strata.reward > 0]), wrong=_mean(lost[strata.reward <= 0]),
    )  # fmt: skip


def all_rates(batches: Sequence[Evidence], strata: Strata, config: Config | None = None) -> list[Rates]:
    """Every rule over its grid, every rule without a score at its defaults, every preset, the rules of `config`."""
    results = []
    for name in corrections.names():
        rule, fixed = corrections.get(name), FIXED.get(name, {})
        if rule.calibrate is not None:
            window = [corrections.scores(rule, evidence, **fixed) for evidence in batches]
            for rate in RATES:
                results.append(rates(name, [corrections.calibrate(rule, window, rate, **fixed)], batches, strata, rate))
        elif name not in PLAIN:
            results.append(rates(name, [rule.bind()], batches, strata, None))
    for name, preset in corrections.presets.items():
        bound = [corrections.get(rule).bind(**thresholds) for rule, thresholds in preset.rules]
        results.append(rates(name, bound, batches, strata, None))
    if config is not None and (bound := bound_rules(config, batches)):
        results.append(rates(OF_THE_RUN, bound, batches, strata, None))
    return results


def bound_rules(config: Config, batches: Sequence[Evidence]) -> list[BoundRule]:
    """The rules of `correction`; those with a `target_reject_rate` with thresholds chosen on these batches."""
    described = recipe(config)
    chosen = []
    for item in described.uncalibrated:
        window = [corrections.scores(item.rule, evidence, **item.fixed) for evidence in batches]
        chosen.append(corrections.calibrate(item.rule, window, item.target_reject_rate, **item.fixed))
    return [*described.rules, *chosen]


def predictions(batches: Sequence[Evidence], strata: Strata) -> list[Prediction]:
    """TRM-Max at the thresholds of the grid, and the prediction for independent tokens."""
    rule, results = corrections.get("trm_max"), []
    window = [corrections.scores(rule, evidence) for evidence in batches]
    scores = np.concatenate([row_scores.double().numpy() for row_scores in window])
    token_scores = np.concatenate([(e.ratios.total.detach()[e.mask].double() ** 2 / 2).numpy() for e in batches])
    for rate in RATES:
        max_kl = float(cast(float, corrections.calibrate(rule, window, rate).thresholds["max_kl"]))
        p = float((token_scores > max_kl).mean())
        expected = np.array([1 - acceptance_probability(int(length), p) for length in strata.length])
        lost = scores > max_kl
        results.append(
            Prediction(max_kl, p, _mean(lost), _mean(expected), strata.by_decile(lost), strata.by_decile(expected))
        )
    return results


def table(results: Sequence[Rates], predicted: Sequence[Prediction]) -> list[Row]:
    """Rules at the quoted rates, then everything that has no grid, then TRM-Max against its prediction."""
    lines: list[Row] = []
    for rule_rates in results:
        if rule_rates.target is None or rule_rates.target in QUOTED:
            shown = {k.split(".")[1]: v for k, v in rule_rates.setting.items()} if rule_rates.target is not None else {}
            if rule_rates.rule == OF_THE_RUN:
                shown = dict(rule_rates.setting)
            threshold = ", ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else str(value) for key, value in shown.items()
            )
            lines.append(
                {
                    "rule": rule_rates.rule,
                    "thresholds": threshold or "as published",
                    "target": "-" if rule_rates.target is None else f"{rule_rates.target:.0%}",
                    "rows": rule_rates.rows,
                    "tokens": rule_rates.tokens,
                    "shortest": rule_rates.deciles[0],
                    "longest": rule_rates.deciles[-1],
                    "adv > 0": rule_rates.positive,
                    "adv < 0": rule_rates.negative,
                    "correct": rule_rates.correct,
                    "wrong": rule_rates.wrong,
                    "ess": rule_rates.ess,
                }
            )
    for prediction in predicted:
        lines.append(
            {
                "trm_max, max_kl": prediction.max_kl,
                "p of a token": prediction.violation_probability,
                "rows": prediction.measured,
                "1-(1-p)^T": prediction.predicted,
                "longest": prediction.measured_deciles[-1],
                "longest, predicted": prediction.predicted_deciles[-1],
            }
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--bundle", type=Path, help="a recorded run, or a dump that moe-trm whatif reads")
    source.add_argument("--checkpoint", type=Path, help="Hugging Face folder to run on (default: the quickstart's)")
    parser.add_argument("--steps", type=int, default=6, help="steps of the run that is made (default: 6)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run that is made")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = None
            if args.bundle is None:
                checkpoint = starting_checkpoint(args.checkpoint, Path(scratch))
                made = record_run(checkpoint, Path(scratch), args.steps, args.overrides)
            recording = load(made or args.bundle)
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    batches = evidences(update for updates in recording.steps.values() for update in updates)
    strata = Strata(batches)
    config = recording.config if recording.trained else None  # a dump has no rules of ours
    results, predicted = all_rates(batches, strata, config), predictions(batches, strata)
    what = (
        f"{recording.source}: {len(strata.length)} rows, {int(strata.length.sum())} tokens, lengths "
        f"{strata.length.min():.0f} to {strata.length.max():.0f}"
    )
    details = {
        "grid": [vars(rule_rates) for rule_rates in results],
        "trm_max": [vars(prediction) for prediction in predicted],
        "decile_lengths": strata.lengths(),
    }
    report(f"Rejected shares, {what}", table(results, predicted), args.json, details)
    print(KEY)
    return 0


def _rows(batches: Sequence[Evidence], of: object) -> np.ndarray:
    return np.concatenate([of(evidence).double().numpy() for evidence in batches])  # type: ignore[operator]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


if __name__ == "__main__":
    sys.exit(main())
