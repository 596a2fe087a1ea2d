"""Pipelines that a plan compares: their settings, and the same as the simulation takes them."""

from __future__ import annotations

from typing import NamedTuple

from moe_trm.config.schema import PipelineConfig
from moe_trm.plan.simulate import Schedule


class Mode(NamedTuple):
    """A pipeline: `pipeline.mode`, `max_staleness`, `partial`, `push_every`, `rolling_push`."""

    mode: str
    staleness: int
    partial: str
    push_every: int = 1
    rolling: bool = False

    @classmethod
    def of(cls, pipeline: PipelineConfig) -> Mode:
        """That of a configuration."""
        rolling = pipeline.rolling_push and pipeline.mode != "sync"
        return cls(pipeline.mode, pipeline.staleness_limit, pipeline.partial, pipeline.push_every, rolling)

    @property
    def label(self) -> str:
        """The mode, with the steps between pushes where there are several."""
        return self.mode if self.push_every == 1 else f"{self.mode}/{self.push_every}"

    @property
    def push(self) -> str:
        """Effect of a push on what runs."""
        return "rolling" if self.rolling else self.partial

    def schedule(self, *, sends: bool) -> Schedule:
        """As the simulation takes it; `sends`: by `sync.method=distributed`."""
        interrupts = self.partial == "interrupt"
        return Schedule(
            self.staleness,
            interrupts,
            sends and not interrupts,
            self.push_every,
            self.rolling,
            in_turn=self.mode == "sync",
        )


MODES = (
    Mode("sync", 0, "wait"),
    Mode("one_step", 1, "wait"),
    Mode("async", 1, "interrupt"),
    Mode("async", 2, "wait"),
    Mode("async", 2, "interrupt"),
    Mode("async", 4, "interrupt"),
)
