"""Copies the quickstart's start and gives it a chat template, which writes chats as the model writes sums."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

TEMPLATE = (
    "<bos>{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.expression }}={% endfor %}"
    "{% if message.role == 'assistant' and not message.tool_calls %}<eos>{% endif %}{% endfor %}"
)
"""A call is the sum and an `=`, a result stands right behind it, and an answer without a call ends."""


def write(source: Path, target: Path) -> None:
    """Copy the checkpoint `source` to `target`, with the template."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"chat_template": TEMPLATE}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path("runs/quickstart-start"), Path("runs/chat-start"))
