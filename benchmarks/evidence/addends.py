"""Sums of 2 to 24 numbers with running totals, and a start that solves at least half of each octave.

Both are for answer_length.yaml.

`python -m benchmarks.evidence.addends [--out DIR]` writes training prompts, one held-out set for each octave of the
number of addends, and the start. `a12b7c45=` is worked out as `b12+7=19,c19+45=64#64`: a letter names the addend whose
turn it is, because a tiny model does not count. More addends have fewer digits, so that an answer has 13 to 230 tokens.
The start learns from random weights, in every other step or so from an octave of which it solves less than half, and is
ready when it solves half of each.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from string import ascii_lowercase as LETTERS
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.evidence.oracle_answers import ID_OF, TOKENIZER, sample
from benchmarks.options import command_line
from moe_trm.errors import MoeTrmError
from moe_trm.models.tiny.checkpoint import BOS, EOS, PAD, save, tiny_model

OUT = Path("runs/addends")
OCTAVES: Mapping[str, tuple[int, int, int]] = {
    "two": (2, 3, 2),
    "four": (4, 7, 2),
    "eight": (8, 15, 1),
    "sixteen": (16, 24, 1),
}
"""Fewest and most addends, and the digits of each."""
TRAINED, HELD_OUT, CHECKED = 8192, 256, 128
"""Training prompts; held-out prompts of an octave; answers of a check."""
LR, WARMUP_STEPS, BATCH_TOKENS, CHECK_EVERY, MAX_STEPS, ENOUGH, MAX_NEW = 1.5e-3, 30, 3000, 100, 6000, 0.5, 320
AVERAGED_STEPS = 100
"""Of the moving average that is the start: the weights of a single step solve one octave at the cost of another."""


@dataclass(frozen=True)
class Addends:
    """The sum of these numbers."""

    numbers: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "".join(f"{letter}{number}" for letter, number in zip(LETTERS, self.numbers, strict=False)) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.numbers))

    @property
    def solution(self) -> str:
        """Running totals and the answer."""
        steps = zip(LETTERS[1:], self.numbers[1:], pairwise(accumulate(self.numbers)), strict=False)
        lines = [f"{letter}{total}+{number}={next_total}" for letter, number, (total, next_total) in steps]
        return ",".join(lines) + f"#{self.answer}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the prompts and the start (default: {OUT})")
    args = parser.parse_args(argv)
    write(args.out)
    try:
        make(args.out / "start")
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def draw(rng: random.Random, octave: str, num: int | None = None) -> Addends:
    """Numbers of that many digits, none of them 0; so many, or any number of the octave."""
    fewest, most, digits = OCTAVES[octave]
    return Addends(
        tuple(rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(num or rng.randint(fewest, most)))
    )


def write(out: Path) -> None:
    """Prompts to train on, as many of each octave, and held-out ones that are not among them."""
    out.mkdir(parents=True, exist_ok=True)
    rng, seen = random.Random("addends"), set[Addends]()

    def fresh(octave: str, count: int) -> list[Addends]:
        fresh_problems: list[Addends] = []
        while len(fresh_problems) < count:
            if (problem := draw(rng, octave)) not in seen:
                seen.add(problem)
                fresh_problems.append(problem)
        return fresh_problems

    held_out = {octave: fresh(octave, HELD_OUT) for octave in OCTAVES}
    for octave, problems in held_out.items():
        _write(out / f"{octave}.jsonl", problems)
    trained = [problem for octave in OCTAVES for problem in fresh(octave, TRAINED // len(OCTAVES))]
    rng.shuffle(trained)
    _write(out / "train.jsonl", trained)


def _write(path: Path, problems: Iterable[Addends]) -> None:
    rows = ({"prompt": problem.prompt, "answer": problem.answer} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, *, max_steps: int = MAX_STEPS) -> None:
    """Write the start. Raises `MoeTrmError` if it does not solve half of each octave in time."""
    causal: Any = tiny_model(0)
    causal.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(causal.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    update: Any = get_ema_multi_avg_fn(1.0 - 1.0 / AVERAGED_STEPS)  # type: ignore[no-untyped-call]
    average = AveragedModel(causal, multi_avg_fn=update)
    rng, solved = random.Random("addends-start"), dict.fromkeys(OCTAVES, 0.0)
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / WARMUP_STEPS)
        behind = [octave for octave, share in solved.items() if share < ENOUGH]
        optimizer.zero_grad()
        loss = _loss(causal, rng, rng.choice(behind if rng.random() < 0.5 else [*OCTAVES]))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(causal.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(causal)
        if step % CHECK_EVERY == 0:
            solved = {octave: success(average.module, octave, step) for octave in OCTAVES}
            print(f"step {step}: loss {float(loss.detach()):.3f}, solved {solved}", flush=True)
            if min(solved.values()) >= ENOUGH:
                save(average.module, TOKENIZER, out)
                summary = {"steps": step, "solved": solved}
                (out / "warmup.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
                return
    raise MoeTrmError(
        "the start does not solve half of each octave",
        where=str(out),
        got=str(solved),
        expected=f"{ENOUGH} each within {max_steps} steps",
        fix="raise MAX_STEPS of this module",
    )


def _loss(causal: Any, rng: random.Random, octave: str) -> torch.Tensor:
    """The loss of the answers of a batch, mean over their tokens."""
    rows: list[tuple[list[int], list[int]]] = []
    while sum(len(prompt) + len(answer) for prompt, answer in rows) < BATCH_TOKENS:
        problem = draw(rng, octave)
        rows.append(([BOS, *_spell(problem.prompt)], [*_spell(problem.solution), EOS]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.tensor([[*prompt, *answer, *[PAD] * (width - len(prompt) - len(answer))] for prompt, answer in rows])
    targets = torch.full_like(ids, -100)
    for row, (prompt, answer) in zip(targets, rows, strict=True):
        row[len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = causal(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)


def success(causal: Any, octave: str, seed: int) -> float:
    """Share of right answers at temperature 1 to sums of the middle length of an octave."""
    rng, (fewest, most, _) = random.Random(f"check-{octave}"), OCTAVES[octave]
    problems = [draw(rng, octave, (fewest + most + 1) // 2) for _ in range(CHECKED)]
    return float(sample(causal, problems, 1, MAX_NEW, seed).rewards.mean())


def _spell(text: str) -> list[int]:
    return [ID_OF[character] for character in text]


if __name__ == "__main__":
    sys.exit(main())
