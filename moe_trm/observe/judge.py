"""The verdict of each step, from everything measured so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from moe_trm.observe.advice.remedies import Settings
from moe_trm.observe.advice.verdict import LENGTH_WINDOW, Case, Verdict, mask_hides_gap, nothing_trains, verdict
from moe_trm.observe.advice.verdict_jumps import jump

MEMORY = 10
"""Steps that a fault is remembered."""
LASTING: Sequence[Case] = (
    "precision",
    "unsplit",
    "lag",
    "staleness",
    "masking",
    "variance",
    "sequence",
    "drift",
    "bias",
    "router",
    "clipping",
)
"""Cases of figures with a limit, the gravest first: the order of `verdict`. Events are said when they happen."""


def _graver(standing: Verdict, judgement: Verdict) -> bool:
    """True where the standing fault comes before the new verdict, which may be that there is none."""
    if judgement.case in LASTING:
        return LASTING.index(standing.case) < LASTING.index(judgement.case)
    return judgement.case in ("ok", "signal", "learned")


class Judge:
    """Remembers finished metrics and says in one sentence what they mean; steps without training have no verdict.

    Args:
        quantization: of the rollout's weights, on purpose: engines that disagree are no fault to repair.
        settings: of the run, so that nothing is advised that is set already.
    """

    def __init__(self, quantization: str | None = None, settings: Settings = MappingProxyType({})) -> None:
        self._quantization, self._settings = quantization, settings
        self._history: list[Mapping[str, float]] = []
        self._standing: tuple[Verdict, int] | None = None

    def say(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Metrics of the verdict.

        `verdict` is the sentence, `verdict/case` its place in the decision tree, and `verdict/config` the setting that
        acts on it, if there is one. Alarms come first: nothing trains, a figure jumped from what this run had, or a
        correction no longer sees the mismatch. A fault is said at once, and taken back when `MEMORY` steps went by
        without it: a figure at its limit is over it in one step and below in the next.
        """
        self._history = [*self._history[-LENGTH_WINDOW:], metrics]
        judgement = (
            nothing_trains(self._history, self._settings)
            or self._jump()
            or mask_hides_gap(self._history, self._settings)
            or self._remembered(verdict(self._history, settings=self._settings))
        )
        if self._quantization and judgement.case == "precision":
            sentence = (
                f"The rollout's weights are rounded ({self._quantization}), so it is a policy of its own (k3 "
                f"{metrics['engine/k3_kl']:.2g} from the learner's), which is no fault: corrections are for this."
            )
            judgement = replace(judgement, sentence=sentence, config="")
        entries: dict[str, str] = {"verdict": judgement.sentence, "verdict/case": judgement.case}
        return entries | ({"verdict/config": judgement.config} if judgement.config else {})

    def _remembered(self, judgement: Verdict) -> Verdict:
        """The verdict, or the graver one of the last `MEMORY` steps, with the number of steps since."""
        if self._standing is not None:
            standing, age = self._standing
            if age < MEMORY and _graver(standing, judgement):
                self._standing = standing, age + 1
                since = "step" if age == 0 else f"{age + 1} steps"
                return replace(standing, sentence=f"{standing.sentence} (Not in the last {since}.)")
        self._standing = (judgement, 0) if judgement.case in LASTING else None
        return judgement

    def _jump(self) -> Verdict | None:
        """A jump, followed by what the figures mean by themselves where that is a fault, too."""
        alarm = jump(self._history)
        judgement = verdict(self._history, settings=self._settings)
        if alarm is None or judgement.case in ("ok", "unclear"):
            return alarm
        return replace(alarm, sentence=f"{alarm.sentence} {judgement.sentence}", config=judgement.config)

    def state(self) -> list[Mapping[str, float]]:
        """State for a checkpoint, as plain data."""
        return self._history

    def restore(self, state: list[Mapping[str, float]]) -> None:
        """Go on after `state`."""
        self._history, self._standing = [], None
        for metrics in state:
            self.say(metrics)
