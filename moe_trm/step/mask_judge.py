"""Records whose sampling masks the sampler cannot have kept: found by the pass at the weights that sampled them.

They take no part in the gradient.

A row that several versions sampled, or one whose weights no pass of the step has, is not judged, and counted so.

Shape letters: B rows of a micro-batch, R forwarded tokens, N sampled tokens in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_trm.errors import FalseRecords
from moe_trm.learner.protocol import Scores
from moe_trm.methods import summable
from moe_trm.sampling_mask.bounds import SamplerBounds
from moe_trm.types import TokenBatch

FEW_ROWS, FEW_SHARE = 2, 0.05
"""False masks in more rows than either are no accident of single requests: the run stops."""


class MaskJudge:
    """Judge of the masks of a run."""

    def __init__(self, bounds: SamplerBounds) -> None:
        self._bounds = bounds
        self._refused_rows: dict[int, bool] = {}
        self._lowest_of_rows: dict[int, float] = {}

    def observe(self, batch: TokenBatch, scores: Scores, version: int) -> None:
        """Judge the rows that the weights of `version` alone sampled, from their scores under these weights.

        Each row is judged by itself, so nothing depends on what else is in its micro-batch. Scores without the masses
        of kept sets judge nothing.
        """
        fresh = [oldest == version == newest for oldest, newest in batch.sampled_by]
        if scores.log_kept_mass is None or scores.log_kept_least is None or not any(fresh):
            return
        assert batch.kept_offsets is not None, "the masses are of kept sets"
        mask = batch.mask & torch.tensor(fresh, device=batch.mask.device)[:, None]
        sizes = batch.kept_offsets.diff().to(mask.device)[mask[batch.mask]]
        logprobs = (scores.logprobs.detach()[mask], batch.rollout_logprobs[mask])
        figures = (sizes, scores.log_kept_mass[mask], scores.log_kept_least[mask], *logprobs)
        lengths = mask.sum(1).tolist()
        of_rows = zip(*(torch.split(values.cpu(), lengths) for values in figures), strict=True)
        for row, is_fresh, of_row in zip(batch.sample_ids, fresh, of_rows, strict=True):
            if is_fresh:
                judged = self._bounds.judge(*of_row)
                self._refused_rows[row] = bool(judged.wrong.any())
                self._lowest_of_rows[row] = judged.lowest

    def measured(self, batch: TokenBatch) -> tuple[Tensor, summable.Summable]:
        """`[B]` bool, the rows with a set that the settings do not allow, and metrics of what was judged."""
        has_tokens = batch.mask.any(1)
        verdicts = [self._refused_rows.get(row) for row in batch.sample_ids]
        judged, refused = (
            torch.tensor(values, device=batch.mask.device)
            for values in ([verdict is not None for verdict in verdicts], [bool(verdict) for verdict in verdicts])
        )
        lowest = torch.tensor(
            [self._lowest_of_rows.get(row, 0.0) for row in batch.sample_ids],
            dtype=torch.float64,
            device=batch.mask.device,
        )
        return refused, {
            **summable.fraction("sampling_mask/refused_fraction", refused, has_tokens),
            **summable.fraction("sampling_mask/judged_fraction", judged, has_tokens),
            **summable.mean("sampling_mask/lowest_allowed", lowest, judged),
        }

    def end_step(self) -> None:
        """Forget the rows of the step."""
        self._refused_rows, self._lowest_of_rows = {}, {}


def check_refused(metrics: Mapping[str, float], num_samples: int) -> None:
    """Raise `FalseRecords` where more than a few of the samples of a step were refused."""
    share = metrics.get("sampling_mask/refused_fraction", 0.0)
    if share * num_samples > FEW_ROWS and share > FEW_SHARE:
        raise FalseRecords(
            "the engine's sampling masks are not those of its sampling settings",
            where="sampling masks, by the probabilities of the weights that sampled",
            got=f"{share * num_samples:.0f} samples ({share:.1%} of the step) whose kept ids lack likely ids or have "
            "others",
            expected=f"at most {FEW_ROWS}, or {FEW_SHARE:.0%}",
            fix="See whether the server samples with the run's temperature, top_p, top_k and min_p; "
            "`moe-trm doctor` compares them. docs/sampling_mask.md says what is compared.",
        )
