"""Supervised warm-up: makes a start that RL can improve.

Phase 1 teaches the tiny model to work arithmetic problems out in writing. Phase 2 makes most answers a bare `#` and a
guess. Afterwards the greedy answer is a guess that is mostly wrong, but the model can still work the answer out. So RL
can teach it to show its working, and nothing else would raise its accuracy that fast.

`python -m moe_trm.tools.quickstart.warmup --out DIR --seed N` writes a Hugging Face checkpoint and `warmup.json` beside
it. Shape letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from moe_trm.errors import MoeTrmError
from moe_trm.models.registry import MOE_FAMILIES
from moe_trm.models.tiny.checkpoint import BOS, EOS, PAD, TinyShape, character_tokenizer, save, tiny_model
from moe_trm.models.tiny.families import tiny_family
from moe_trm.tasks.arithmetic import held_out_problems
from moe_trm.tasks.problems import ArithmeticProblem, draw
from moe_trm.tools.quickstart.share import BatchShare, forked

_IGNORED = -100
_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "initializer_range": 0.02,
}  # fmt: skip
"""Of a start of another family, from the quickstart's model."""


class WarmupError(MoeTrmError):
    """The warm-up did not reach a start from which the quickstart can learn."""


@dataclass(frozen=True)
class WarmupRecipe:
    """The warm-up's settings.

    Attributes:
        pool_batches: batches drawn at once and cut by length.
        lr: peak of phase 1; up within `lr_warmup_steps`, down to `lr_floor` of it at `steps`.
        steps, further_steps, max_steps: phase 1 is measured after `steps`, and while it solves less than `enough` after
            every `further_steps`, up to `max_steps`.
        mixed_lr, mixed_steps, direct_share: phase 2, falling like phase 1, in which that share of the answers are bare
            guesses; while greedy accuracy is above `max_greedy`, up to `extra_rounds` rounds of `extra_steps` follow.
        min_working: what the finished start must still solve when it may not begin with `#`.
        max_cpu_seconds: limit of the whole warm-up, in CPU time of a process: other programs may have the cores.
    """

    batch_size: int = 64
    pool_batches: int = 4
    lr: float = 1.5e-3
    lr_warmup_steps: int = 30
    lr_floor: float = 0.1
    max_digits: int = 3
    steps: int = 480
    further_steps: int = 50
    max_steps: int = 780
    enough: float = 0.8
    mixed_lr: float = 2.5e-4
    mixed_steps: int = 70
    direct_share: float = 0.65
    max_greedy: float = 0.22
    extra_steps: int = 20
    extra_rounds: int = 4
    min_working: float = 0.65
    max_new_tokens: int = 48
    eval_size: int = 256
    max_cpu_seconds: float = 600.0


@dataclass(frozen=True)
class WarmupReport:
    """Report of the warm-up: steps of both phases, held-out accuracies and cost.

    Accuracies are greedy, and greedy when the first token may not be `#`.
    """

    seed: int
    steps: int
    mixed_steps: int
    greedy_accuracy: float
    working_accuracy: float
    seconds: float
    cpu_seconds: float


