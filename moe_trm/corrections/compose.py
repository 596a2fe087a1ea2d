"""Several rules as one: weights multiply, keep masks are joined by AND, every rule and the whole are reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_trm import summable
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rule import BoundRule, kept_fractions
from moe_trm.errors import ConfigError


def compose(rules: Sequence[BoundRule], *, whole_minibatch: bool = False) -> Callable[[Evidence], Correction]:
    """One correction that applies `rules`, each to the original evidence: no rule sees a mask thinned by another.

    weights = prod_k weights_k,  keep = mask and keep_1 and keep_2 ...

    Without rules every sampled token is kept with weight 1. Metrics: `correction/<rule>/...` of each rule and
    `correction/kept_fraction`, `correction/kept_sequence_fraction` and `correction/weight_{mean,std,eff_sample_size}` (0 for
    what was dropped) of all together, in summable form.

    Raises:
        ConfigError: a rule named twice, or one of batch scope unless `whole_minibatch` says that evidence is of all micro-batches
            and ranks together.
    """
    names = [bound.rule.name for bound in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "a correction is listed twice", where="correction.rules", got=name, expected="each rule once"
            )
    for bound in rules:
        if bound.rule.scope == "batch" and not whole_minibatch:
            raise ConfigError(
                f"{bound.rule.name} judges the whole minibatch and cannot run on one micro-batch",
                where="correction.rules",
                got=bound.rule.name,
                expected="a rule of token or sequence scope",
                fix="use trm_max or opsm, or compute the correction before micro-batching",
            )

    def joint(evidence: Evidence) -> Correction:
        mask = evidence.mask
        weights, keep = torch.where(mask, torch.ones_like(evidence.ratios.total.detach()), 0.0), mask
        metrics: dict[str, torch.Tensor] = {}
        for bound in rules:
            part = bound(evidence)
            weights, keep = weights * part.weights, keep & part.keep
            metrics.update(part.metrics)
        metrics.update(kept_fractions("correction/", keep, mask))
        metrics.update(summable.moments("correction/weight", weights, mask))
        return Correction(weights=weights, keep=keep, metrics=metrics)

    return joint
