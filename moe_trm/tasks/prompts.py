"""The order of prompts: which prompt a group answers, whatever was issued, dropped or lost before it."""

from __future__ import annotations

from moe_trm.tasks.protocol import Task
from moe_trm.types import Prompt


class PromptOrder:
    """The prompt of group `g` is the `g mod B`-th of the `g div B`-th step of the task: a function of `g` alone.

    Args:
        task: where prompts come from.
        per_step: prompts of one training step (B).
    """

    def __init__(self, task: Task, per_step: int) -> None:
        self._task, self._per_step = task, per_step
        self._block: tuple[int, list[Prompt]] = (-1, [])

    def __call__(self, group_id: int) -> Prompt:
        """The prompt of `group_id`."""
        block, place = divmod(group_id, self._per_step)
        if self._block[0] != block:
            self._block = block, self._task.train_prompts(block + 1, self._per_step)
        return self._block[1][place]