class Warmup:
    """One model, the tiny one or another, on its way from random weights to the quickstart's start."""

    def __init__(
        self,
        seed: int,
        recipe: WarmupRecipe,
        share: BatchShare | None = None,
        shape: TinyShape | None = None,
        family: str = "qwen3_moe",
    ) -> None:
        self.recipe, self.seed, self._share = recipe, seed, share or BatchShare()
        self.tokenizer: PreTrainedTokenizerFast = character_tokenizer()
        self._id_of: dict[str, int] = self.tokenizer.get_vocab()
        self.model: Any = tiny_model(seed, shape) if family == "qwen3_moe" else tiny_family(family, seed, **_SIZES)
        self.model.set_experts_implementation("grouped_mm")
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.rng = random.Random(f"warmup-{seed}")
        self.step = 0
        self._pool: list[list[tuple[list[int], list[int]]]] = []
        self._start, self._cpu_start = time.monotonic(), time.process_time()

    def run(self) -> WarmupReport:
        """Both phases. Raises `WarmupError` rather than leave a start that cannot work."""
        check = random.Random(f"warmup-check-{self.seed}")
        problems = [draw(check, self.recipe.max_digits, held_out=False) for _ in range(self.recipe.eval_size)]
        self._learn_working(problems)
        learnt_at = self.step
        self._learn_to_guess(problems)
        held_out = held_out_problems(self.recipe.max_digits, self.recipe.eval_size)
        greedy, working = self.accuracy(held_out), self.accuracy(held_out, ban_direct=True)
        self._say(f"warm-up done: held-out accuracy {greedy:.3f} greedy, {working:.3f} when made to show its working")
        if greedy > 0.30 or working < self.recipe.min_working:
            raise WarmupError(
                "the warm-up ended in a start that the quickstart cannot use",
                where=f"seed {self.seed}, step {self.step}",
                got=f"greedy accuracy {greedy:.3f}, with working {working:.3f}",
                expected=f"at most 0.30, and at least {self.recipe.min_working}",
                fix="try another seed",
            )
        return WarmupReport(self.seed, learnt_at, self.step - learnt_at, greedy, working, *self._cost())

    def _learn_working(self, problems: Sequence[ArithmeticProblem]) -> None:
        recipe, solved = self.recipe, 0.0
        for target in range(recipe.steps, recipe.max_steps + 1, recipe.further_steps):
            while self.step < target:
                loss = self.supervised_step(direct_share=0.0)
                if self.step % 50 == 0:
                    self._say(f"warm-up step {self.step}: loss {loss:.3f}")
            solved = self.accuracy(problems)
            self._say(f"warm-up step {self.step}: solves {solved:.2f} with working")
            if solved >= recipe.enough:
                return
        raise WarmupError(
            "the warm-up did not learn to work problems out",
            where=f"seed {self.seed}",
            got=f"{solved:.2f} solved after {self.step} steps",
            expected=f"at least {self.recipe.enough}",
            fix="try another seed, or raise max_steps",
        )

    def supervised_step(self, *, direct_share: float) -> float:
        """A step of phase 1. Returns its loss."""
        return self._train_step(direct_share=direct_share, lr=self.recipe.lr * self._schedule())

    def _schedule(self) -> float:
        """Share of the peak learning rate at this step: up linearly, then down linearly, then constant."""
        recipe = self.recipe
        rising = (self.step + 1) / recipe.lr_warmup_steps
        falling = 1 - (self.step - recipe.lr_warmup_steps) / (recipe.steps - recipe.lr_warmup_steps)
        return max(recipe.lr_floor, min(1.0, rising, falling)) if self.step >= recipe.lr_warmup_steps else rising

    def _learn_to_guess(self, problems: Sequence[ArithmeticProblem]) -> None:
        self._pool.clear()
        recipe = self.recipe
        for number in range(1 + recipe.extra_rounds):
            steps = recipe.extra_steps if number else recipe.mixed_steps
            for step in range(steps):
                share = 0.4 if number else max(recipe.lr_floor, 1 - step / steps)
                self._train_step(direct_share=recipe.direct_share, lr=recipe.mixed_lr * share)
            greedy, working = self.accuracy(problems), self.accuracy(problems, ban_direct=True)
            self._say(
                f"warm-up step {self.step}: {greedy:.2f} greedy, {working:.2f} with working, answering directly is "
                "now the habit"
            )
            if greedy <= self.recipe.max_greedy and working >= self.recipe.min_working:
                return

    def _train_step(self, *, direct_share: float, lr: float) -> float:
        if time.process_time() - self._cpu_start > self.recipe.max_cpu_seconds:
            raise WarmupError(
                "the warm-up takes too long",
                where=f"step {self.step}",
                got=f"more than {self.recipe.max_cpu_seconds:.0f} s of CPU",
                expected="about 90 s on each of two cores",
                fix="look whether it learns: its lines say the loss",
            )
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        input_ids, targets, count = self._batch(direct_share)
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum") / count
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        *grads, total = self._share.sums([*(parameter.grad for parameter in parameters), loss.detach()])
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(total)

    def _batch(self, direct_share: float) -> tuple[Tensor, Tensor, int]:
        """Input ids `[B, T]` and targets `[B, T]`, the latter only on the answer; targets of all processes together."""
        if not self._pool:
            self._pool = self._draw_pool(direct_share)
        rows_of_all = self._pool.pop()
        rows = self._share.of(rows_of_all)
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, targets = [], []
        for prompt, answer in rows:
            rest = width - len(prompt) - len(answer)
            ids.append([*prompt, *answer, *[PAD] * rest])
            targets.append([*[_IGNORED] * len(prompt), *answer, *[_IGNORED] * rest])
        return torch.tensor(ids)[:, :-1], torch.tensor(targets)[:, 1:], sum(len(answer) for _, answer in rows_of_all)

    def _draw_pool(self, direct_share: float) -> list[list[tuple[list[int], list[int]]]]:
        """Some batches of (prompt, answer) ids, each of rows of like length, so that little is spent on padding.

        With direct answers among them only one batch: sorted by length they would come in batches of their own, and the
        habit would swing from batch to batch.
        """
        size, rows = self.recipe.batch_size, []
        for _ in range((self.recipe.pool_batches if direct_share == 0 else 1) * size):
            problem = draw(self.rng, self.recipe.max_digits, held_out=False)
            solution = problem.solution(with_working=self.rng.random() >= direct_share)
            rows.append(([BOS, *self._spell(problem.prompt)], [*self._spell(solution), EOS]))
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        pool = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.rng.shuffle(pool)
        return pool

    def _spell(self, text: str) -> list[int]:
        """Ids of the characters. The tokenizer gives the same, and takes a tenth of a step for it."""
        return [self._id_of[character] for character in text]

    def accuracy(self, problems: Sequence[ArithmeticProblem], *, ban_direct: bool = False) -> float:
        """Share of problems whose greedy answer is right; `ban_direct` forbids `#` as the first token."""
        return self._share.total(self._num_solved(self._share.of(problems), ban_direct)) / len(problems)

    @torch.no_grad()
    def _num_solved(self, problems: Sequence[ArithmeticProblem], ban_direct: bool) -> int:
        """All answers at once, one token a pass. Where a prompt goes on, its next token is what the pass gave."""
        if not problems:
            return 0
        banned = self._id_of["#"]
        prompts = [[BOS, *self._spell(problem.prompt)] for problem in problems]
        lengths_B = torch.tensor([len(prompt) for prompt in prompts])
        shortest, longest = int(lengths_B.min()), int(lengths_B.max())
        prompts_BT = torch.tensor([[*prompt, *[PAD] * (longest - len(prompt))] for prompt in prompts])
        ids, cache, sampled = prompts_BT[:, :shortest], None, []
        finished = torch.zeros(len(problems), dtype=torch.bool)
        for position in range(shortest, longest + self.recipe.max_new_tokens):
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logits_BV = output.past_key_values, output.logits[:, -1]
            if ban_direct:
                logits_BV[lengths_B == position, banned] = float("-inf")
            token_B = logits_BV.argmax(-1)
            if position < longest:
                token_B = torch.where(lengths_B <= position, token_B, prompts_BT[:, position])
            ids = token_B[:, None]
            sampled.append(token_B)
            finished |= token_B == EOS
            if finished.all():
                break
        rows = torch.stack(sampled, 1).tolist()
        answers = (row[len(prompt) - shortest :] for prompt, row in zip(prompts, rows, strict=True))
        limit = self.recipe.max_new_tokens
        return sum(self._solved(problem, row[:limit]) for problem, row in zip(problems, answers, strict=True))

    def _solved(self, problem: ArithmeticProblem, row: list[int]) -> bool:
        text = self.tokenizer.decode(row[: row.index(EOS)]) if EOS in row else ""
        return "#" in text and text.rpartition("#")[2] == problem.answer

    def _cost(self) -> tuple[float, float]:
        return time.monotonic() - self._start, time.process_time() - self._cpu_start

    def _say(self, text: str) -> None:
        seconds, cpu_seconds = self._cost()
        if self._share.rank:
            return
        print(f"[{seconds:5.1f} s, {cpu_seconds:5.1f} s cpu] {text}", flush=True)


