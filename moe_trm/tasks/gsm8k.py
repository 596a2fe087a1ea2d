"""GSM8K as it is distributed: JSONL with `question` and an `answer` that ends in `#### 18`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moe_trm.errors import ConfigError
from moe_trm.tasks.examples import Example, read_examples

TEMPLATE = "Question: {prompt}\nAnswer:"
_MARK = "####"


def read_gsm8k(path: str | Path) -> list[Example]:
    """The examples of a GSM8K file, each with its final answer alone. Raises `ConfigError`, naming the line."""
    return [_final_answer(example, path) for example in read_examples(path)]


def _final_answer(example: Example, path: str | Path) -> Example:
    _, mark, tail = example.answer.rpartition(_MARK)
    if not mark or not tail.strip():
        raise ConfigError(
            "a GSM8K answer has no final answer",
            where=f"{path} ({example.name})",
            got=repr(example.answer[-60:]),
            expected="`#### ` and the number at its end",
            fix="use task.name=jsonl for other files",
        )
    return replace(example, answer=tail.strip())
