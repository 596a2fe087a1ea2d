"""Scores of given tokens by one engine, and the engine's setting.

Shape letters: T tokens of a sequence, L MoE layers, K experts per token. Row `r` has token `r`, its routes, and the
log-prob of token `r + 1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from routing import RouteRecord


@dataclass(frozen=True)
class Text:
    """One sequence: `tokens` `[T]` int32, `sampled` `[T]` bool, and the number of the prompt it answers."""

    tokens: np.ndarray
    sampled: np.ndarray
    prompt: int

    @property
    def rows(self) -> np.ndarray:
        """`[T - 1]` bool: rows whose next token was sampled."""
        rows: np.ndarray = self.sampled[1:]
        return rows


@dataclass(frozen=True)
class Scored:
    """One engine on one sequence.

    Attributes:
        logprobs: `[T - 1]` float32 over the vocabulary at temperature 1; NaN on prompt rows that the engine leaves out.
        routes: of the `T - 1` forwarded tokens.
        margins: `[T - 1, L]` float32 gap of router probability between the last chosen and the first rejected expert,
            or None.
        weights: `[T - 1, L, K]` float32 gate weights in the order of the routes, or None.
    """

    logprobs: np.ndarray
    routes: RouteRecord
    margins: np.ndarray | None = None
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class Setting:
    """One side of a comparison.

    Attributes:
        engine: `sglang`, `vllm`, `megatron` or `hf`.
        checkpoint: Hugging Face folder; dtype: arithmetic.
        together: sequences computed together: rows of a micro-batch, or requests in flight.
        layout: parallel sizes of Megatron-Core, such as `expert=2`.
    """

    engine: Literal["sglang", "vllm", "megatron", "hf"]
    checkpoint: Path
    dtype: Literal["float32", "bfloat16", "float16"]
    together: int
    layout: tuple[str, ...] = ()

    def __str__(self) -> str:
        shape = "".join(f" {size}" for size in self.layout)
        return f"{self.engine} {self.dtype}{shape}, {self.together} together, {self.checkpoint.name}"


class Scorer(Protocol):
    """Scores given tokens; `local_flips` is the rate of the last `score` with `routes`."""

    local_flips: float | None

    def score(self, texts: Sequence[Text], routes: Sequence[RouteRecord] | None = None) -> list[Scored]:
        """With `routes`, those are replayed and proved instead of chosen."""
