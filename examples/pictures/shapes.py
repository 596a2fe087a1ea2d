"""The task of this example: name the colour of the shape in a picture.

    python examples/pictures/shapes.py

It draws pictures, and writes rows with a prompt, an answer and the place of a picture: `train.jsonl` and
`heldout.jsonl`. In `train-shuffled.jsonl` and `heldout-shuffled.jsonl` the same pictures belong to other rows, so that
nothing tells the answer.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from moe_trm.tasks import RewardInput

FOLDER = Path("runs/pictures")
COLOURS = ("red", "green", "blue", "black", "pink", "brown")
SIDE, NUM_TRAIN, NUM_HELD_OUT = 64, 1024, 192


def reward(sample: RewardInput) -> float:
    """1 for the right answer, else 0."""
    return float(sample.finished and sample.completion == sample.answer)


def draw(rng: random.Random, colour: str) -> Image.Image:
    """A circle, square or triangle of this colour on white, of some size at some place."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    size = rng.randint(24, 44)
    left, top = rng.randint(0, SIDE - size - 1), rng.randint(0, SIDE - size - 1)
    box, pen = (left, top, left + size, top + size), ImageDraw.Draw(image)
    kind = rng.randrange(3)
    if kind == 0:
        pen.ellipse(box, fill=colour)
    elif kind == 1:
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(left, top + size), (left + size // 2, top), (left + size, top + size)], fill=colour)
    return image


def write(folder: Path = FOLDER) -> None:
    """The pictures, and the four files of rows."""
    rng = random.Random(0)
    (folder / "drawn").mkdir(parents=True, exist_ok=True)
    for name, number in (("train", NUM_TRAIN), ("heldout", NUM_HELD_OUT)):
        rows = []
        for index in range(number):
            colour, place = rng.choice(COLOURS), f"drawn/{name}-{index}.png"
            draw(rng, colour).save(folder / place)
            rows.append({"prompt": "<image>colour:", "answer": colour, "images": [place]})
        shuffled = rng.sample([row["images"] for row in rows], number)
        mixed = [{**row, "images": images} for row, images in zip(rows, shuffled, strict=True)]
        for suffix, part in (("", rows), ("-shuffled", mixed)):
            (folder / f"{name}{suffix}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    write()
