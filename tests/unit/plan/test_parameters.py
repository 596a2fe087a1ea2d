"""Parameters counted from config.json: those of transformers' models, and those that publishers print."""

from __future__ import annotations

import re
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Decimal
from pathlib import Path

import pytest

from moe_trm.errors import CheckpointError
from moe_trm.models.registry import FAMILIES
from moe_trm.models.tiny.families import tiny_family
from moe_trm.plan.parameters import model_of
from tests.unit.plan.published import PUBLISHED, Published, hf_config

BILLION = 10**9
PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_those_of_transformers(name: str) -> None:
    """Every tensor of the checkpoint counts, selection biases of routers too."""
    model = tiny_family(name)
    counted = model_of({**model.config.to_dict(), "architectures": [FAMILIES[name].architecture]})
    assert counted.total() == sum(tensor.numel() for tensor in model.state_dict().values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name: str) -> None:
    """Within 0.5%."""
    published, model = PUBLISHED[name], model_of(hf_config(name))
    prediction = model.prediction_total if published.with_prediction else 0
    total = (model.total(published.without) + prediction) / BILLION
    assert total == pytest.approx(float(published.total), rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    """Within 0.5%, or the printed digits: 22 may stand for 22.19, and Qwen prints 3.35 as 3.3."""
    published, model = PUBLISHED[name], model_of(hf_config(name))
    prediction = model.prediction_active if published.with_prediction else 0
    active = (model.active(published.active_without) + prediction) / BILLION
    assert float(published.active) == pytest.approx(active, rel=0.005) or printed(active, published), active


def printed(active: float, published: Published) -> bool:
    digits = Decimal(published.active)
    return digits in {Decimal(active).quantize(digits, way) for way in (ROUND_DOWN, ROUND_HALF_EVEN)}


def test_kimi_k2_is_counted_from_its_tensors() -> None:
    """Its card prints 1T and 32B. Its report prints 1.04T, which is one more layer than its config.json has."""
    model = model_of(hf_config("kimi_k2"))
    assert round(model.total() / BILLION) == 1026
    assert round(model.active(("embedding",)) / BILLION) == 32
    layer = sum(part.elements for part in model.layers[-1])
    assert round((model.total() + layer) / BILLION / 10) == 104


def test_kinds_add_up_and_prediction_layers_stand_apart() -> None:
    hf = hf_config("deepseek_v3")
    model = model_of(hf)
    kinds = model.by_kind()
    assert sum(total for total, _ in kinds.values()) == model.total()
    assert kinds["experts"][0] == 58 * 256 * 3 * 7168 * 2048
    assert kinds["experts"][1] * 256 == kinds["experts"][0] * 8
    assert kinds["dense"] == (3 * 3 * 7168 * 18432,) * 2
    without = model_of({**hf, "num_nextn_predict_layers": 0})
    assert without.total() == model.total()
    assert model.prediction_total == sum(part.elements for part in model.layers[-1]) + 2 * 7168**2 + 3 * 7168
    assert without.prediction_total == 0


def test_a_tied_output_layer_is_counted_once() -> None:
    hf = hf_config("qwen3_30b_a3b")
    assert model_of({**hf, "tie_word_embeddings": True}).total() == model_of(hf).total(("output",))


def test_gpt_oss_has_biases_and_sinks() -> None:
    hf = hf_config("gpt_oss_20b")
    layer, layers, experts = model_of(hf).layers[0], 24, 32
    attention = sum(part.elements for part in layer if part.kind == "attention")
    assert attention == 2880 * (4096 + 512 + 512) + 4096 * 2880 + (4096 + 512 + 512) + 2880 + 64
    assert model_of(hf).by_kind()["experts"][0] == layers * experts * (3 * 2880 * 2880 + 3 * 2880)


def test_unknown_models_are_refused() -> None:
    with pytest.raises(CheckpointError, match="architecture is not supported"):
        model_of({**hf_config("qwen3_30b_a3b"), "architectures": ["MambaForCausalLM"]})
    hf = hf_config("qwen3_30b_a3b")
    del hf["moe_intermediate_size"], hf["intermediate_size"]
    with pytest.raises(CheckpointError, match=r"(?s)lacks a size.*intermediate_size"):
        model_of(hf)


def test_the_page_lists_all_twelve_as_they_are_counted() -> None:
    """docs/planning.md: published, counted, and how far off, of total and active parameters."""
    rows = dict(
        re.findall(r"^\| ([\w.-]+) \| ([\d., ]+\|[\d., ]+\|[^|]+)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert len(rows) == len(PUBLISHED) + 1
    for name, cells in rows.items():
        key = name.lower().replace("-", "_").replace(".", "_")
        published = PUBLISHED.get(key, Published("1040", "32", "", active_without=("embedding",)))
        model = model_of(hf_config(key))
        more = (model.prediction_total, model.prediction_active) if published.with_prediction else (0, 0)
        total = (model.total(published.without) + more[0]) / BILLION
        active = (model.active(published.active_without) + more[1]) / BILLION
        pairs = ((float(published.total), total), (float(published.active), active))
        assert [cell.strip() for cell in cells.split("|")] == [
            f"{published.total}, {published.active}",
            ", ".join(f"{found:.2f}" for _, found in pairs),
            ", ".join(f"{found / printed - 1:+.1%}" for printed, found in pairs),
        ]
