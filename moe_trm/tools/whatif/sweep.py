"""One threshold of one rule over a range: `RULE.THRESHOLD=LOW:HIGH[:NUMBER]`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_trm import corrections
from moe_trm.config.schema import CorrectionConfig, LossConfig, RuleConfig
from moe_trm.errors import ConfigError
from moe_trm.observe.report.scale import short
from moe_trm.tools.whatif.judge import Candidate

NUMBER, MOST = 9, 200
EXAMPLE = "trm_max.max_kl=1e-4:1, or trm_max.max_kl=1e-4:1:20 for 20 values"


@dataclass(frozen=True)
class Sweep:
    """The values of a threshold of a rule, rising and evenly spaced: on a logarithmic scale where both ends are above
    0.
    """

    rule: str
    threshold: str
    values: tuple[float, ...]
    logarithmic: bool

    @property
    def key(self) -> str:
        return f"{self.rule}.{self.threshold}"

    def candidates(self, correction: CorrectionConfig, loss: LossConfig) -> list[Candidate]:
        """One candidate for each value.

        Where the recorded configuration lists the rule, its other thresholds and the other rules stay; else the rule
        stands alone. Raises `ConfigError` where it is listed more than once.
        """
        listed = [rule for rule in correction.rules if rule.name == self.rule]
        if len(listed) > 1:
            raise ConfigError(
                "the recorded configuration lists this rule more than once",
                where="--sweep",
                got=self.rule,
                expected="a rule that stands there once",
                fix="Give each value with --rules.",
            )
        return [
            Candidate(f"{self.threshold}={short(value)}", self._changed(correction, listed, value), loss)
            for value in self.values
        ]

    def _changed(self, correction: CorrectionConfig, listed: Sequence[RuleConfig], value: float) -> CorrectionConfig:
        # A threshold that is set is not calibrated.
        thresholds = {**(listed[0].thresholds if listed else {}), self.threshold: value}
        changed = RuleConfig(name=self.rule, thresholds=thresholds)
        rules = tuple(changed if rule.name == self.rule else rule for rule in correction.rules)
        preset = correction.preset if listed else None
        return correction.model_copy(update={"preset": preset, "rules": rules if listed else (changed,)})

    def telling(self, correction: CorrectionConfig) -> str:
        """The other settings of the candidates, in words."""
        listed = any(rule.name == self.rule for rule in correction.rules)
        return "with everything else as recorded" if listed else f"{self.rule} alone, with the recorded loss"


def parse_sweep(text: str) -> Sweep:
    """Raises `ConfigError` for a text that is no sweep, a rule that does not exist, or a threshold that it has not."""
    key, equals, range_text = text.partition("=")
    rule, dot, threshold = key.rpartition(".")
    ends = range_text.split(":")
    if not (equals and dot and rule and threshold.isidentifier()) or len(ends) not in (2, 3):
        raise _wrong(text, "it is not RULE.THRESHOLD=LOW:HIGH")
    try:
        low, high, number = float(ends[0]), float(ends[1]), int(ends[2]) if len(ends) == 3 else NUMBER
    except ValueError as error:
        raise _wrong(text, str(error)) from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise _wrong(text, "LOW must be below HIGH, both finite")
    if not 2 <= number <= MOST:
        raise _wrong(text, f"the number of values must be between 2 and {MOST}")
    registered = corrections.get(rule)
    thresholds = [*registered.required, *registered.defaults]
    if threshold not in thresholds:
        raise ConfigError(
            f"{rule} has no such threshold",
            where="--sweep",
            got=threshold,
            expected=", ".join(thresholds) or "it has none",
        )
    logarithmic = low > 0
    parts = [place / (number - 1) for place in range(number)]
    inner = [low * (high / low) ** part if logarithmic else low + (high - low) * part for part in parts[1:-1]]
    return Sweep(rule, threshold, (low, *inner, high), logarithmic)


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError("this is no sweep of a threshold", where="--sweep", got=f"{text}: {why}", expected=EXAMPLE)
