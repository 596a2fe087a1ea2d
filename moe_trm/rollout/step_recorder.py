"""Recorder of the groups that a step took, into a bundle."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trm.recording.bundle import BundleWriter
from moe_trm.rollout.store.store import Group


class StepRecorder:
    """Writes each step into the folder of a bundle; without a folder it writes nothing.

    Args:
        folder: `record.bundle`.
        group_size: samples of a prompt, by which they are numbered.
    """

    def __init__(self, folder: str | None, group_size: int) -> None:
        self._writer = BundleWriter(folder) if folder else None
        self._group_size = group_size

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
