"""config.json of published models, from `moe_trm/models/published`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[1] / "moe_trm" / "models" / "published"
NAMES = tuple(sorted(path.stem for path in MODELS.glob("*.json")))


def published_config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return data
