"""Every preset against verl's own presets and functions, on random data.

`python -m benchmarks.verl_presets --verl FOLDER [--cases N] [--json FILE]`. verl is not a dependency: FOLDER
is one into which it was installed for this comparison (`pip install --no-deps --target FOLDER verl tensordict ray
codetiming`). Each case has up to 12 rows of up to 24 tokens, half of it padding or tool tokens, log-ratios to +-40,
one-token rows and empty rows. verl decides from two log-probs: `old` is the learner's at the start of the step
and, in bypass, the current ones. A case is equal when the kept tokens are the same and their weights agree to 1e-9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm import corrections
from moe_trm.corrections import Correction, Evidence
from moe_trm.ratios import LogRatios

CASES = 200
Theirs = Callable[[str, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(preset, old, rollout, mask) -> (weights, keep)`."""


@dataclass(frozen=True)
class Case:
    """Log-probs of the four policies and the mask, `[B, T]`."""

    rollout: Tensor
    behavior: Tensor
    proximal: Tensor
    current: Tensor
    mask: Tensor

    @property
    def ratios(self) -> LogRatios:
        return LogRatios(self.rollout, self.behavior, self.current, self.mask, self.proximal)


def make_case(seed: int, *, stale: bool) -> Case:
    """Random log-probs in float64; without `stale` all samples are of the weights that train first (synchronous)."""
    gen = torch.Generator().manual_seed(seed)
    rows, tokens = int(torch.randint(3, 13, (1,), generator=gen)), int(torch.randint(1, 25, (1,), generator=gen))
    # Small, medium and extreme differences, so that every threshold has rows on both sides.
    scales = torch.tensor([1e-4, 1e-3, 0.02, 0.3, 2.0, 40.0], dtype=torch.float64)

    def difference() -> Tensor:
        scale = scales[torch.randint(len(scales), (rows, 1), generator=gen)]
        return scale * (2 * torch.rand(rows, tokens, generator=gen, dtype=torch.float64) - 1)

    mask = torch.rand(rows, tokens, generator=gen) < 0.5
    mask[0] = False
    mask[1] = torch.arange(tokens) == tokens // 2
    rollout = -3 * torch.rand(rows, tokens, generator=gen, dtype=torch.float64)
    behavior = rollout + difference()
    proximal = behavior + difference() if stale else behavior
    return Case(rollout, behavior, proximal, proximal + difference(), mask)


def ours(name: str, case: Case) -> Correction:
    """The preset's rules together."""
    rules = [corrections.get(rule).bind(**thresholds) for rule, thresholds in corrections.presets[name].rules]
    return corrections.compose(rules)(Evidence(case.ratios, torch.ones_like(case.rollout)))


def differences(name: str, case: Case, theirs: Theirs) -> int:
    """Number of tokens that are kept by one side only, or weigh otherwise."""
    correction = ours(name, case)
    old = case.current if corrections.presets[name].bypass else case.proximal
    weights, keep = theirs(name, old, case.rollout, case.mask)
    keep_differs = (correction.keep != keep) & case.mask
    weight_differs = (correction.weights - weights).abs() > 1e-9 * (1 + weights.abs())
    return int((keep_differs | (weight_differs & keep & correction.keep)).sum())


def load_presets(folder: Path) -> Theirs:
    """verl's presets, by their own names and defaults, applied by its own function."""
    sys.path.append(str(folder))
    config = import_module("verl.trainer.config.algorithm").RolloutCorrectionConfig
    function = import_module("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_and_rejection_mask

    def run(name: str, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        preset: Any = getattr(config, name)()
        if not mask.any():
            return torch.ones_like(old), mask  # verl refuses a batch without tokens
        try:
            weights, keep, _ = function(
                old,
                rollout,
                mask.double(),
                rollout_is=preset.rollout_is,
                rollout_is_threshold=preset.rollout_is_threshold,
                rollout_is_batch_normalize=preset.rollout_is_batch_normalize,
                rollout_rs=preset.rollout_rs,
                rollout_rs_threshold=preset.rollout_rs_threshold,
            )
        except ZeroDivisionError:
            return torch.zeros_like(old), mask & False  # its metrics divide by the weights, which are all zero
        applied = torch.ones_like(old) if weights is None else weights.batch["rollout_is_weights"]
        if "icepop" in name:
            keep = keep.bool() & (applied > 0)  # it zeroes the weight where we drop the token: the same gradient
        return applied, keep.bool()

    return run


def compared(theirs: Theirs, cases: int) -> list[Row]:
    """One row of each preset: cases, tokens, kept tokens and differences, synchronous and with stale samples."""
    rows: list[Row] = []
    for name in corrections.presets:
        row: Row = {"preset": name}
        for pipeline in ("sync", "async"):
            random_cases = [make_case(seed, stale=pipeline == "async") for seed in range(cases)]
            row |= {
                f"{pipeline} tokens": sum(int(case.mask.sum()) for case in random_cases),
                f"{pipeline} kept": sum(int(ours(name, case).keep.sum()) for case in random_cases),
                f"{pipeline} different": sum(differences(name, case, theirs) for case in random_cases),
            }
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--verl", type=Path, required=True, help="folder that holds an installed verl")
    parser.add_argument("--cases", type=int, default=CASES, help="batches of each kind (default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = compared(load_presets(args.verl), args.cases)
    report(f"Presets against verl's own, {args.cases} random batches each, synchronous and stale", rows, args.json)
    return 1 if any(row[f"{kind} different"] for row in rows for kind in ("sync", "async")) else 0


if __name__ == "__main__":
    sys.exit(main())
