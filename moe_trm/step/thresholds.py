"""Thresholds chosen from a target reject rate: measured over the first steps of a run, then frozen, logged and kept.

Those by length go on following the run instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm.corrections import BoundRule, Evidence, calibrate, scores
from moe_trm.corrections.by_length import LEAST, LengthTracker, octave_name
from moe_trm.corrections.calibration import scores_and_lengths
from moe_trm.learner.protocol import Learner
from moe_trm.runtime.private import write_private
from moe_trm.step.recipe import Uncalibrated, placeholder


@dataclass(frozen=True)
class Following:
    """A rule by length with its tracker, and the scores and lengths of this rank's rows in the step so far."""

    item: Uncalibrated
    tracker: LengthTracker
    window: list[Tensor] = field(default_factory=list)

    def bound(self) -> BoundRule:
        """The rule at the thresholds of this step."""
        return replace(placeholder(self.item), label=self.item.label, by_length=self.tracker.thresholds)

    def observe(self, evidence: Evidence) -> None:
        """Take the scores and lengths of one micro-batch."""
        scores_ND, lengths_N = scores_and_lengths(self.item.rule, evidence, **self.item.fixed)
        self.window.append(torch.cat([scores_ND.float(), lengths_N[:, None].float()], dim=1).cpu().flatten())

    def end_step(self, learner: Learner) -> None:
        """Give the step's rows of all ranks to the tracker. Collective."""
        rows = learner.gather(torch.cat([torch.zeros(0), *self.window])).cpu()
        rows = rows.reshape(-1, self.item.rule.num_statistics + 1)
        self.tracker.add(rows[:, :-1], rows[:, -1].long())
        self.window.clear()

    def metrics(self) -> dict[str, float]:
        """The thresholds at the middle of each octave that has one."""
        values, calibrate = self.tracker.thresholds, self.item.rule.calibrate
        assert calibrate is not None
        return {
            f"correction/{self.item.name}/threshold_{name}_length_{octave_name(octave)}": float(threshold)
            for octave in values.judged().nonzero()[:, 0].tolist()
            for name, threshold in calibrate(*values.value[octave].clamp(min=LEAST).tolist()).items()
        }


class Thresholds:
    """Collects the scores of uncalibrated rules and freezes their thresholds after `steps` steps.

    Until then these rules reject nothing. Rules by length start to reject then, and their thresholds change with every
    step. Quantiles are of the tokens (or rows) of all data-parallel ranks, so every rank freezes the same thresholds.
    `path` is the JSON file of frozen thresholds; None keeps them in memory.
    """

    def __init__(self, pending: Sequence[Uncalibrated], steps: int, path: Path | None) -> None:
        self._pending = tuple(item for item in pending if not item.by_length)
        self._following = [
            Following(item, LengthTracker(item.target_reject_rate, item.rule.num_statistics))
            for item in pending
            if item.by_length
        ]
        self._steps, self._warm_up, self._path = steps, steps, path
        self._window: list[list[Tensor]] = [[] for _ in self._pending]
        self._bound: tuple[BoundRule, ...] = ()
        self._chosen: dict[str, dict[str, float]] = {}

    @property
    def rules(self) -> tuple[BoundRule, ...]:
        """The calibrated rules; none while they still measure."""
        following = [follower.bound() for follower in self._following if follower.tracker.num_steps >= self._warm_up]
        return (*self._bound, *following)

    @property
    def measuring(self) -> bool:
        """True while there are rules without a threshold, which reject nothing yet."""
        warming = any(follower.tracker.num_steps < self._warm_up for follower in self._following)
        return warming or (bool(self._pending) and not self._bound)

    def state(self, learner: Learner) -> dict[str, Any]:
        """As plain data, by rule: the chosen thresholds, or the scores so far (float32 bytes) and the steps left to
        measure; of those by length the running buffer. Collective.
        """
        measuring = {} if self._bound else dict(enumerate(self._pending))
        scores_so_far = {item.name: self._collected(learner, i).numpy().tobytes() for i, item in measuring.items()}
        following = {
            follower.item.name: {**follower.tracker.state(), "of": dict(follower.item.fixed)}
            for follower in self._following
        }
        return {"chosen": self._chosen, "steps": self._steps, "scores": scores_so_far, "by_length": following}

    def restore(self, state: Mapping[str, Any], learner: Learner) -> None:
        """Go on after `state`. Rules that it does not know begin to measure anew, all of them; of those by length each
        that it does not know with the same other thresholds.
        """
        for follower in self._following:
            saved = state.get("by_length", {}).get(follower.item.name)
            if saved is not None and saved["of"] == dict(follower.item.fixed):
                follower.tracker.restore(saved)
        names, saved_thresholds, measured = [item.name for item in self._pending], state["chosen"], state["scores"]
        if names and set(names) <= set(saved_thresholds):
            self._freeze([item.rule.bind(**{**item.fixed, **saved_thresholds[item.name]}) for item in self._pending])
            self._save(learner)
        elif names and set(names) <= set(measured):
            self._steps = state["steps"]
            if learner.data_rank == 0:
                # The scores of all ranks: in the end they are gathered again.
                self._window = [[torch.frombuffer(bytearray(measured[name]), dtype=torch.float32)] for name in names]

    def observe(self, evidence: Evidence) -> None:
        """Take the scores of one micro-batch."""
        for follower in self._following:
            follower.observe(evidence)
        if not self._bound:
            for item, window in zip(self._pending, self._window, strict=True):
                window.append(scores(item.rule, evidence, **item.fixed).float().cpu().flatten())

    def end_step(self, learner: Learner) -> dict[str, float]:
        """Count a step, freeze after the last one of the window, let those by length follow; returns the chosen
        thresholds as metrics. Collective.
        """
        by_length: dict[str, float] = {}
        for follower in self._following:
            if follower.tracker.num_steps >= self._warm_up:
                by_length |= follower.metrics()  # of this step, not of the next
            follower.end_step(learner)
        if self._pending and not self._bound:
            self._steps -= 1
            if self._steps == 0:
                self._freeze([self._calibrated(learner, i) for i in range(len(self._pending))])
                self._save(learner)
        return {
            f"correction/{rule}/threshold_{name}": value
            for rule, values in self._chosen.items()
            for name, value in values.items()
        } | by_length

    def _calibrated(self, learner: Learner, index: int) -> BoundRule:
        item = self._pending[index]
        return calibrate(item.rule, [self._collected(learner, index)], item.target_reject_rate, **item.fixed)

    def _collected(self, learner: Learner, index: int) -> Tensor:
        return learner.gather(torch.cat([torch.zeros(0), *self._window[index]])).cpu()

    def _freeze(self, bound: Sequence[BoundRule]) -> None:
        named = [replace(rule, label=item.label) for item, rule in zip(self._pending, bound, strict=True)]
        self._bound, self._window = tuple(named), [[] for _ in bound]
        for item, rule in zip(self._pending, bound, strict=True):
            values = {name: rule.thresholds[name] for name in item.rule.calibrated}
            self._chosen[item.name] = {name: float(value) for name, value in values.items() if value is not None}

    def _save(self, learner: Learner) -> None:
        if self._path is None or learner.data_rank != 0:
            return
        # Several ranks may hold the same rows: each replaces the file with the same text at once.
        write_private(self._path, f"{json.dumps(self._chosen, indent=2, sort_keys=True)}\n".encode())
