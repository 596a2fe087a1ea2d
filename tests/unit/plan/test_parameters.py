"""Parameters counted from config.json: those of transformers' models, and those that publishers print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_trm.errors import CheckpointError
from moe_trm.models.registry import FAMILIES
from moe_trm.models.tiny.families import tiny_family
from moe_trm.plan.parameters import model_of
from tests.unit.plan.published import BILLION, ENDS, MODELS, STATEMENTS, hf_config

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_those_of_transformers(name: str) -> None:
    """Every tensor of the checkpoint counts, selection biases of routers too."""
    model = tiny_family(name)
    counted = model_of({**model.config.to_dict(), "architectures": [FAMILIES[name].architecture]})
    assert counted.total() == sum(tensor.numel() for tensor in model.state_dict().values())


def test_printed_digits_are_ours_in_the_publishers_own_counting() -> None:
    """Ours rounds to them, in every statement but these. Where a publisher does not say what counts, some reading does.

    Qwen cuts 3.35 off. MiniMax rounds 228.7 to tens. DeepSeek's and Moonshot's own numbers with one more digit, and
    the total of GLM-4.5-Air, do not follow from the config.json and what the publisher says is counted.
    """
    others = {(one.model, one.number, one.printed): one.agreement for one in STATEMENTS if one.agreement != "rounded"}
    assert others == {
        ("Qwen3-30B-A3B", "active", "3.3"): "cut",
        ("GLM-4.5-Air", "total", "106"): "no",
        ("DeepSeek-V3", "active", "36.7"): "no",
        ("Kimi-K2", "total", "1.04T"): "no",
        ("Kimi-K2", "active", "32.6"): "no",
        ("MiniMax-M2", "total", "230"): "no",
    }
    assert {one.key for one in STATEMENTS} == {file.stem for file in MODELS.glob("*.json")}


def test_numbers_of_three_digits_and_more_are_within_half_a_percent() -> None:
    """A printed number of n digits is off by up to half of its last one; one or two digits can be off by more."""
    exact = [one for one in STATEMENTS if len(one.digits.as_tuple().digits) >= 3 and one.agreement == "rounded"]
    assert len(exact) == 17
    assert all(one.is_near for one in exact)


def test_numbers_that_agree_in_no_reading_are_near_another_one() -> None:
    """GLM-4.5-Air without the MTP layer that its report says it counts, and DeepSeek-V3 without the embedding."""
    air, deepseek = model_of(hf_config("glm_4_5_air")), model_of(hf_config("deepseek_v3"))
    assert air.total(ENDS) / BILLION == pytest.approx(106, rel=0.005)
    assert deepseek.active(("embedding",)) / BILLION == pytest.approx(36.7, rel=0.005)


def test_kimi_k2_is_counted_from_its_tensors() -> None:
    """Its card prints 1T and 32B. Its report prints 1.04T, which is one more layer than its config.json has."""
    model = model_of(hf_config("kimi_k2"))
    assert round(model.total() / BILLION) == 1026
    assert round(model.active(("embedding",)) / BILLION) == 32
    layer = sum(part.elements for part in model.layers[-1])
    assert round((model.total() + layer) / BILLION / 10) == 104


def test_qwen3_5_is_counted_from_its_tensors() -> None:
    """35.95 billion with the vision tower (0.447) and the MTP layer, which lie beside the text that is counted here."""
    model = model_of(hf_config("qwen3_5_35b_a3b"))
    assert (model.total() + model.prediction_total) / BILLION + 0.447 == pytest.approx(35.95, rel=0.005)
    assert model.active(ENDS) / BILLION == pytest.approx(2.44, rel=0.005)


def test_minimax_m2_is_228_69_billion_which_its_card_rounds_to_tens() -> None:
    """Its three MTP modules are not in the release."""
    model = model_of(hf_config("minimax_m2"))
    assert (model.total(), model.prediction_total) == (228_689_764_864, 0)
    assert round(model.total() / BILLION, -1) == 230


def test_kinds_add_up_and_prediction_layers_stand_apart() -> None:
    hf = hf_config("deepseek_v3")
    model = model_of(hf)
    kinds = model.by_kind
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
    assert model_of(hf).by_kind["experts"][0] == layers * experts * (3 * 2880 * 2880 + 3 * 2880)


def test_unknown_models_are_refused() -> None:
    with pytest.raises(CheckpointError, match="architecture is not supported"):
        model_of({**hf_config("qwen3_30b_a3b"), "architectures": ["MambaForCausalLM"]})
    hf = hf_config("qwen3_30b_a3b")
    del hf["moe_intermediate_size"], hf["intermediate_size"]
    with pytest.raises(CheckpointError, match=r"(?s)lacks a size.*intermediate_size"):
        model_of(hf)


def test_the_page_lists_every_statement_as_it_is_counted() -> None:
    """docs/planning.md: printed, ours, how far off, within 0.5%, digits, what counts, source."""
    rows = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [\w.-]+ \| (tot|act)", line)
    ]
    assert rows == [one.row for one in STATEMENTS]
