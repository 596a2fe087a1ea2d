"""What a step took from its groups, on its way into a bundle."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trm.config.schema import Config
from moe_trm.recording.bundle import BundleWriter
from moe_trm.store.store import Group


class StepRecorder:
    """Writes each step into `record.bundle`; without a folder it writes nothing."""

    def __init__(self, config: Config) -> None:
        self._writer = BundleWriter(config.record.bundle) if config.record.bundle else None
        self._group_size = config.rollout.group_size

    def write(self, step: int, taken: Sequence[Group], dropped: Sequence[Group]) -> None:
        """Write what this step took, and what was dropped since the last: a repeated run drops it again."""
        if self._writer is None:
            return
        outcomes = {
            group.group_id * self._group_size + index: outcome
            for group in sorted([*taken, *dropped], key=lambda group: group.group_id)
            for index, outcome in enumerate(group.outcomes)
        }
        accepted = [outcome for outcome in outcomes.values() if not isinstance(outcome, str)]
        rejected = {number: outcome for number, outcome in outcomes.items() if isinstance(outcome, str)}
        self._writer.write(step, accepted, rejected)
