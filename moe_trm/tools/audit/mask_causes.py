"""Causes of recorded sampling masks that the sampler cannot have made.

Top-k, top-p and min-p all keep the most likely ids. So the ids of a mask hold as much probability under the model as
the best ids of that number do, and the sampled id is among them. A mask of another token or request does neither.

Shape letter: S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moe_trm.tools.audit.audit_answer import AuditAnswer
from moe_trm.tools.audit.dump import Array
from moe_trm.tools.audit.power import row_power, token_power
from moe_trm.tools.audit.reference import SHIFTS, RowScores
from routing.judge.token_agreement import EVIDENCE, LEAST, evidence

QUESTION = "sampling masks"
LACKS = 0.1
"""Probability that a mask may lack against the best ids of its size; rounding reorders ids that are equally likely."""


def mask_answer(scores: Sequence[RowScores], rows: int, share: float, fix: Callable[[str], str]) -> AuditAnswer | None:
    """The answer; None where no row has a mask that could be compared with probabilities. `rows`: of the dump."""
    masked = [row for row in scores if row.native is not None and row.native.gaps is not None]
    if not masked:
        return None
    outside = [_outside(row) for row in masked]
    bad = [without | (_gaps(row)[SHIFTS.index(0)] > LACKS) for row, without in zip(masked, outside, strict=True)]
    judged, tokens = sum(map(len, bad)), int(sum(part.sum() for part in bad))
    excluded = (
        f"Excluded: masks that are not of their token. Of a fault in {share:.0%} of the rows, one is in the sample "
        f"with {row_power(len(masked), rows, share):.1%}; of one in {share:.0%} of single tokens, enough disagree with "
        f"{token_power(judged, share):.1%}."
    )
    wrong = [n for n, part in enumerate(bad) if evidence(part.mean(), LEAST, len(part)) >= EVIDENCE]
    if not wrong and evidence(tokens / judged, LEAST, judged) < EVIDENCE:
        words = "They keep the most likely ids, and the sampled one."
        return AuditAnswer(QUESTION, "none", "ok", words, judged=judged, excluded=excluded)
    wrong = wrong or [n for n, part in enumerate(bad) if part.any()]
    share_bad = float(np.concatenate([bad[n] for n in wrong]).mean())
    by_shift = [float(np.concatenate([_gaps(masked[n])[place] for n in wrong]).mean()) for place in range(len(SHIFTS))]
    best = int(np.argmin(by_shift))
    num_outside = int(sum(outside[n].sum() for n in wrong))
    shifted = SHIFTS[best] != 0 and by_shift[best] <= 0.5 * by_shift[SHIFTS.index(0)]
    where = f" Those of the token {SHIFTS[best]:+d} further on do." if shifted else ""
    return AuditAnswer(
        QUESTION,
        "shifted" if shifted else "not the sampler's",
        "fail",
        f"{share_bad:.0%} of the masks in the affected rows do not hold the most likely ids of their token, and "
        f"{num_outside} do not hold the sampled id.{where}",
        fix("mask"),
        tokens,
        judged,
        tuple(masked[n].row.name for n in wrong),
        {"share": share_bad, "outside": float(num_outside)},
    )


def _gaps(row: RowScores) -> Array:
    """`[3, S]` of the routes under which the mask lacks less: an expert that rounding flipped moves probabilities."""
    parts = [part.gaps for part in (row.native, row.replayed) if part is not None and part.gaps is not None]
    gaps: Array = np.min(parts, axis=0)
    return gaps


def _outside(row: RowScores) -> Array:
    """`[S]` bool: the sampled id is not among the kept ones."""
    mask = row.row.mask
    assert mask is not None
    token = np.repeat(np.arange(row.row.num_sampled), np.diff(mask.offsets))
    hit = mask.ids == row.row.tokens[row.row.sampled][token]
    result: Array = np.bincount(token[hit], minlength=row.row.num_sampled) == 0
    return result
