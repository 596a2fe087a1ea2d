"""Two named rewards of one answer, which `advantage.name=gdpo` compares one by one."""

from __future__ import annotations

from moe_trm.tasks import RewardInput


def reward(sample: RewardInput) -> dict[str, float]:
    """`right`: 1 for the expected result behind the last `#`. `brief`: falls with the number of ids."""
    right = sample.finished and sample.completion.rpartition("#")[2].strip() == sample.answer
    return {"right": float(right), "brief": 1 / (1 + len(sample.completion_ids))}
