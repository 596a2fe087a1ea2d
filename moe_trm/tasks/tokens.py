"""A checkpoint's tokenizer at the edge: text in once, text out for scoring. In between there are only token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from moe_trm.errors import CheckpointError
from moe_trm.models.hf_config import missing_folder_fix, text_config
from moe_trm.tasks.template_variables import check_variables

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
"""Without any of these transformers makes up an empty tokenizer rather than fail."""

GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that reads any tokenizer.json, in transformers 4 and 5."""

ANSWER_MARK = "\u2063answer\u2063"
"""Stands for an answer whose ids are known; no message contains it."""


class Tokens:
    """Tokenizer, vocabulary size and stop tokens of a Hugging Face checkpoint folder.

    Attributes:
        template_variables: of the chat template, in every conversation.
        vocab_size: of the model (config.json); the tokenizer may use fewer ids, never more.
        max_positions: tokens of a sequence at most, of config.json; None where it does not say.
        stop_token_ids: of generation_config.json, else of config.json, else the tokenizer's end token.
    """

    template_variables: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, folder: str | Path, template_variables: Mapping[str, Any] | None = None) -> None:
        """Load config and tokenizer of a checkpoint folder.

        Raises `CheckpointError`: no folder, no config.json, no tokenizer, a tokenizer with ids the model has no row
        for, or variables that the chat template does not have.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                "checkpoint folder not found",
                where=str(folder),
                got="no such folder",
                expected="a Hugging Face checkpoint folder",
                fix=missing_folder_fix(str(folder)),
            )
        config = text_config(self._json("config.json", required=True))
        self._tokenizer = self._load()
        self.vocab_size = self._vocab_size(config)
        positions = config.get("max_position_embeddings")
        self.max_positions = positions if isinstance(positions, int) else None
        self.stop_token_ids = self._stop_tokens(config)
        if template_variables:
            check_variables(template_variables, self._template_text(), str(folder))
            self.template_variables = template_variables

    @cached_property
    def longest_token(self) -> int:
        """Characters that one token stands for at most: a longer text has more tokens."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> tuple[int, ...]:
        """Text as ids, with the tokens that the tokenizer itself puts in front (a beginning token)."""
        return tuple(self._tokenizer.encode(text))

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Text as ids, by itself: nothing is put in front."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def lacking(self, characters: Iterable[str]) -> list[str]:
        """Those that become the unknown token, or nothing, and so cannot be read or written by the policy; sorted."""
        unknown = self._tokenizer.unk_token_id
        written = {character: self.encode_plain(character) for character in characters}
        return sorted(
            character for character, ids in written.items() if unknown in ids or not (ids or character.isspace())
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """Messages in the form of the tokenizer's chat template, ready for the assistant to answer.

        `tools` are JSON descriptions of functions, `variables` further names that the template knows, before those of
        the run. `opens_answer`: end with what opens the assistant's answer. Raises `CheckpointError` for no template,
        or one that cannot write these messages.
        """
        if not self.has_chat_template:
            raise CheckpointError(
                "the tokenizer has no chat template",
                where=str(self.folder),
                expected="a chat_template in tokenizer_config.json",
                fix="set task.chat=false, and give prompts as text",
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=opens_answer,
                **{**self.template_variables, **(variables or {})},
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the chat template cannot write these messages",
                where=str(self.folder),
                got=f"roles {[message.get('role') for message in messages]}: {error}",
                expected="messages in an order that the template knows",
            ) from error
        return str(rendered)

    def _template_text(self) -> str | None:
        """The chat template; all of them where it has several by name."""
        template = getattr(self._tokenizer, "chat_template", None)
        return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else template

    @property
    def has_chat_template(self) -> bool:
        """True where the tokenizer can write conversations."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode_continuation(self, messages: Sequence[Mapping[str, str]], last_token: int) -> tuple[int, ...]:
        """The ids between an answer that ended in `last_token` and the next one, with `messages` in between.

        The template writes a whole conversation with a marked answer in it. Its text after the mark closes the answer,
        holds the messages and opens the next answer. The closing token is left out when the policy sampled it itself.

        Raises `CheckpointError` as `render` does, and for a template that writes the beginning of a conversation
        otherwise as it grows.
        """
        asked, answer = {"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER_MARK}
        rendered, opening = self.render([asked, answer, *messages]), self.render([asked], opens_answer=False)
        head, mark, behind = rendered.rpartition(ANSWER_MARK)
        if not mark or rendered.count(ANSWER_MARK) != 1:
            raise CheckpointError(
                "the chat template does not write an assistant's answer as it is",
                where=str(self.folder),
                got=f"{rendered.count(ANSWER_MARK)} copies of it",
                expected="1",
                fix="append what follows an answer with Session.append_ids",
            )
        if not head.startswith(opening):
            raise CheckpointError(
                "the chat template changes the beginning of a conversation when messages follow",
                where=str(self.folder),
                got=repr(head),
                expected=f"a text that begins with {opening!r}, which the policy was given",
                fix="append what follows an answer with Session.append_ids",
            )
        token_ids = self.encode_plain(behind)
        return token_ids[1:] if token_ids and token_ids[0] == last_token else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids as text, special tokens left out, spaces untouched."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Ids as text, special tokens included."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text that each id adds to the text before it, special tokens included. Joined, these are the whole text.

        It is empty while a character is unfinished; the character comes with its last id.
        """
        pieces, start, read = [], 0, 0
        for end in range(1, len(token_ids) + 1):
            shorter, longer = self.decode_all(token_ids[start:read]), self.decode_all(token_ids[start:end])
            unfinished = longer.endswith("\ufffd") and end < len(token_ids)
            pieces.append("" if unfinished else longer[len(shorter) :])
            if not unfinished:
                start, read = read, end
        return pieces

    def _load(self) -> Any:
        if not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            raise CheckpointError(
                "the checkpoint has no tokenizer",
                where=str(self.folder),
                got="none of " + ", ".join(_TOKENIZER_FILES),
                expected="tokenizer.json and tokenizer_config.json",
                fix="copy the tokenizer files of the original model into the folder",
            )
        try:
            return self._tokenizer_class().from_pretrained(str(self.folder), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "the checkpoint's tokenizer cannot be read",
                where=str(self.folder),
                got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                expected="tokenizer.json and tokenizer_config.json",
            ) from error

    def _tokenizer_class(self) -> Any:
        """The class that the checkpoint names, if it is the general one; else transformers finds it.

        Imported here, so that a process without a tokenizer, such as a learner rank, does not wait for transformers.
        """
        if self._json("tokenizer_config.json", required=False).get("tokenizer_class") in GENERAL_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer

    def _vocab_size(self, config: dict[str, Any]) -> int:
        size = config.get("vocab_size")
        if not isinstance(size, int):
            raise CheckpointError(
                "config.json has no vocab_size", where=str(self.folder), got=size, expected="an integer"
            )
        text, highest = max(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        if highest >= size:
            raise CheckpointError(
                "the tokenizer has ids that the model has no embedding for",
                where=str(self.folder),
                got=f"id {highest} for {text!r}",
                expected=f"ids below vocab_size {size}",
                fix="use the tokenizer that belongs to this model",
            )
        return size

    def _stop_tokens(self, config: dict[str, Any]) -> tuple[int, ...]:
        stop_token = self._json("generation_config.json", required=False).get("eos_token_id")
        for candidate in (stop_token, config.get("eos_token_id"), self._tokenizer.eos_token_id):
            if candidate is not None:
                ids = candidate if isinstance(candidate, list) else [candidate]
                return tuple(int(token) for token in ids)
        raise CheckpointError(
            "the checkpoint names no end token, so no answer could finish",
            where=str(self.folder),
            expected="eos_token_id in config.json or generation_config.json",
        )

    def _json(self, name: str, *, required: bool) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            if not required:
                return {}
            raise CheckpointError(
                f"the checkpoint has no {name}",
                where=str(self.folder),
                got=f"no {name}",
                expected="a Hugging Face checkpoint folder",
                fix="check model.checkpoint",
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{name} is not valid JSON", where=str(path), got=str(error)) from error
        return data if isinstance(data, dict) else {}