def warm_up(
    folder: Path,
    seed: int = 0,
    recipe: WarmupRecipe | None = None,
    share: BatchShare | None = None,
    family: str = "qwen3_moe",
    shape: TinyShape | None = None,
) -> WarmupReport:
    """Make the quickstart's start in `folder`: a checkpoint of `family`, and its report `warmup.json`.

    `share`: the part of this process, all of which call this; the first one writes. `shape`: of a Qwen3-MoE, else the
    quickstart's. Raises `WarmupError`.
    """
    warmup = Warmup(seed, recipe or WarmupRecipe(), share, family=family, shape=shape)
    report = warmup.run()
    if share is not None and share.rank:
        return report
    save(warmup.model, warmup.tokenizer, folder)
    (folder / "warmup.json").write_text(
        json.dumps({"report": asdict(report), "recipe": asdict(warmup.recipe)}, indent=2) + "\n"
    )
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit status 2 after a `WarmupError`."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_trm.tools.quickstart.warmup", description="make and warm up the quickstart's tiny model"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seeds weights and data (default: 0)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="that share each batch")
    parser.add_argument("--family", default="qwen3_moe", choices=MOE_FAMILIES, help="of models (default: qwen3_moe)")
    parser.add_argument("--cpu-seconds", type=float, default=WarmupRecipe.max_cpu_seconds, help="that it may take")
    args = parser.parse_args(argv)
    share = forked(args.processes)
    try:
        warm_up(args.out, args.seed, WarmupRecipe(max_cpu_seconds=args.cpu_seconds), share, args.family)
    except MoeTrmError as error:
        if not share.rank:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
