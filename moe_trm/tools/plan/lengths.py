"""Lengths of answers: from a recording, or a log-normal cut off at the longest answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist, fmean

from moe_trm.errors import BundleError, ConfigError
from moe_trm.tools.plan.figures import Basis


@dataclass(frozen=True)
class Lengths:
    """Sampled tokens of answers, and the prompt before them.

    Attributes:
        values: of some answers, ascending; the distribution is theirs.
        prompt_tokens: mean.
        basis: `measured` for a recording.
        source: in words.
    """

    values: tuple[int, ...]
    prompt_tokens: float
    basis: Basis
    source: str

    @property
    def mean(self) -> float:
        """Mean sampled tokens."""
        return fmean(self.values)

    def batches(self, number: int, size: int, seed: int = 0) -> list[list[int]]:
        """`number` batches of `size` lengths each, in an order that only the seed decides.

        Each batch is an even selection of the distribution, so that few batches are enough.
        """
        chance, points = random.Random(seed), len(self.values)
        batches = []
        for _ in range(number):
            shift = chance.random()
            batch = [self.values[min(points - 1, int((k + shift) * points / size))] for k in range(size)]
            chance.shuffle(batch)
            batches.append(batch)
        return batches


def log_normal(median: float, sigma: float, longest: int, prompt_tokens: float, points: int = 512) -> Lengths:
    """A log-normal of this median, whose logarithm has the standard deviation `sigma`; longer answers end at `longest`.

    Raises:
        ConfigError: a median or sigma that is not positive, or a median beyond the longest answer.
    """
    if not (0 < median <= longest and sigma > 0):
        raise ConfigError(
            "no such distribution of lengths",
            where="--median-tokens, --sigma",
            got=f"median {median:g}, sigma {sigma:g}",
            expected=f"a median of 1 to rollout.max_new_tokens={longest}, and sigma > 0",
            fix="Give --bundle FOLDER to take the lengths of a recorded run.",
        )
    normal = NormalDist(log(median), sigma)
    values = tuple(min(longest, max(1, round(exp(normal.inv_cdf((k + 0.5) / points))))) for k in range(points))
    return Lengths(values, prompt_tokens, "assumed", f"log-normal, median {median:g}, sigma {sigma:g}")


def recorded(folder: str) -> Lengths:
    """The lengths of every recorded answer. Raises `BundleError` where there is none, or a file is damaged."""
    from moe_trm.recording.bundle import BundleReader

    reader = BundleReader(folder)
    records = [record for step in reader.steps() for record in reader.read(step)]
    if not records:
        raise BundleError(
            "the recording has no answers",
            where=folder,
            got="no step-NNNNNN.safetensors with records",
            expected="a folder that record.bundle wrote",
            fix="Give the folder of a recorded run, or leave --bundle out.",
        )
    prompts = fmean(len(record.tokens) - record.num_sampled for record in records)
    values = tuple(sorted(record.num_sampled for record in records))
    return Lengths(values, prompts, "measured", f"{len(values)} recorded answers")
