"""GSM8K as it is distributed: JSONL with `question` and an `answer` that ends in `#### 18`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moe_trm.errors import ConfigError
from moe_trm.tasks.examples import Example, read_examples

TEMPLATE = "Question: {prompt}\nAnswer:"
_MARK = "####"


def read_gsm8k(path: str | Path) -> list[Example]:
    """The examples of a GSM8K file, each with its final answer alone. Raises `ConfigError`, naming the lines."""
    return read_examples(path, finish=_final_answer)


def _final_answer(example: Example, where: str) -> Example:
    _, mark, tail = example.answer.rpartition(_MARK)
    if not mark or not tail.strip():
        raise ConfigError(
            "a GSM8K answer has no final answer",
            where=where,
            got=f"answer ends in {example.answer[-60:]!r}",
            expected="`#### ` and the number at its end",
            fix="use task.name=jsonl for other files",
        )
    return replace(example, answer=tail.strip())
