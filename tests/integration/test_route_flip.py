"""`benchmarks.route_flip` on tiny random weights: equal engines agree, and replay undoes the effect of routing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engines.scored import Setting
from benchmarks.route_flip import measure, table
from moe_trm.models.tiny.families import make_family


def test_replay_undoes_what_rounding_did_to_the_routes_of_olmoe(tmp_path: Path) -> None:
    folder = make_family("olmoe", tmp_path / "olmoe")
    a, b = Setting("hf", folder, "bfloat16", together=8), Setting("hf", folder, "float32", together=5)
    found = measure(a, b, prompts=6, group_size=2, max_new_tokens=24)
    assert found.num_tokens > 100
    assert 0 < found.pooled["layer_flip_rate"].value < 0.5
    assert found.pooled["all/replayed_k3"].value < 0.2 * found.pooled["all/native_k3"].value
    assert (
        found.pooled["layer_flip_rate"].low
        <= found.pooled["layer_flip_rate"].value
        <= found.pooled["layer_flip_rate"].high
    )
    assert found.local_flips is not None
    assert found.gate_weight_shift is not None
    assert 0 < found.local_flips < 0.5
    assert 0 < found.gate_weight_shift < 0.1
    margins = [one.rate.value for one in found.strata["router margin"].values() if one.token_layers > 50]
    assert margins[0] > margins[-1]
    assert table(found)

    alike = measure(b, Setting("hf", folder, "float32", together=3), prompts=2, group_size=2, max_new_tokens=8)
    assert alike.pooled["layer_flip_rate"].value == 0.0
    assert alike.pooled["all/native_k3"].value < 1e-10


@pytest.mark.slow
def test_sglang_and_megatron_agree_in_float32_and_other_weights_show_as_staleness(
    tiny_moe: Path, other_moe: Path
) -> None:
    a = Setting("sglang", tiny_moe, "float32", together=8)
    b = Setting("megatron", tiny_moe, "float32", together=4, layout=("expert=2",))
    found = measure(a, b, prompts=4, group_size=2, max_new_tokens=16)
    assert found.pooled["layer_flip_rate"].value == 0.0
    assert found.pooled["all/native_k3"].value < 1e-9
    assert found.local_flips == 0.0
    aged = measure(a, Setting("sglang", other_moe, "float32", together=8), prompts=4, group_size=2, max_new_tokens=16)
    assert aged.pooled["layer_flip_rate"].value > 0.5
    assert "all/replayed_k3" not in aged.pooled


def test_any_prompts(tmp_path: Path) -> None:
    folder = make_family("mixtral", tmp_path / "mixtral")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "Say something.", "answer": "-"}\n{"prompt": "And more.", "answer": "-"}\n')
    setting = Setting("hf", folder, "float32", together=4)
    found = measure(setting, setting, prompts=2, group_size=2, max_new_tokens=6, questions=questions)
    assert found.pooled["layer_flip_rate"].value == 0.0
    assert found.local_flips == 0.0
