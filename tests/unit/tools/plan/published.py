"""Published sizes of real models, and how their publishers count.

Each config.json under `moe_trm/models/published` holds the published values that shapes depend on. Sources: the
defaults of transformers' configuration classes (DeepSeek-V3 and V3.2, GLM-5, gpt-oss-120b, Mixtral), slime's
`scripts/models` (Qwen3-235B-A22B, GLM-4.5, Kimi-K2, Moonlight), transformers and the keys that SGLang reads
(MiniMax-M2, Qwen3-Next), the release as others quote it (Qwen3.5), Megatron-Bridge's `docs/models/llm/olmoe.md`
(OLMoE), OpenAI's model card (gpt-oss-20b).

llama.cpp prints the sum of a file's tensors when it loads it (`model params`). Its files are made from the releases, so
that sum is a count of theirs, with as many digits as no publisher prints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Decimal
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moe_trm.models.hf_config import text_config
from moe_trm.tools.plan.parameters import Kind, Model, model_of

MODELS = Path(__file__).parents[4] / "moe_trm" / "models" / "published"
BILLION = 10**9
ENDS: tuple[Kind, ...] = ("embedding", "output")


@dataclass(frozen=True)
class Counting:
    """Weights that a publisher counts.

    Attributes:
        words: for the page.
        without: kinds that are not counted.
        prediction: the MTP layers are.
        copied_ends: so are their copies of embedding and output layer.
        said: the publisher says so; else this reading gives the printed number.
    """

    words: str
    without: tuple[Kind, ...] = ()
    prediction: bool = False
    copied_ends: bool = False
    said: bool = True


@dataclass(frozen=True)
class Statement:
    """A printed number of parameters.

    Attributes:
        model: its name.
        number: `total`, or `active` for one token.
        printed: billions, or trillions with a T. As text, because its digits say how exact it is.
        source: where it is printed.
        counting: what it counts.
    """

    model: str
    number: Literal["total", "active"]
    printed: str
    source: str
    counting: Counting

    @property
    def digits(self) -> Decimal:
        """The printed number in billions, with its digits."""
        return Decimal(self.printed.removesuffix("T")).scaleb(3 if self.printed.endswith("T") else 0)

    @property
    def counted(self) -> float:
        """Billions as we count them in the same way."""
        model, counting = counted_model(self.key), self.counting
        if self.number == "total":
            beside = counting.prediction * model.prediction_total
            beside += counting.copied_ends * (model.embedding.elements + model.output.elements)
            return (model.total(counting.without) + beside) / BILLION
        beside = counting.prediction * sum(part.active for part in model.prediction)
        return (model.active(counting.without) + beside) / BILLION

    @property
    def key(self) -> str:
        """Name of its config.json."""
        return self.model.lower().replace("-", "_").replace(".", "_")

    @property
    def is_near(self) -> bool:
        """True within 0.5%."""
        return abs(self.counted / float(self.digits) - 1) <= 0.005

    @property
    def agreement(self) -> Literal["rounded", "cut", "no"]:
        """The way in which our number gives the printed digits: rounded to them, cut off after them, or not at all."""
        found = Decimal(self.counted)
        if found.quantize(self.digits, ROUND_HALF_EVEN) == self.digits:
            return "rounded"
        return "cut" if found.quantize(self.digits, ROUND_DOWN) == self.digits else "no"

    @property
    def row(self) -> str:
        """The row of docs/planning.md."""
        off = f"{self.counted / float(self.digits) - 1:+.1%}"
        cells = (self.model, self.number, self.printed, f"{self.counted:.2f}", off, "yes" if self.is_near else "no")
        said = self.counting.words if self.counting.said else f"({self.counting.words})"
        return f"| {' | '.join((*cells, self.agreement, said, self.source))} |"


ALL = Counting("all", said=False)
NO_EMBEDDING = Counting("no embedding", ("embedding",), said=False)
UNEMBEDDING = Counting("no embedding", ("embedding",))
NO_ENDS = Counting("no ends", ENDS)
GLM = Counting("no ends, with MTP", ENDS, prediction=True)
COPIED = Counting("all, with MTP and its ends", prediction=True, copied_ends=True, said=False)
QWEN, QWEN_LARGE = "card of Qwen3-30B-A3B-Instruct-2507", "card of Qwen3-235B-A22B-FP8"
GLM_REPORT, OPENAI = "arXiv 2508.06471, table 1", "arXiv 2508.10925, table 1"
LLAMA = "llama.cpp, tensors of its file"
WEIGHTS, K2 = "its README_WEIGHTS.md", "arXiv 2507.20534, table 2"

STATEMENTS = (
    Statement("Qwen3-30B-A3B", "total", "30.5", QWEN, ALL),
    Statement("Qwen3-30B-A3B", "total", "29.9", QWEN, NO_ENDS),
    Statement("Qwen3-30B-A3B", "active", "3.3", QWEN, ALL),
    Statement("Qwen3-235B-A22B", "total", "235", QWEN_LARGE, ALL),
    Statement("Qwen3-235B-A22B", "total", "234", QWEN_LARGE, NO_ENDS),
    Statement("Qwen3-235B-A22B", "active", "22", QWEN_LARGE, ALL),
    Statement("GLM-4.5", "total", "355", GLM_REPORT, GLM),
    Statement("GLM-4.5", "active", "32", GLM_REPORT, GLM),
    Statement("GLM-4.5-Air", "total", "106", GLM_REPORT, GLM),
    Statement("GLM-4.5-Air", "active", "12", GLM_REPORT, GLM),
    Statement("GLM-4.7-Flash", "total", "30", "its card", Counting(GLM.words, ENDS, prediction=True, said=False)),
    Statement("GLM-4.7-Flash", "active", "3", "its card", Counting(GLM.words, ENDS, prediction=True, said=False)),
    Statement("DeepSeek-V3", "total", "671", WEIGHTS, Counting("all but MTP")),
    Statement("DeepSeek-V3", "active", "37", "arXiv 2412.19437", NO_EMBEDDING),
    Statement("DeepSeek-V3", "active", "36.6", WEIGHTS, UNEMBEDDING),
    Statement("DeepSeek-V3.2", "total", "685", "its page on Hugging Face", COPIED),
    Statement("Moonlight-16B-A3B", "total", "15.29", "arXiv 2502.16982", NO_ENDS),
    Statement("Moonlight-16B-A3B", "active", "2.24", "arXiv 2502.16982", NO_ENDS),
    Statement("gpt-oss-20b", "total", "20.91", OPENAI, Counting("all")),
    Statement("gpt-oss-20b", "active", "3.61", OPENAI, UNEMBEDDING),
    Statement("gpt-oss-120b", "total", "116.83", OPENAI, Counting("all")),
    Statement("gpt-oss-120b", "active", "5.13", OPENAI, UNEMBEDDING),
    Statement("OLMoE-1B-7B", "total", "6.9", "arXiv 2409.02060", ALL),
    Statement("OLMoE-1B-7B", "active", "1.3", "arXiv 2409.02060", ALL),
    Statement("Mixtral-8x7B", "total", "46.7", "mistral.ai, 2023-12-11", ALL),
    Statement("Mixtral-8x7B", "active", "12.9", "mistral.ai, 2023-12-11", ALL),
    Statement("Kimi-K2", "total", "1T", "its card", ALL),
    Statement("Kimi-K2", "active", "32", "its card", NO_EMBEDDING),
    Statement("Kimi-K2", "total", "1.04T", K2, ALL),
    Statement("Kimi-K2", "active", "32.6", K2, NO_EMBEDDING),
    Statement("Qwen3-Next-80B-A3B", "total", "80", "its card", Counting("all")),
    Statement("Qwen3-Next-80B-A3B", "total", "79", "its card", Counting("no ends", ENDS)),
    Statement("Qwen3-Next-80B-A3B", "active", "3", "its card", NO_ENDS),
    Statement("Qwen3-Next-80B-A3B", "total", "79.67", LLAMA, Counting("all but MTP")),
    Statement("Qwen3.5-35B-A3B", "total", "35", "its card", Counting("text", said=False)),
    Statement("Qwen3.5-35B-A3B", "active", "3", "its card", Counting("text", said=False)),
    Statement("Qwen3.5-35B-A3B", "total", "34.66", LLAMA, Counting("text, no MTP")),
    Statement("GLM-5", "total", "744", "arXiv 2602.15763", ALL),
    Statement("GLM-5", "active", "40", "arXiv 2602.15763", NO_ENDS),
    Statement("GLM-5", "total", "753.86", LLAMA, Counting("all, with MTP", prediction=True)),
    Statement("MiniMax-M2", "total", "230", "its card", ALL),
    Statement("MiniMax-M2", "active", "10", "its card", NO_EMBEDDING),
    Statement("MiniMax-M2", "total", "228.69", LLAMA, Counting("all")),
)
"""Every printed number that was found, the most exact ones last where a model has several."""


def hf_config(name: str) -> dict[str, Any]:
    return text_config(json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8")))


@cache
def counted_model(name: str) -> Model:
    return model_of(hf_config(name))
