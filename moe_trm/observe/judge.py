"""The verdict of each step, from everything measured so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moe_trm.observe.advice.remedies import Settings
from moe_trm.observe.advice.verdict import LENGTH_WINDOW, Verdict, mask_hides_gap, nothing_trains, verdict
from moe_trm.observe.advice.verdict_jumps import jump


class Judge:
    """Remembers finished metrics and says in one sentence what they mean; steps without training have no verdict.

    Args:
        quantization: of the rollout's weights, on purpose: engines that disagree are no fault to repair.
        settings: of the run, so that nothing is advised that is set already.
    """

    def __init__(self, quantization: str | None = None, settings: Settings = MappingProxyType({})) -> None:
        self._quantization, self._settings = quantization, settings
        self._history: list[Mapping[str, float]] = []

    def say(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Metrics of the verdict.

        `verdict` is the sentence, `verdict/case` its place in the decision tree, and `verdict/config` the setting that
        acts on it, if there is one. Alarms come first: nothing trains, a figure jumped from what this run had, or a
        correction no longer sees the mismatch.
        """
        self._history = [*self._history[-LENGTH_WINDOW:], metrics]
        judgement = (
            nothing_trains(self._history, self._settings)
            or self._jump()
            or mask_hides_gap(self._history, self._settings)
            or verdict(self._history, settings=self._settings)
        )
        if self._quantization and judgement.case == "precision":
            sentence = (
                f"The rollout's weights are rounded ({self._quantization}), so it is a policy of its own (k3 "
                f"{metrics['engine/k3_kl']:.2g} from the learner's), which is no fault: corrections are for this."
            )
            judgement = replace(judgement, sentence=sentence, config="")
        entries: dict[str, str] = {"verdict": judgement.sentence, "verdict/case": judgement.case}
        return entries | ({"verdict/config": judgement.config} if judgement.config else {})

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
        self._history = list(state)
