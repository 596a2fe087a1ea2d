"""Published sizes of real models, and how their publishers count.

Each config.json under `tests/data/models` holds the published values that shapes depend on. Sources: the defaults of
transformers' configuration classes (DeepSeek-V3, gpt-oss-120b, Mixtral), slime's `scripts/models` (Qwen3-235B-A22B,
GLM-4.5, Kimi-K2, Moonlight), Megatron-Bridge's `docs/models/llm/olmoe.md` (OLMoE), OpenAI's model card (gpt-oss-20b).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trm.plan.parameters import Kind

MODELS = Path(__file__).parents[2] / "data" / "models"
ENDS: tuple[Kind, ...] = ("embedding", "output")


@dataclass(frozen=True)
class Published:
    """Billions as they were printed, and what they leave out.

    Attributes:
        total, active: as text, because their digits say how exact they are.
        without, active_without: kinds that the publisher does not count.
        with_prediction: both include the MTP layers.
        source: where the numbers are from.
    """

    total: str
    active: str
    source: str
    without: tuple[Kind, ...] = ()
    active_without: tuple[Kind, ...] = ()
    with_prediction: bool = False


PUBLISHED = {
    "qwen3_30b_a3b": Published("30.5", "3.3", "model card of Qwen/Qwen3-30B-A3B"),
    "qwen3_235b_a22b": Published("235", "22", "model card of Qwen/Qwen3-235B-A22B"),
    # The card of GLM-4.5 counts its MTP layer, that of GLM-4.5-Air does not: no other reading gives both totals.
    "glm_4_5": Published("355", "32", "arXiv 2508.06471", ENDS, ENDS, with_prediction=True),
    "glm_4_5_air": Published("106", "12", "arXiv 2508.06471", ENDS, ENDS),
    "deepseek_v3": Published("671", "37", "arXiv 2412.19437", active_without=("embedding",)),
    "moonlight_16b_a3b": Published("15.29", "2.24", "arXiv 2502.16982", ENDS, ENDS),
    "glm_4_7_flash": Published("30", "3", "model card of zai-org/GLM-4.7-Flash", active_without=ENDS),
    "gpt_oss_20b": Published("20.91", "3.61", "arXiv 2508.10925, table 1", active_without=("embedding",)),
    "gpt_oss_120b": Published("116.83", "5.13", "arXiv 2508.10925, table 1", active_without=("embedding",)),
    "olmoe_1b_7b": Published("6.9", "1.3", "arXiv 2409.02060"),
    "mixtral_8x7b": Published("46.7", "12.9", "Mistral AI, Mixtral of experts, 2023-12-11"),
}


def hf_config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return data
