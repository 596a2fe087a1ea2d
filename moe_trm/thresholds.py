"""Thresholds chosen from a target reject rate: measured over the first steps of a run, then frozen, logged and kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moe_trm.corrections import BoundRule, Evidence, calibrate, scores
from moe_trm.learner.protocol import Learner
from moe_trm.recipe import Uncalibrated

Frozen = Mapping[str, Mapping[str, float]]


class Thresholds:
    """Collects the scores of uncalibrated rules and freezes their thresholds after `steps` steps.

    Until then these rules reject nothing. Quantiles are of the tokens (or rows) of all data-parallel ranks, so every rank
    freezes the same thresholds.

    Args:
        pending: the rules.
        steps: training steps to measure over.
        path: JSON file for frozen thresholds, rule by rule; None keeps them in memory.
        frozen: thresholds of an earlier part of this run, which are taken as they are.
    """

    def __init__(
        self, pending: Sequence[Uncalibrated], steps: int, path: Path | None, frozen: Frozen | None = None
    ) -> None:
        self._pending, self._steps, self._path = tuple(pending), steps, path
        self._window: list[list[Tensor]] = [[] for _ in pending]
        self._bound: tuple[BoundRule, ...] = ()
        self._chosen: dict[str, dict[str, float]] = {}
        if frozen is not None and self._pending:
            self._freeze([item.rule.bind(**{**item.fixed, **frozen[item.rule.name]}) for item in self._pending])

    @property
    def rules(self) -> tuple[BoundRule, ...]:
        """The calibrated rules; none while they still measure."""
        return self._bound

    @property
    def frozen(self) -> Frozen:
        """Chosen thresholds by rule, as plain data; empty while rules still measure."""
        return self._chosen

    def observe(self, evidence: Evidence) -> None:
        """Take the scores of one micro-batch."""
        if not self._bound:
            for item, window in zip(self._pending, self._window, strict=True):
                window.append(scores(item.rule, evidence, **item.fixed).float().cpu())

    def end_step(self, learner: Learner) -> dict[str, float]:
        """Count a step, freeze after the last one of the window; returns the chosen thresholds as metrics. Collective."""
        if self._pending and not self._bound:
            self._steps -= 1
            if self._steps == 0:
                self._freeze([self._calibrated(learner, i) for i in range(len(self._pending))])
                self._save(learner)
        return {
            f"correction/{rule}/threshold_{name}": value
            for rule, values in self._chosen.items()
            for name, value in values.items()
        }

    def _calibrated(self, learner: Learner, index: int) -> BoundRule:
        item, window = self._pending[index], self._window[index]
        collected = learner.gather(torch.cat([torch.zeros(0), *window]))
        return calibrate(item.rule, [collected.cpu()], item.target_reject_rate, **item.fixed)

    def _freeze(self, bound: Sequence[BoundRule]) -> None:
        self._bound, self._window = tuple(bound), [[] for _ in bound]
        for item, rule in zip(self._pending, bound, strict=True):
            assert item.rule.calibrate is not None
            values = {name: rule.thresholds[name] for name in item.rule.calibrate(1.0)}
            self._chosen[item.rule.name] = {name: float(value) for name, value in values.items() if value is not None}

    def _save(self, learner: Learner) -> None:
        if self._path is None or learner.data_rank != 0:
            return
        # Several ranks may hold the same rows: each replaces the file with the same text at once.
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self._chosen, indent=2, sort_keys=True) + "\n")
        partial.replace(self._path)
