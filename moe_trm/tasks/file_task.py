"""A task whose prompts are read from a file or a data set."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.pictures import PictureTokens, expanded
from moe_trm.tasks.examples import Example
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.scorer import Scorer
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt

SPARE_BYTES = 64
"""Templates write more around some messages than around others."""


class FileTask:
    """Prompts from examples; see `moe_trm.tasks.protocol.Task`.

    Args:
        train: training examples, at least one; every epoch uses all of them, in a different order.
        evaluation: held-out examples by the name of their set.
        seed: of the order.
        template: text with `{prompt}` in it; plain `{prompt}` where a question is a list of messages.
        chat: give the text as the user's message of the chat template. Messages always go through it.
        pictures: tokens of a model that is given pictures.
    """

    def __init__(
        self,
        tokens: Tokens,
        scorer: Scorer,
        train: Sequence[Example],
        evaluation: Mapping[str, Sequence[Example]],
        *,
        seed: int,
        template: str,
        chat: bool,
        reward_weights: Mapping[str, float],
        pictures: PictureTokens | None = None,
    ) -> None:
        self.tokens, self.reward_weights, self._scorer = tokens, reward_weights, scorer
        self._train, self._seed = train, seed
        self._template, self._chat, self._pictures = template, chat, pictures
        self._eval = {
            name: tuple(self._prompt(example) for example in examples)
            for name, examples in evaluation.items()
            if examples
        }

    async def start(self) -> None:
        await self._scorer.start()

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        first = (step - 1) * count
        return [self._prompt(self._train[self._index(position)]) for position in range(first, first + count)]

    def eval_sets(self) -> Mapping[str, tuple[Prompt, ...]]:
        return self._eval

    def longer_than(self, room: int) -> list[Prompt]:
        """Training prompts of more than `room` tokens.

        A token is a byte at least. So a prompt whose bytes fit beside the template's is not tokenised.
        """
        around = _bytes_around(self._prompt(self._train[0]), self._train[0])
        long = (
            candidate
            for candidate in self._train
            if candidate.pictures or _num_bytes(candidate) + around * (_num_messages(candidate) + 1) > room
        )
        return [prompt for prompt in map(self._prompt, long) if len(prompt.token_ids) > room]

    def characters(self) -> set[str]:
        """All that occur in training prompts and their answers."""
        placeholder = "" if self._pictures is None else self._pictures.placeholder
        texts = (text for example in self._train for text in (*_texts(example), example.answer))
        return {letter for text in texts for letter in {*(text.replace(placeholder, "") if placeholder else text)}}

    @property
    def num_train(self) -> int:
        """Training prompts."""
        return len(self._train)

    async def reward(self, sample: RewardInput) -> object:
        return await self._scorer(sample)

    async def close(self) -> None:
        await self._scorer.close()

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"order-{self._seed}-{epoch}").shuffle(order)
        return order[place]

    def _prompt(self, example: Example) -> Prompt:
        question = example.question
        if isinstance(question, str):
            text = self._template.replace("{prompt}", question)
            if not self._chat:
                return self._with_pictures(example, Prompt("", self.tokens.encode(text), text))
            question = ({"role": "user", "content": text},)
        elif self._template != "{prompt}":
            raise ConfigError(
                "task.template is for prompts that are text",
                where=example.name,
                got="a list of messages",
                expected="no task.template",
            )
        text = self.tokens.render(question)
        ids = self.tokens.encode_plain(text)
        return self._with_pictures(example, Prompt("", ids, text, messages=tuple(question)))

    def _with_pictures(self, example: Example, prompt: Prompt) -> Prompt:
        """The prompt of the example, with its pictures and as many tokens as they have."""
        token_ids = prompt.token_ids
        if self._pictures is not None:
            counts = [picture.tokens for picture in example.pictures]
            try:
                token_ids = expanded(token_ids, self._pictures.image, counts)
            except ValueError as error:
                raise CheckpointError(
                    "the tokenizer or the chat template changes the placeholders of pictures",
                    where=f"{self.tokens.folder}, {example.name}",
                    got=str(error),
                    expected=f"a token for each {self._pictures.placeholder}",
                ) from error
        return replace(
            prompt,
            prompt_id=example.name,
            token_ids=token_ids,
            answer=example.answer,
            extra=example.extra,
            pictures=tuple(picture.png() for picture in example.pictures),
        )


def _num_bytes(example: Example) -> int:
    return sum(len(text.encode()) for text in _texts(example))


def _texts(example: Example) -> list[str]:
    question = example.question
    return [question] if isinstance(question, str) else [message["content"] for message in question]


def _num_messages(example: Example) -> int:
    return 1 if isinstance(example.question, str) else len(example.question)


def _bytes_around(prompt: Prompt, example: Example) -> int:
    """Bytes that a template writes around a message, at most: those around the messages of this prompt."""
    return max(0, len(prompt.text.encode()) - _num_bytes(example)) + SPARE_BYTES
