"""Records whose sampling masks the sampler cannot have kept: found in every update pass, and kept out of the gradient.

Shape letters: B rows of a micro-batch, R forwarded tokens, N sampled tokens in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trm.config.rollout_rules import MASK_LIMIT
from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import FalseRecords
from moe_trm.learner.protocol import Scores
from moe_trm.methods import summable
from moe_trm.sampling_mask.bounds import SamplerBounds
from moe_trm.sampling_mask.violation import Violation
from moe_trm.types import TokenBatch

FEW_ROWS, FEW_SHARE = 2, 0.05
"""False masks in more rows than either are no accident of single requests: the run stops."""
REFUSED, LOWEST, JUDGED = "sampling_mask/refused_fraction", "sampling_mask/lowest_allowed", "sampling_mask/judged_rows"


@dataclass(frozen=True)
class MaskJudge:
    """Judge of the masks of a run, which passes over each row `epochs` times in a step."""

    bounds: SamplerBounds
    epochs: int = 1

    @classmethod
    def of(cls, rollout: RolloutConfig, violation: Violation, epochs: int) -> MaskJudge:
        """The judge of what `rollout` samples, where `violation` says what a sampled token outside its set does."""
        of_all = rollout.top_k is None or rollout.traits.top_p_of_all_ids
        top_k = min(rollout.top_k or MASK_LIMIT, MASK_LIMIT)
        has_floor, minimal = of_all and not rollout.min_p, violation != "union"
        return cls(SamplerBounds(rollout.top_p, top_k, has_floor, minimal), epochs)

    def measured(self, batch: TokenBatch, scores: Scores) -> tuple[Tensor, summable.Summable]:
        """`[B]` bool, the rows with a set that the settings do not allow, and metrics of them."""
        refused, lowest = self._judged(batch, scores)
        rows = batch.mask.any(1)
        return refused, {
            **summable.fraction(REFUSED, refused, rows),
            JUDGED: summable.count(rows),
            f"{LOWEST}:min": torch.tensor(lowest, dtype=torch.float64, device=refused.device),
        }

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise `FalseRecords` where more than a few rows of a step were refused."""
        share = metrics.get(REFUSED, 0.0)
        rows = share * metrics.get(JUDGED, 0.0) / self.epochs
        if rows > FEW_ROWS and share > FEW_SHARE:
            raise FalseRecords(
                "the engine's sampling masks are not those of its sampling settings",
                where="sampling masks, by the learner's own probabilities",
                got=f"{rows:.0f} samples ({share:.1%} of the step) whose kept ids lack likely ids or have others",
                expected=f"at most {FEW_ROWS}, or {FEW_SHARE:.0%}",
                fix="See whether the server samples with the run's temperature, top_p, top_k and min_p; "
                "`moe-trm doctor` compares them. docs/sampling_mask.md says what is compared.",
            )

    def _judged(self, batch: TokenBatch, scores: Scores) -> tuple[Tensor, float]:
        mask, device = batch.mask, scores.logprobs.device
        if batch.kept_offsets is None:
            return torch.zeros(len(mask), dtype=torch.bool, device=device), 0.0
        assert scores.log_kept_mass is not None, "scores of updates have the masses of kept sets"
        assert scores.log_kept_least is not None, "scores of updates have the masses of kept sets"
        judged = self.bounds.judge(
            batch.kept_offsets.diff().to(device),
            scores.log_kept_mass[mask],
            scores.log_kept_least[mask],
            (batch.full_logprobs - batch.rollout_logprobs)[mask],
            (scores.logprobs.detach() - batch.rollout_logprobs)[mask],
        )
        return torch.zeros_like(mask).masked_scatter(mask, judged.wrong).any(1), judged.lowest
