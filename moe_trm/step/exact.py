"""The invariant of `exact`: rollout and learner agree to the last bit, token by token, before anything trains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_trm.errors import MoeTrmError
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import TokenBatch
from routing.record.sources import ReplayReport


class InexactError(MoeTrmError):
    """The engines of an exact run differ, by `got`.

    `token_ids`: a text whose last token's log-prob differs; empty: routes differ, and no log-prob. `cause`: the
    operation in which the engines differ, where it has been looked for.
    """

    def __init__(self, got: str, token_ids: Sequence[int], cause: str = "") -> None:
        self.token_ids = tuple(token_ids)
        super().__init__(
            "rollout and learner differ in an exact run" + (f": {cause}" if cause else ""),
            where="config key exact",
            got=got,
            expected="the same bits in every log-prob, and no flip",
            fix="Nothing of this batch was trained. `moe-trm doctor CONFIG exact=true --bisect` compares the engines "
            "at the weights of model.checkpoint. exact=false goes on with a difference of rounding.",
        )
        self._got = got

    def because(self, cause: str) -> InexactError:
        """The same with its cause."""
        return InexactError(self._got, self.token_ids, cause)


def proved(parts: Sequence[AnchoredMinibatch], report: ReplayReport) -> ReplayReport:
    """The report of the passes that scored these minibatches, once both are proved.

    Raises `InexactError` at the first token whose log-prob under the weights that sampled is not the rollout's, or
    where the learner's own routers chose other experts than were replayed.
    """
    for part in parts:
        for batch, scores in zip(part.batches, part.scores, strict=True):
            _check(batch, scores.logprobs)
    if report.local_flip_rate:
        raise InexactError(f"flips in {report.local_flip_rate} of the replayed token-layers", ())
    return report


def _check(batch: TokenBatch, logprobs: Tensor) -> None:
    differs = (logprobs != batch.rollout_logprobs) & batch.mask
    if not differs.any():
        return
    row, place = differs.nonzero()[0].tolist()
    ours, theirs = float(logprobs[row, place]), float(batch.rollout_logprobs[row, place])
    ids = [*batch.input_ids[row, : place + 1].tolist(), int(batch.target_ids[row, place])]
    raise InexactError(
        f"token {place + 1} of a row has log-prob {ours!r} in the learner and {theirs!r} in the rollout, as the first "
        f"of {int(differs.sum())} of {int(batch.mask.sum())} sampled tokens in its micro-batch",
        ids,
    )
