"""config.json of published models, from `tests/data/models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "data" / "models"
NAMES = tuple(sorted(path.stem for path in MODELS.glob("*.json")))


def published_config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return data
