"""The decomposition of the total log-ratio between the trained policy and the policy that sampled.

`log_total = log_engine + log_lag + log_update`; staleness = lag + update. On a probe step (`moe_trm.step.probe.run`)
the engine part splits further: `log_engine = numerics + routing`. Truncation has its own number, the log kept mass.

Shape letters: B sequences, T tokens.

Every tensor here is float32 (float64 for float64 inputs) and 0 where `mask` is False. Input values there may be
anything, NaN and infinities included: they affect neither values nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from moe_trm.errors import ConfigError
from moe_trm.methods.packing import Packing
from moe_trm.methods.ratios import RATIO_NAMES

LOG_RATIO_LIMIT = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Log-ratio within +-20 nats (e^20 = 4.85e8), as every exponential of one needs. NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def masked_difference(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """`left - right` where `mask` is True, else 0; float32 or float64.

    Values elsewhere may be anything, NaN included.
    """
    dtype = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    return torch.where(mask, left, 0.0).to(dtype) - torch.where(mask, right, 0.0).to(dtype)


class LogRatios:
    """Masked log-ratios, each computed when it is first asked for.

    engine    = behavior - rollout      same weights, two engines
    lag       = proximal - behavior     the learner's weights moved between sampling and this step
    merged    = engine + lag            the only known sum when the weights that sampled are gone
    update    = current - proximal      the learner's weights moved within this step (what PPO clips)
    staleness = lag + update
    total     = merged + update

    Args:
        rollout_logprobs: `[B, T]`.
        current_logprobs: `[B, T]`, with gradient.
        behavior_logprobs: `[B, T]`, or None when the weights that sampled are gone. Then `proximal_logprobs` is needed,
            and `engine`, `lag` and `staleness` raise `ConfigError`, because they are not known apart.
        mask: `[B, T]`, True on tokens the policy sampled. Values elsewhere may be anything, NaN included.
        proximal_logprobs: `[B, T]`, or None at age 0, where it equals `behavior_logprobs`.
        measured: False where the proximal policy is no pass of the learner: interpolated, or the rollout itself. Then
            only `total` is a fact; `merged` and `update` are what the method defines them to be.

    `rollout_logprobs` is kept, masked: adding a ratio to it gives back the log-probs of the other policy. Every ratio
    is detached except `update`, and through it `staleness` and `total`: they carry the gradient of `current_logprobs`.
    """

    def __init__(
        self,
        rollout_logprobs: Tensor,
        behavior_logprobs: Tensor | None,
        current_logprobs: Tensor,
        mask: Tensor,
        proximal_logprobs: Tensor | None = None,
        *,
        measured: bool = True,
    ) -> None:
        proximal_given = behavior_logprobs if proximal_logprobs is None else proximal_logprobs
        if proximal_given is None:
            raise ConfigError(
                "neither behavior_logprobs nor proximal_logprobs is known",
                where="LogRatios",
                fix="score the batch with the weights at the start of the step and pass them as proximal_logprobs",
            )
        self.mask, self._measured = mask.bool(), measured
        self._rollout = rollout_logprobs.detach()
        self._behavior = None if behavior_logprobs is None else behavior_logprobs.detach()
        self._proximal, self._current = proximal_given.detach(), current_logprobs

    def taking(self, take: Callable[[Tensor], Tensor], mask: Tensor) -> LogRatios:
        """The same of other rows, detached: `take` picks from `[B, T]`, and `mask` says which of these values count."""
        behavior = None if self._behavior is None else take(self._behavior)
        rollout, current, proximal = (
            take(logprobs.detach()) for logprobs in (self._rollout, self._current, self._proximal)
        )
        return LogRatios(rollout, behavior, current, mask, proximal, measured=self._measured)

    @property
    def split(self) -> bool:
        """True when `engine` and `lag` are known apart."""
        return self._behavior is not None

    @property
    def known(self) -> tuple[str, ...]:
        """The ratios that are facts, in the order of the policies."""
        if self.split:
            return ("engine", "lag", "update", "staleness", "total")
        return ("merged", "update", "total") if self._measured else ("total",)

    @cached_property
    def packing(self) -> Packing:
        """Places of the sampled tokens."""
        return Packing(self.mask)

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for float64 log-probs of the rollout."""
        return torch.promote_types(self._rollout.dtype, torch.float32)

    def packed_rollout_logprobs(self) -> Tensor:
        """Log-probs of the policy that sampled at the sampled tokens alone, `[N]`."""
        return self.packing.pack(self._rollout).to(self.dtype)

    @cached_property
    def rollout_logprobs(self) -> Tensor:
        """Log-probs of the policy that sampled, masked."""
        return torch.where(self.mask, self._rollout, 0.0).to(self.dtype)

    @cached_property
    def engine(self) -> Tensor:
        return masked_difference(self._known(self._behavior, "engine"), self._rollout, self.mask)

    @cached_property
    def lag(self) -> Tensor:
        return masked_difference(self._proximal, self._known(self._behavior, "lag"), self.mask)

    @cached_property
    def merged(self) -> Tensor:
        return self.engine + self.lag if self.split else masked_difference(self._proximal, self._rollout, self.mask)

    @cached_property
    def update(self) -> Tensor:
        # The first caller may need no gradients; the loss that asks next does.
        with torch.enable_grad():
            return masked_difference(self._current, self._proximal, self.mask)

    @cached_property
    def total(self) -> Tensor:
        with torch.enable_grad():
            return self.merged + self.update

    @cached_property
    def staleness(self) -> Tensor:
        self._known(self._behavior, "staleness")
        with torch.enable_grad():
            return self.lag + self.update

    def get(self, name: str) -> Tensor:
        """The ratio a rule names: one of `RATIO_NAMES`."""
        if name not in RATIO_NAMES:
            raise ConfigError("unknown ratio", where="LogRatios.get", got=name, expected=", ".join(RATIO_NAMES))
        value: Tensor = getattr(self, name)
        return value

    def _known(self, ratio: Tensor | None, name: str) -> Tensor:
        if ratio is None:
            raise ConfigError(
                f"the {name} ratio is unknown, because there are no log-probs under the weights that sampled",
                where="LogRatios",
                got="behavior_logprobs=None",
                expected="log-probs under the weights that sampled",
                fix="let the rule read `merged` (engine and lag together) or `total`; in a run, set "
                "pipeline.behavior=snapshot; in an adapter, `fresh=True` says that no sample is older than the step",
            )
        return ratio


def k3(log_ratio: Tensor) -> Tensor:
    """e^x - 1 - x of each clamped log-ratio, in float64.

    In float32 the difference of nearly equal numbers would be rounding error.
    """
    x = clamp_log_ratio(log_ratio.double())
    return x.expm1() - x
