"""Records that are not what they claim to be, in runs of small learners: the run says so, with the cause.

Ten clean steps, then one with the fault. The figures are those of the product, and so is what judges them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.false_alarms import ALARMS, ARITHMETICS, GROUP, PROMPT, Run, Samples, Weights, forward, rounded, sampled

CLEAN = 10
Plant = Callable[["PlantedRun", Samples, Weights], Samples]


class PlantedRun(Run):
    """From step `first` on, `plant` changes what the rollout sends."""

    def __init__(self, plant: Plant, first: int = CLEAN + 1) -> None:
        super().__init__(ARITHMETICS["bfloat16"], seed=0, steps=100)
        self.plant, self.first, self.made = plant, first, torch.Generator().manual_seed(1)

    def sample(self, behavior: Weights, prompts_BP: Tensor, length: int) -> Samples:
        samples = super().sample(behavior, prompts_BP, length)
        return self.plant(self, samples, behavior) if len(self.cases) + 1 >= self.first else samples

    def older(self) -> Weights:
        """The engine's weights of four versions ago, or the first ones."""
        return rounded(self.versions[max(-5, -len(self.versions))], self.arithmetic)

    def cast(self, values: Tensor) -> Tensor:
        return self.arithmetic.activations(values)


def joined(first: Samples, second: Samples, rows: int) -> Samples:
    """The first rows of one, the others of another."""
    return Samples(
        torch.cat([first.tokens[:rows], second.tokens[rows:]]),
        torch.cat([first.kept[:rows], second.kept[rows:]]),
        torch.cat([first.logprobs[:rows], second.logprobs[rows:]]),
        [torch.cat([a[:rows], b[rows:]]) for a, b in zip(first.experts, second.experts, strict=True)],
    )


def of_older_weights(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    length = samples.logprobs.shape[1]
    return sampled(run.older(), samples.tokens[:, :PROMPT], length, run.arithmetic, run.made)


def half_of_older_weights(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    return joined(of_older_weights(run, samples, behavior), samples, GROUP)


def older_routes(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    with torch.no_grad():
        return replace(samples, experts=forward(run.older(), samples.tokens[:, :-1], run.cast)[1])


def older_cache(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    """Keys and values of the prompt that survived four pushes."""
    prompts, cache = samples.tokens[:, :PROMPT], list[Tensor]()
    weights, tokens = rounded(behavior, run.arithmetic), samples.tokens
    with torch.no_grad():
        forward(run.older(), prompts[:, :-1], run.cast, cache=cache)
        full = forward(weights, tokens[:, PROMPT - 1 : -1], run.cast, cache=cache)[0]
    kept = full.masked_fill(~samples.kept, -torch.inf).log_softmax(-1)
    return replace(samples, logprobs=kept.gather(-1, tokens[:, PROMPT:, None])[..., 0])


def other_temperature(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    """Log-probs of a temperature of 1 / 0.7 times the run's."""
    with torch.no_grad():
        full = forward(rounded(behavior, run.arithmetic), samples.tokens[:, :-1], run.cast)[0][:, PROMPT - 1 :]
    kept = (0.7 * full).masked_fill(~samples.kept, -torch.inf).log_softmax(-1)
    return replace(samples, logprobs=kept.gather(-1, samples.tokens[:, PROMPT:, None])[..., 0])


def copies(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    """Half of the answers to a prompt are one."""
    source = torch.arange(len(samples.tokens))
    source[1 : GROUP // 2] = 0
    experts = [of_layer[source] for of_layer in samples.experts]
    return Samples(samples.tokens[source], samples.kept[source], samples.logprobs[source], experts)


def tokenized_again(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    """In four samples one token is the least likely kept one; its log-prob is that of the likeliest."""
    tokens, logprobs = samples.tokens.clone(), samples.logprobs.clone()
    with torch.no_grad():
        full = forward(rounded(behavior, run.arithmetic), samples.tokens[:, :-1], run.cast)[0][:, PROMPT - 1 :]
    full = full.masked_fill(~samples.kept, torch.inf)
    for row in range(4):
        place = int(samples.kept[row].sum(-1).argmax())
        tokens[row, PROMPT + place] = full[row, place].argmin()
        logprobs[row, place] = samples.logprobs[row].max()
    return replace(samples, tokens=tokens, logprobs=logprobs)


def swapped_prompts(run: PlantedRun, samples: Samples, behavior: Weights) -> Samples:
    """Four answers to the first prompt stand under the second one."""
    tokens = samples.tokens.clone()
    tokens[:, :PROMPT] = samples.tokens.roll(GROUP, 0)[:, :PROMPT]
    return replace(samples, tokens=tokens)


PLANTS: dict[str, tuple[Plant, str, str]] = {
    "all groups of older weights": (of_older_weights, "jump", "a server that keeps older weights"),
    "half of the groups of older weights": (half_of_older_weights, "jump", "a server that keeps older weights"),
    "routes four versions old": (older_routes, "jump", "routes are not what they were"),
    "a prefix cache that survived four pushes": (older_cache, "jump", "or a cache"),
    "log-probs of another temperature": (other_temperature, "jump", "samples, labels or routes are not what they were"),
    "copied answers": (copies, "records", "answers are copies of others to the same prompt"),
    "one token tokenized again": (tokenized_again, "jump", "samples, labels or routes are not what they were"),
    "answers to another prompt": (swapped_prompts, "jump", "samples, labels or routes are not what they were"),
}
"""By name the fault, the case of the verdict, and words of it."""


def done(run: PlantedRun, last: int) -> PlantedRun:
    for step in range(1, last + 1):
        run.step(step)
    return run


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_is_told_in_its_first_step(name: str) -> None:
    plant, case, words = PLANTS[name]
    run = done(PlantedRun(plant), CLEAN + 1)
    assert not set(run.cases[:CLEAN]) & set(ALARMS)
    assert run.cases[CLEAN] == case, run.sentences[CLEAN]
    assert words in run.sentences[CLEAN]


def test_another_temperature_is_named_once_three_steps_agree() -> None:
    run = done(PlantedRun(other_temperature), CLEAN + 3)
    named = ["those of a higher temperature than the run's" in sentence for sentence in run.sentences]
    assert named == [False] * (CLEAN + 2) + [True]


@pytest.mark.parametrize(
    ("plant", "words"),
    [(older_routes, "they are not the routes that sampled these tokens"), (other_temperature, "a higher temperature")],
)
def test_what_is_wrong_from_the_start_is_told_without_a_reference(plant: Plant, words: str) -> None:
    run = done(PlantedRun(plant, first=1), 7)
    assert words in run.sentences[-1], run.cases
