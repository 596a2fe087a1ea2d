"""Where prompts and rewards come from. A reward function of your own needs `RewardInput` only, and imports no engine with it."""

from moe_trm.tasks.reward_input import RewardInput

__all__ = ["RewardInput"]
