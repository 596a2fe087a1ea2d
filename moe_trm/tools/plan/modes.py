"""Pipelines that a plan compares: their settings, and the same as the simulation takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_trm.config.schema import PipelineConfig
from moe_trm.tools.plan.simulate import SimulatedSchedule


class Mode(NamedTuple):
    """A pipeline: `pipeline.mode`, `max_staleness`, `partial`, `push_every`, `rolling_push`, streamed minibatches."""

    mode: str
    staleness: int
    partial: str
    push_every: int = 1
    rolling: bool = False
    parts: int = 1

    @classmethod
    def of(cls, pipeline: PipelineConfig, minibatches: int) -> Mode:
        """That of a configuration; `minibatches` of a step."""
        parts = minibatches if pipeline.stream else 1
        rolling = pipeline.rolling_push and pipeline.mode != "sync"
        return cls(pipeline.mode, pipeline.staleness_limit, pipeline.partial, pipeline.push_every, rolling, parts)

    @property
    def settings(self) -> dict[str, Any]:
        """As keys of `pipeline`."""
        return {
            "mode": self.mode,
            "max_staleness": self.staleness,
            "partial": self.partial,
            "push_every": self.push_every,
            "rolling_push": self.rolling,
            "stream": self.parts > 1,
        }

    @property
    def label(self) -> str:
        """The mode, `/k` with a push every k steps, and `xP` with P minibatches that are streamed."""
        interval = f"/{self.push_every}" if self.push_every > 1 else ""
        return f"{self.mode}{interval}" + (f"x{self.parts}" if self.parts > 1 else "")

    @property
    def push(self) -> str:
        """Effect of a push on what runs."""
        return "rolling" if self.rolling else self.partial

    def schedule(self, *, sends: bool) -> SimulatedSchedule:
        """As the simulation takes it; `sends`: by `sync.method=distributed`."""
        interrupts = self.partial == "interrupt"
        return SimulatedSchedule(
            self.staleness,
            interrupts,
            sends and not interrupts,
            self.push_every,
            self.rolling,
            in_turn=self.mode == "sync",
            parts=self.parts,
        )


MODES = (
    Mode("sync", 0, "wait"),
    Mode("one_step", 1, "wait"),
    Mode("async", 1, "interrupt"),
    Mode("async", 2, "wait"),
    Mode("async", 2, "interrupt"),
    Mode("async", 4, "interrupt"),
)
