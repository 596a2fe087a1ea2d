"""The task of this example: write the letters of a word backwards.

    python examples/own_task/task.py

It writes prompts to train on and held-out ones, as rows with a prompt and an answer: `stone>`, `enots`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from string import ascii_lowercase

from moe_trm.tasks import RewardInput

FOLDER = Path("runs/own-task")
NUM_TRAIN, NUM_HELD_OUT = 4096, 256


def reward(sample: RewardInput) -> float:
    """1 for the right answer, else 0."""
    return float(sample.finished and sample.completion == sample.answer)


def write(folder: Path = FOLDER) -> None:
    """`train.jsonl` and `heldout.jsonl`, with no word in both."""
    rng = random.Random(0)
    words = list({"".join(rng.choices(ascii_lowercase, k=rng.randint(3, 6))): None for _ in range(6000)})
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"train": words[NUM_HELD_OUT:][:NUM_TRAIN], "heldout": words[:NUM_HELD_OUT]}.items():
        rows = ({"prompt": f"{word}>", "answer": word[::-1]} for word in part)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write()
