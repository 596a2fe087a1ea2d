"""Tasks read from JSONL files: one object a line with a question and an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_trm.errors import ConfigError
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt

_QUESTION_KEYS = ("prompt", "question")


@dataclass(frozen=True)
class Example:
    """One line of a file: `name` tells file and line."""

    name: str
    question: str
    answer: str


class FileTask:
    """Prompts from examples; see `moe_trm.tasks.protocol.Task`.

    Args:
        tokens: the checkpoint's tokenizer.
        train: training examples, at least one; every epoch runs through all of them in an order of its own.
        evaluation: held-out examples.
        seed: of the order.
        template: text with `{prompt}` in it.
        chat: give the text as the user's message of the chat template.
        reward: `(text, answer) -> float`.
        close: releases what `reward` holds.
    """

    def __init__(
        self,
        tokens: Tokens,
        train: Sequence[Example],
        evaluation: Sequence[Example],
        *,
        seed: int,
        template: str,
        chat: bool,
        reward: Callable[[str, str], float],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.tokens = tokens
        self._train, self._seed = train, seed
        self._template, self._chat = template, chat
        self._reward, self._close = reward, close
        self._eval = tuple(self._prompt(example) for example in evaluation)

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        first = (step - 1) * count
        return [self._prompt(self._train[self._index(position)]) for position in range(first, first + count)]

    def eval_prompts(self) -> tuple[Prompt, ...]:
        return self._eval

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        return self._reward(self.tokens.decode(token_ids), prompt.answer)

    def close(self) -> None:
        self._close()

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"order-{self._seed}-{epoch}").shuffle(order)
        return order[place]

    def _prompt(self, example: Example) -> Prompt:
        text = self._template.replace("{prompt}", example.question)
        token_ids = self.tokens.encode_chat(text) if self._chat else self.tokens.encode(text)
        return Prompt(example.name, token_ids, text=text, answer=example.answer)


def read_examples(path: str | Path) -> list[Example]:
    """Every line of a JSONL file; blank lines are skipped.

    Each line is an object with `prompt` or `question`, and `answer` (text or number).

    Raises:
        ConfigError: no such file, no lines, or a line that is not such an object, told by its number.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            "prompt file not found",
            where=str(path),
            got="no such file",
            expected="a JSONL file",
            fix="check task.prompts and task.eval_prompts",
        )
    examples = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line.strip():
            examples.append(_example(line, f"{path}, line {number}", f"{file.name}:{number}"))
    if not examples:
        raise ConfigError(
            "prompt file is empty", where=str(path), got="no lines", expected="at least one JSON object a line"
        )
    return examples


def _example(line: bytes, where: str, name: str) -> Example:
    expected = "an object with prompt (or question) and answer"
    try:
        data = json.loads(line.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            "a line of the prompt file is not valid JSON", where=where, got=str(error), expected=expected
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            "a line of the prompt file is not an object", where=where, got=type(data).__name__, expected=expected
        )
    question = next((data[key] for key in _QUESTION_KEYS if key in data), None)
    if not isinstance(question, str) or not question:
        raise ConfigError(
            "a line of the prompt file has no prompt", where=where, got=f"keys {sorted(data)}", expected=expected
        )
    answer = data.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or answer == "":
        raise ConfigError(
            "a line of the prompt file has no answer",
            where=where,
            got=repr(answer),
            expected="text or a number under `answer`",
        )
    return Example(name, question, str(answer))
