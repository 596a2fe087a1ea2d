"""Variables of a chat template (`task.chat_template_kwargs`): those that the template itself reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from moe_trm.errors import CheckpointError

KEY = "task.chat_template_kwargs"
OF_THE_TOKENIZER = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "strftime_now", "raise_exception"),
    }
)
"""Names that the tokenizer gives every template."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Marks of answers for trainers of transformers; they write nothing."""


def variables_of(template: str) -> frozenset[str]:
    """Names that a template reads and does not set. Raises `TemplateSyntaxError`."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    names = meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    return frozenset(names) - OF_THE_TOKENIZER - frozenset(environment.globals)


def check_variables(variables: Mapping[str, Any], template: str | None, where: str) -> None:
    """Raises `CheckpointError` for no template, or for variables that it does not read."""
    if template is None:
        raise CheckpointError(
            f"the tokenizer has no chat template, and {KEY} sets variables of one",
            where=where,
            got=", ".join(sorted(variables)),
            expected="a chat_template in tokenizer_config.json",
            fix=f"leave out {KEY}",
        )
    try:
        known = variables_of(template)
    except TemplateSyntaxError as error:
        raise CheckpointError("the chat template cannot be parsed", where=where, got=str(error)) from error
    unknown = sorted(variables.keys() - known)
    if unknown:
        raise CheckpointError(
            "the chat template has no such variable",
            where=f"{where}, config key {KEY}",
            got=", ".join(unknown),
            expected=f"one of {', '.join(sorted(known))}" if known else "none: this template has no variables",
            fix=f"check the spelling, or leave it out of {KEY}",
        )
