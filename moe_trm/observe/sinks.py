"""Where metrics go: `metrics.jsonl` always, one progress line per step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

import orjson


class Sink(Protocol):
    """Receives one mapping of metric names to numbers (and of `verdict` to its sentence) per step."""

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one object per step, flushed at once so that a killed run keeps what it did. Non-finite values become null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._file.write(orjson.dumps({"step": step, **metrics}, option=orjson.OPT_SORT_KEYS) + b"\n")
        self._file.flush()


class ProgressLines:
    """One plain line per step, for terminals and logs alike, and the verdict under it when it is another one."""

    _FIELDS: Sequence[tuple[str, str, str]] = (
        ("reward/mean", "reward", "{:.3f}"),
        ("response/length_mean", "length", "{:.1f}"),
        ("engine/k3_kl", "engine_k3", "{:.1e}"),
        ("staleness/k3_kl", "stale_k3", "{:.1e}"),
        ("routing/native_flip_rate", "flips", "{:.2%}"),
        ("replay/applied_fraction", "replayed", "{:.0%}"),
        ("correction/kept_fraction", "kept", "{:.1%}"),
        ("loss/pg_clipfrac", "clip", "{:.1%}"),
        ("optimizer/grad_norm", "grad", "{:.2f}"),
        ("ledger/rejected", "rejected", "{:.0f}"),
        ("eval/accuracy", "ACCURACY", "{:.3f}"),
        ("time/step_s", "s", "{:.2f}"),
    )

    def __init__(self, steps: int, stream: TextIO = sys.stdout) -> None:
        self._steps, self._stream, self._setting = steps, stream, ""

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        parts = [f"{label} {form.format(metrics[key])}" for key, label, form in self._FIELDS if key in metrics]
        print(f"step {step:>{len(str(self._steps))}}/{self._steps}  " + "  ".join(parts), file=self._stream, flush=True)
        setting = str(metrics.get("verdict/config", ""))
        if "verdict" in metrics and (setting != self._setting or step == 1):
            advice = f" Try {setting}." if setting else ""
            print(f"        {metrics['verdict']}{advice}", file=self._stream, flush=True)
            self._setting = setting
