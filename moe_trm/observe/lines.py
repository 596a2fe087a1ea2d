"""One plain line per step, for logs and terminals alike."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from moe_trm.observe.advice.verdict_changes import VerdictChanges
from moe_trm.observe.server_log import ServerChanges, ServerWaits
from moe_trm.observe.sinks import Sink
from moe_trm.types import ServerState

NOTHING = "–"
"""Stands for the share of routes that were applied where none was replayed."""


MEANINGS = {
    "engine_k3": "KL between the engines at equal weights, nats",
    "merged_k3": "the same with what the weights moved since sampling",
    "stale_k3": "KL between the weights that sampled and today's, this step's earlier updates included, nats",
    "flips": "token-layers whose experts the engines choose differently",
    "replayed": "replayed token-layers that used their recorded route",
    "kept": "tokens that corrections keep",
    "clip": "tokens that the loss clips",
    "grad": "norm of the gradient before clipping",
    "rejected": "samples rejected since the start",
}
"""Labels of a line that do not explain themselves."""


class ProgressLines(Sink):
    """One line per step, and the verdict under it when it is another one; one for each server lost or back.
    While servers load there is a line now and again.

    A label is explained above the first line that has it.
    """

    _FIELDS: Sequence[tuple[str, str, str]] = (
        ("reward/mean", "reward", "{:.3f}"),
        ("response/length_mean", "length", "{:.1f}"),
        ("engine/k3_kl", "engine_k3", "{:.1e}"),
        ("merged/k3_kl", "merged_k3", "{:.1e}"),
        ("staleness/k3_kl", "stale_k3", "{:.1e}"),
        ("routing/native_flip_rate", "flips", "{:.2%}"),
        ("replay/applied_fraction", "replayed", "{:.0%}"),
        ("correction/kept_fraction", "kept", "{:.1%}"),
        ("loss/pg_clipfrac", "clip", "{:.1%}"),
        ("optimizer/grad_norm", "grad", "{:.2f}"),
        ("ledger/rejected", "rejected", "{:.0f}"),
        ("eval/accuracy", "ACCURACY", "{:.3f}"),
        ("eval/reward", "EVAL REWARD", "{:.3f}"),
        ("time/step_s", "s", "{:.2f}"),
    )

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._steps, self._stream, self._verdicts = steps, stream or sys.stdout, VerdictChanges()
        self._servers, self._waits = ServerChanges(), ServerWaits()
        self._explained: set[str] = set()

    def servers(self, states: Sequence[ServerState]) -> None:
        for change in [*self._waits.of(states), *self._servers.of(states)]:
            print(f"        {change}", file=self._stream, flush=True)

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        if metrics.get("replay/token_layers") == 0.0:
            metrics = {"replay/applied_fraction": NOTHING, **metrics}
        labels = [label for key, label, _ in self._FIELDS if key in metrics and label in MEANINGS]
        for label in (label for label in labels if label not in self._explained):
            print(f"        {label}: {MEANINGS[label]}", file=self._stream, flush=True)
        self._explained.update(labels)
        parts = [f"{label} {formatted(metrics[key], form)}" for key, label, form in self._FIELDS if key in metrics]
        print(f"step {step:>{len(str(self._steps))}}/{self._steps}  " + "  ".join(parts), file=self._stream, flush=True)
        verdict = self._verdicts.of(metrics)
        if verdict:
            print(f"        {verdict}", file=self._stream, flush=True)


def formatted(value: float | str, form: str) -> str:
    """A figure in its format; words as they are."""
    return value if isinstance(value, str) else form.format(value)
