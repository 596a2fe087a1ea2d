"""Tasks: sources of prompts and rewards.

A user's reward function needs `RewardInput` only, which imports no engine.
"""

from moe_trm.tasks.reward_input import RewardInput

__all__ = ["RewardInput"]
