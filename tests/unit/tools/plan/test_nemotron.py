"""Nemotron-H in the plan: layers of one part each are counted and sized as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_trm.cli import main
from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import CheckpointError
from moe_trm.tools.plan.memory import activations
from moe_trm.tools.plan.parameters import model_of
from tests.unit.tools.plan.releases import NEMOTRON_3_NANO

NANO = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", **NEMOTRON_3_NANO}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
FOUR = {"hybrid_override_pattern": "M-E*", "num_hidden_layers": 4}


@pytest.mark.parametrize(
    "changes", [{}, FOUR, {**FOUR, "moe_latent_size": 64}, {**FOUR, "use_conv_bias": False, "n_groups": 2}]
)
def test_counts_are_those_of_transformers(changes: dict[str, Any]) -> None:
    hf = {**NANO, **changes}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    assert model_of(hf).total() == sum(tensor.numel() for tensor in model.state_dict().values())


def test_nano_has_the_numbers_of_its_report() -> None:
    """31.6 B in all, 3.6 B for a token, 3.2 B without the embedding."""
    model = model_of(NANO)
    counts = (model.total(), model.active(), model.active(("embedding",)))
    assert [round(count / 1e9, 1) for count in counts] == [31.6, 3.6, 3.2]
    assert model.caching == 6


def test_kinds_of_layers_have_both_spellings() -> None:
    """Letters in the release, words in what transformers writes."""
    spelt = {**NANO, "layers_block_type": [LETTERS[letter] for letter in NANO["hybrid_override_pattern"]]}
    del spelt["hybrid_override_pattern"]
    assert model_of(spelt) == model_of(NANO)


def test_a_pattern_that_is_too_short_is_named() -> None:
    with pytest.raises(CheckpointError, match="hybrid_override_pattern"):
        model_of({**NANO, "hybrid_override_pattern": "MEM"})


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_those_of_each_kind_of_layer(recompute: str) -> None:
    """A layer keeps no part that it does not have, and `selective` leaves out what is inside of MLP and experts."""
    hf, learner = (
        {**NANO, **FOUR},
        LearnerConfig.model_validate({"backend": "deepspeed", "dtype": "bfloat16", "recompute": recompute}),
    )
    mamba, dense, experts, attention = (activations(hf, learner, [layer], 1.0, 1) for layer in range(4))
    entry, norm = 2 * 2688, 2 * 2688 + 4
    if recompute == "full":
        assert mamba == dense == experts == attention == entry
        return
    assert mamba == pytest.approx(norm + entry + 2 * (4096 * 4 + 2 * 8 * 128 + 64) + 4 * 8 + 4 * 4096)
    if recompute == "selective":
        assert dense == experts == norm + entry < attention
    else:
        assert min(mamba, dense, experts, attention) > norm + entry


@pytest.mark.long
def test_a_plan_is_made_and_says_what_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    command = ["plan", "--hf-config", str(tmp_path / "config.json"), "--nodes", "2"]
    assert main([*command, "learner.backend=deepspeed"]) == 0
    printed = capsys.readouterr().out
    assert "mamba-ssm" in printed
    assert "a step" in printed
    assert main(command) == 2
    assert "or learner.backend=deepspeed" in capsys.readouterr().err


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(CheckpointError, match="ssm_state_size"):
        model_of({key: value for key, value in NANO.items() if key != "ssm_state_size"})
