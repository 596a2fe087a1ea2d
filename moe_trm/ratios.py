"""The decomposition of the total log-ratio between the trained policy and the policy that sampled.

`log_total = log_engine + log_lag + log_update`; staleness = lag + update. Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


class LogRatios:
    """Masked log-ratios, float32 whatever comes in, 0 where `mask` is False.

    engine    = behavior - rollout      same weights, two engines
    lag       = proximal - behavior     the learner's weights moved between sampling and this step
    update    = current - proximal      the learner's weights moved within this step (what PPO clips)
    staleness = lag + update
    total     = engine + staleness

    Args:
        rollout_logprobs, behavior_logprobs, current_logprobs: `[B, T]`.
        mask: `[B, T]` bool, True on tokens the policy sampled. Values elsewhere may be anything, NaN included.
        proximal_logprobs: `[B, T]`, or None at age 0, where it equals `behavior_logprobs`.

    Every ratio is detached except `update`, and through it `staleness` and `total`: they carry the gradient of `current_logprobs`.
    """

    def __init__(
        self,
        rollout_logprobs: Tensor,
        behavior_logprobs: Tensor,
        current_logprobs: Tensor,
        mask: Tensor,
        proximal_logprobs: Tensor | None = None,
    ) -> None:
        self.mask = mask.bool()
        rollout, behavior = rollout_logprobs.detach().float(), behavior_logprobs.detach().float()
        proximal = behavior if proximal_logprobs is None else proximal_logprobs.detach().float()
        self.engine = self._masked(behavior - rollout)
        self.lag = self._masked(proximal - behavior)
        self.update = self._masked(current_logprobs.float() - proximal)
        self.staleness = self.lag + self.update
        self.total = self.engine + self.staleness

    def _masked(self, log_ratio: Tensor) -> Tensor:
        return torch.where(self.mask, log_ratio, torch.zeros((), device=log_ratio.device))

    def get(self, name: str) -> Tensor:
        """The ratio a rule names: `engine`, `lag`, `update`, `staleness` or `total`."""
        if name not in ("engine", "lag", "update", "staleness", "total"):
            raise KeyError(name)
        value: Tensor = getattr(self, name)
        return value
