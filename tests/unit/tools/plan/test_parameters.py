"""Parameters counted from config.json: those of transformers' models, and those that publishers print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_trm.errors import CheckpointError
from moe_trm.models.registry import FAMILIES
from moe_trm.models.tiny.families import tiny_family
from moe_trm.tools.plan.parameters import model_of
from tests.unit.tools.plan.published import BILLION, ENDS, MODELS, STATEMENTS, hf_config

PAGE = Path(__file__).parents[4] / "docs" / "planning.md"


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_those_of_transformers(name: str) -> None:
    """Every tensor of the checkpoint counts, selection biases of routers too."""
    model = tiny_family(name)
    counted = model_of({**model.config.to_dict(), "architectures": [FAMILIES[name].architecture]})
    assert counted.total() == sum(tensor.numel() for tensor in model.state_dict().values())


def test_printed_digits_are_ours_in_the_publishers_own_counting() -> None:
    """Ours rounds to them, in every statement but these. Where a publisher does not say what counts, some reading does.

    Qwen cuts 3.35 off. MiniMax rounds 228.7 to tens. Moonshot's own numbers with one more digit, and the total of
    GLM-4.5-Air, do not follow from the config.json and what the publisher says is counted.
    """
    others = {(one.model, one.number, one.printed): one.agreement for one in STATEMENTS if one.agreement != "rounded"}
    assert others == {
        ("Qwen3-30B-A3B", "active", "3.3"): "cut",
        ("GLM-4.5-Air", "total", "106"): "no",
        ("Kimi-K2", "total", "1.04T"): "no",
        ("Kimi-K2", "active", "32.6"): "no",
        ("MiniMax-M2", "total", "230"): "no",
    }
    assert {one.key for one in STATEMENTS} == {file.stem for file in MODELS.glob("*.json")}


def test_numbers_of_three_digits_and_more_are_within_half_a_percent() -> None:
    """A printed number of n digits is off by up to half of its last one; one or two digits can be off by more."""
    exact = [one for one in STATEMENTS if len(one.digits.as_tuple().digits) >= 3 and one.agreement == "rounded"]
    assert len(exact) == 21
    assert all(one.is_near for one in exact)


def test_a_number_that_agrees_in_no_reading_is_near_another_one() -> None:
    """GLM-4.5-Air without the MTP layer that its report says it counts."""
    assert model_of(hf_config("glm_4_5_air")).total(ENDS) / BILLION == pytest.approx(106, rel=0.005)


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


def test_releases_have_the_bytes_that_are_counted() -> None:
    """To the byte, where the sum of all tensors of a release was printed.

    Sources: hf-mem's README for MiniMax-M2; the index of the text of Qwen3.6-35B-A3B, which has the sizes of Qwen3.5;
    the index of GLM-5.2 in miles, a GLM-5 where three of four layers have no indexer.

    MiniMax-M2 has attention and experts in FP8 with float32 scales, and float32 routers; its MTP modules are not in the
    release. Biases of routers are float32 in GLM-5.2, and its MTP layer has an indexer.
    """
    assert 2 * model_of(hf_config("qwen3_5_35b_a3b")).total() == 69_321_221_376

    kinds = {kind: total for kind, (total, _) in model_of(hf_config("minimax_m2")).by_kind.items()}
    in_fp8 = kinds["attention"] + kinds["experts"]
    others = 2 * (kinds["embedding"] + kinds["output"] + kinds["norms"]) + 4 * kinds["router"]
    assert in_fp8 + 4 * in_fp8 // 128**2 + others == 230_121_630_720

    hf = {**hf_config("glm_5"), "index_topk_freq": 4, "index_skip_topk_offset": 3}
    model, indexer = model_of(hf), 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    bias = 256 * (75 + 1)
    assert 2 * (model.total() + model.prediction_total + indexer + bias) == 1_506_659_919_872


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
