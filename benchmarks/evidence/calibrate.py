"""Thresholds at the age that they are for: the share of a recorded run that each rule on rows would have rejected.

`python -m benchmarks.evidence.calibrate BUNDLE [--age 8] [--rate 0.2]`. The recording is of a run without correction
(`record.bundle`). Steps count whose samples are this many versions old in the mean. A rule's own calibration
(`target_reject_rate`) measures the first steps of a run, and these see younger samples than the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios
from moe_trm.recording.scores import ScoredBatch, ScoredUpdate, ScoresReader

RULES: Mapping[str, Mapping[str, float]] = {"trm_max": {}, "trm_avg": {}, "ln_trm": {"delta": 0.06}, "opsm": {}}
"""Rules on rows, with what is not calibrated."""
SLACK = 0.5
"""Mean age that a step may lack to the requested one."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("bundle", type=Path, help="folder of record.bundle")
    parser.add_argument("--age", type=float, default=8, help="versions (default: 8)")
    parser.add_argument("--rate", type=float, default=0.2, help="share to reject of what a rule judges (default: 0.2)")
    parser.add_argument("--ratio", default="merged", help="the ratio that rules read (default: merged)")
    args = parser.parse_args(argv)
    reader = ScoresReader(args.bundle)
    steps = {step: reader.read(step) for step in reader.steps()}
    rows = list(thresholds(steps, args.age, args.rate, args.ratio))
    report(f"Thresholds that reject {args.rate:.0%} at age {args.age:g}, ratio {args.ratio}", rows, args.json)
    return 0


def thresholds(
    steps: Mapping[int, Sequence[ScoredUpdate]], age: float, rate: float, ratio: str = "merged"
) -> Iterator[Row]:
    """One row per rule: its threshold, and the share of rows with each sign that it would reject.

    Raises:
        ConfigError: no step of the recording is that old.
    """
    old = [step for step, updates in steps.items() if mean_age(updates) >= age - SLACK]
    if not old:
        raise ConfigError(
            "no step of this recording has samples that old",
            where="--age",
            got=f"{max((mean_age(updates) for updates in steps.values()), default=0.0):.1f} at most",
            expected=f"{age:g}",
            fix="record a longer run, or one with a larger pipeline.max_staleness",
        )
    evidences = [evidence_of(batch) for step in old for update in steps[step] for batch in update.batches]
    for name, fixed in RULES.items():
        rule = corrections.get(name)
        settings: dict[str, float | str] = {**fixed, "ratio": ratio}
        window = [corrections.scores(rule, evidence, **settings) for evidence in evidences]
        bound = corrections.calibrate(rule, window, rate, **settings)
        threshold_text = ", ".join(f"{key}={bound.thresholds[key]:.4g}" for key in rule.calibrated)
        yield {
            "rule": name,
            "threshold": threshold_text,
            "steps": f"{min(old)} to {max(old)}",
            "rows_judged": sum(len(scores) for scores in window),
            **{f"rejected_{sign}": share for sign, share in _by_sign(bound, evidences).items()},
        }


def mean_age(updates: Sequence[ScoredUpdate]) -> float:
    """Versions from the weights that sampled to the weights at the start of the step, mean over sampled tokens."""
    pairs = [(update.version - batch.versions[batch.mask]).float() for update in updates for batch in update.batches]
    return float(torch.cat(pairs).mean()) if pairs else 0.0


def evidence_of(batch: ScoredBatch) -> Evidence:
    """Evidence as a rule saw it; without an anchor the update's own forward pass stands for it."""
    anchor = batch.current_logprobs if batch.anchor_logprobs is None else batch.anchor_logprobs
    ratios = LogRatios(batch.rollout_logprobs, batch.behavior_logprobs, batch.current_logprobs, batch.mask, anchor)
    return Evidence(ratios, batch.advantages)


def _by_sign(bound: corrections.BoundRule, evidences: Sequence[Evidence]) -> dict[str, float]:
    """Share of rejected rows among those with positive, and with negative advantages."""
    counted = {"positive": [0, 0], "negative": [0, 0]}
    for evidence in evidences:
        kept = bound(evidence).keep.any(1)
        signs = torch.where(evidence.mask, evidence.advantages, 0.0).sum(1)
        for sign, rows in (("positive", signs > 0), ("negative", signs < 0)):
            counted[sign][0] += int((rows & ~kept).sum())
            counted[sign][1] += int(rows.sum())
    return {sign: rejected / rows for sign, (rejected, rows) in counted.items() if rows}


if __name__ == "__main__":
    sys.exit(main())
