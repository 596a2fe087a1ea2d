"""A tiny Mixture-of-Experts model that solves some of your prompts: a start for runs on a laptop.

    python examples/own_task/start.py runs/own-task/train.jsonl --out runs/own-task/start

It trains random weights on rows with a `prompt` and an `answer`, until it solves `--until` of the prompts that it kept
back. Stop early enough: what the start already solves every time, reinforcement has nothing to do with.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from torch.nn.functional import pad

from moe_trm.models.tiny.checkpoint import PAD, character_tokenizer, save, tiny_model

Row = tuple[list[int], list[int]]
"""Ids of a prompt and of its answer."""
NUM_CHECKED, BATCH_ROWS, CHECK_EVERY, LEARNING_RATE = 128, 64, 20, 2e-3


def encoded(lines: list[str]) -> list[Row]:
    """The rows as ids. Raises `ValueError` for a character that the tokenizer does not know."""
    tokenizer, rows = character_tokenizer(), []
    for number, line in enumerate(lines, start=1):
        row = json.loads(line)
        prompt = tokenizer.encode(row["prompt"])
        answer = tokenizer.encode(row["answer"] + tokenizer.eos_token, add_special_tokens=False)
        if tokenizer.unk_token_id in prompt + answer:
            raise ValueError(f"line {number} has a character beyond printable ASCII: {line.strip()}")
        rows.append((prompt, answer))
    return rows


def loss_of(model: torch.nn.Module, rows: list[Row]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens, in nats."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = [pad(torch.tensor(prompt + answer), (0, width - len(prompt + answer)), value=PAD) for prompt, answer in rows]
    labels = [
        pad(torch.tensor([-100] * len(prompt) + answer), (0, width - len(prompt + answer)), value=-100)
        for prompt, answer in rows
    ]
    loss: torch.Tensor = model(input_ids=torch.stack(ids), labels=torch.stack(labels)).loss
    return loss


@torch.no_grad()
def share_solved(model: torch.nn.Module, rows: list[Row]) -> float:
    """Share of rows whose greedy answer is right: each token of the answer is the likeliest after those before it."""
    solved = 0
    for prompt, answer in rows:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        solved += logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    return solved / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a JSONL file with prompt and answer on each line")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--until", type=float, default=0.3, help="share of prompts that it then solves (default: 0.3)")
    parser.add_argument("--max-steps", type=int, default=2000, help="give up after these (default: 2000)")
    args = parser.parse_args()
    rng = random.Random(0)
    rows = encoded(args.rows.read_text().splitlines())
    rng.shuffle(rows)
    checked, trained = rows[:NUM_CHECKED], rows[NUM_CHECKED:]
    torch.manual_seed(0)
    model = tiny_model(0)
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, args.max_steps + 1):
        loss = loss_of(model, rng.sample(trained, min(BATCH_ROWS, len(trained))))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            solved = share_solved(model, checked)
            print(f"step {step}: loss {loss.item():.3f}, solves {solved:.2f}", flush=True)
            if solved >= args.until:
                save(model, character_tokenizer(), args.out)
                return 0
    print(f"solves less than {args.until} after {args.max_steps} steps: nothing was written", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
