"""The built-in corrections and losses as their decorators declare them, read from `built_in.json`. Imports no torch.

`python -m docs.make.methods_page` writes the file from the code, and a test holds it to the code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("built_in.json")


def declarations(kind: str) -> dict[str, dict[str, Any]]:
    """Declarations of the `corrections` or the `losses`, by name."""
    tables: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))[kind]
    return tables
