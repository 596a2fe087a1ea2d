"""Measure only, then decide: rules that act only if the run's own mismatch asks for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

K3_LIMIT, CHI2_LIMIT = 0.05, 0.3
"""Below both, in nats and by variance of the token ratios, the field's guides find no correction necessary."""


class Decision:
    """The switch of the rules: they act or only measure. Without `steps` (`correction.decide_after`) they always act.

    During the first `steps` training steps they only measure. Then they act for the rest of the run if the mean of the
    steps' k3 KL is above `K3_LIMIT` or that of their chi2 above `CHI2_LIMIT`, and else never. Both are of the engine
    ratio, or where that is not known of the merged or the total one. A step that measured neither says nothing; if
    none did, the rules act.
    Source: start-up rule of guides to rollout correction: run with metrics alone for some hundred steps first.

    When: it is not known yet whether this pair of engines needs a correction. Costs what the rules cost.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps, self._seen = steps, 0
        self._measured: list[tuple[float, float]] = []
        self._acts: bool | None = None if steps else True

    @property
    def acts(self) -> bool:
        """True in a step whose rules change the gradient."""
        return bool(self._acts)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint between two steps, as plain data."""
        return {"seen": self._seen, "measured": [list(pair) for pair in self._measured], "acts": self._acts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`; where the setting is not there any more, rules act."""
        if self._steps:
            self._seen, self._acts = state["seen"], state["acts"]
            self._measured = [(k3, chi2) for k3, chi2 in state["measured"]]

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count a step with these finished metrics.

        Returns `correction/acts`, 1 or 0: whether rules acted in it.
        """
        if not self._steps:
            return {}
        acted = self.acts
        if self._acts is None:
            measured = [name for name in ("engine", "merged", "total") if f"{name}/k3_kl" in metrics]
            if measured:
                self._measured.append((metrics[f"{measured[0]}/k3_kl"], metrics[f"{measured[0]}/chi2_token"]))
            self._seen += 1
            if self._seen >= self._steps:
                self._decide()
        return {"correction/acts": float(acted)}

    def _decide(self) -> None:
        if not self._measured:
            self._acts = True
            log.warning("no step measured the mismatch: the rules act from now on")
            return
        k3, chi2 = (sum(values) / len(self._measured) for values in zip(*self._measured, strict=True))
        # A mean that is NaN is no sign of health.
        self._acts = not (k3 <= K3_LIMIT and chi2 <= CHI2_LIMIT)
        verb = "act from now on" if self._acts else "stay without effect"
        log.info("mean k3 %.3g and chi2 %.3g over %d steps: the rules %s", k3, chi2, len(self._measured), verb)
