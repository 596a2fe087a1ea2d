"""Answers of a tiny MoE to sums, of the learner itself or of an engine that computes otherwise, and their log-probs.

Shape letters: B answers, R columns (prompt and answer without the last token), T sampled tokens, P parameters.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from moe_trm.models.tiny.checkpoint import BOS, EOS, PAD, character_tokenizer
from moe_trm.sync.rounding import Rounding, RouterNoise
from moe_trm.tasks.problems import ArithmeticProblem
from routing.hf import HFReplayer
from routing.record.sources import Record, Recorded, RouteSource

TOKENIZER = character_tokenizer()
ID_OF: Mapping[str, int] = TOKENIZER.get_vocab()


class Problem(Protocol):
    """A prompt with its answer."""

    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> str: ...


@dataclass(frozen=True)
class Answers:
    """Answers to prompts of one length, right-padded.

    Attributes:
        ids: `[B, R + 1]`.
        sampled: `[B, R]` bool, columns whose next token was sampled.
        rewards: `[B]`, 1 for a right answer that ended.
        advantages: `[B, R]`, the reward less the mean of the other answers to the prompt.
    """

    ids: Tensor
    sampled: Tensor
    rewards: Tensor
    advantages: Tensor

    def rows(self, rows: Tensor) -> Answers:
        """Some of the answers `[D]`."""
        return Answers(self.ids[rows], self.sampled[rows], self.rewards[rows], self.advantages[rows])

    @property
    def inputs(self) -> Tensor:
        """`[B, R]`"""
        return self.ids[:, :-1]

    @property
    def targets(self) -> Tensor:
        """`[B, R]`"""
        return self.ids[:, 1:]

    @property
    def valid(self) -> Tensor:
        """`[B, R]` bool, columns that are no padding."""
        return self.sampled | (torch.arange(self.sampled.shape[1]) < self.sampled.int().argmax(1, keepdim=True))


def problems(num: int, seed: str) -> list[ArithmeticProblem]:
    """Sums and differences of three digits each, so that all prompts have one length."""
    rng = random.Random(seed)
    return [ArithmeticProblem(rng.randint(100, 999), rng.choice("+-"), rng.randint(100, 999)) for _ in range(num)]


@torch.no_grad()
def sample(causal: Any, tasks: Sequence[Problem], group: int, max_new: int, seed: int) -> Answers:
    """`group` answers to each problem at temperature 1, to prompts of one length."""
    prompts = torch.tensor([[BOS, *(ID_OF[character] for character in task.prompt)] for task in tasks])
    prompts = prompts.repeat_interleave(group, 0)
    draw = torch.Generator().manual_seed(seed)
    inputs, cache, tokens, running = prompts, None, [], [torch.ones(len(prompts), dtype=torch.bool)]
    for _ in range(max_new):
        output = causal(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, probabilities = output.past_key_values, output.logits[:, -1].float().softmax(-1)
        inputs = torch.multinomial(probabilities, 1, generator=draw)
        tokens.append(torch.where(running[-1], inputs[:, 0], PAD))
        running.append(running[-1] & (inputs[:, 0] != EOS))
        if not running[-1].any():
            break
    answers_BT, sampled_BT = torch.stack(tokens, 1), torch.stack(running[:-1], 1)
    prompt_columns = torch.zeros(len(prompts), prompts.shape[1] - 1, dtype=torch.bool)
    rewards = [float(_solved(tasks[place // group], row)) for place, row in enumerate(answers_BT.tolist())]
    sampled = torch.cat((prompt_columns, sampled_BT), 1)
    scored = torch.tensor(rewards)
    return Answers(torch.cat((prompts, answers_BT), 1), sampled, scored, advantages(scored, group, sampled.shape[1]))


def advantages(rewards: Tensor, group: int, columns: int) -> Tensor:
    """`[B, columns]`: each reward `[B]` less the mean of the others of its group, whose answers stand together."""
    prompt_rewards = rewards.view(-1, group)
    mean_of_rest = (prompt_rewards.sum(1, keepdim=True) - prompt_rewards) / (group - 1)
    return (prompt_rewards - mean_of_rest).reshape(-1, 1).expand(-1, columns)


def _solved(problem: Problem, row: list[int]) -> bool:
    text = TOKENIZER.decode(row[: row.index(EOS)]) if EOS in row else ""
    return "#" in text and text.rpartition("#")[2] == problem.answer


def forward(causal: Any, replayer: HFReplayer, answers: Answers, source: RouteSource) -> tuple[Tensor, Recorded | None]:
    """Log-probs `[B, R]` of the next tokens under routes of `source`, and the routes if it records them."""
    with replayer.use(source, answers.inputs, answers.targets, answers.valid) as opened:
        logits = causal(input_ids=answers.inputs, use_cache=False).logits
    logprobs = logits.float().log_softmax(-1).gather(-1, answers.targets[..., None])[..., 0]
    return logprobs, opened.recorded() if isinstance(source, Record) else None


def engines(relative: float, seed: int) -> Mapping[str, Rounding]:
    """Arithmetic of each engine. `noise` has one draw of the routers' noise, `noise_each_push` one for each version."""
    return {
        "bf16": Rounding("bfloat16"),
        "fp8": Rounding("bfloat16", "fp8_e4m3"),
        "int4": Rounding("bfloat16", "int4"),
        "noise": Rounding("float32", noises=(RouterNoise(relative, each_push=False, seed=seed),)),
        "noise_each_push": Rounding("float32", noises=(RouterNoise(relative, each_push=True, seed=seed),)),
    }


@torch.no_grad()
def served(causal: Any, rounding: Rounding) -> Any:
    """The policy as an engine has it after a push: rounded weights, in the arithmetic of the engine."""
    engine = copy(causal)
    for (name, weight), held in zip(causal.named_parameters(), engine.parameters(), strict=True):
        for noise in rounding.noises:
            weight = noise.added(name, weight)
        # Of parameters alone: rounded positions would be another model.
        held.data = rounding.held(name, weight.detach()).clone()
    return engine


def copy(causal: Any) -> Any:
    """The same model without its replayer."""
    fresh = Qwen3MoeForCausalLM(causal.config).eval()
    fresh.set_experts_implementation("grouped_mm")
    fresh.load_state_dict(causal.state_dict())
    return fresh


def gradient(causal: Any, loss: Tensor, *, last: bool = True) -> Tensor:
    """The gradient `[P]` of `loss` by all parameters, float32; the graph is kept unless it is the `last` one."""
    weights = list(causal.parameters())
    parts = torch.autograd.grad(loss, weights, retain_graph=not last, allow_unused=True)
    flat = [torch.zeros_like(w) if part is None else part for w, part in zip(weights, parts, strict=True)]
    return torch.cat([part.flatten().float() for part in flat])
