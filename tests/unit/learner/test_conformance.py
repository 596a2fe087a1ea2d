"""The proof of a family at every start: a family passes by what it computes, or fails at a step with its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm.errors import CheckpointError
from moe_trm.learner.deepspeed.conformance import Conformance, _tiny, check_conformance, examine
from moe_trm.learner.deepspeed.weights import checkpoint_form
from moe_trm.models.hf_config import moe_layers
from moe_trm.models.tiny.shrunk import shrunk
from routing.hosts.hf_gates import GateContract

transformers = pytest.importorskip("transformers")


def published(family: str, **options: Any) -> dict[str, Any]:
    """config.json with the sizes of transformers' defaults."""
    return dict(transformers.AutoConfig.for_model(family, **options).to_dict())


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoe", "olmoe"])
def test_a_family_passes_whatever_its_name(family: str) -> None:
    before = torch.get_rng_state()
    assert examine(published(family)) == Conformance()
    assert torch.equal(torch.get_rng_state(), before)


def test_nemotron_3_passes_as_its_release_describes_it() -> None:
    """Mamba-2 layers, attention and mixtures by the letters of `hybrid_override_pattern`; names of the release."""
    hf = {
        key: value for key, value in published("nemotron_h").items() if key not in ("layers_block_type", "layer_types")
    }
    hf |= {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "MEM*EME"}
    assert moe_layers(hf) == (1, 4, 6)
    assert moe_layers({**hf, "hybrid_override_pattern": None, "layers_block_type": ["moe", "mlp"]}) == (0,)
    assert examine(hf) == Conformance()
    causal = _tiny(hf)
    names = {name for key, value in causal.state_dict().items() for name in checkpoint_form(causal, key, value)}
    assert {name.partition(".")[0] for name in names} == {"backbone", "lm_head"}
    assert "backbone.layers.1.mixer.experts.3.up_proj.weight" in names


def untouched(contract: GateContract, output: Any, _weights: Tensor, _ids: Tensor) -> Any:
    return output


def without_gradient(contract: GateContract, output: Any, weights: Tensor, ids: Tensor) -> Any:
    replaced = {contract.weights: weights.detach(), contract.ids: ids}
    return tuple(replaced.get(place, value) for place, value in enumerate(output))


def half(contract: GateContract, output: Any, weights: Tensor, ids: Tensor) -> Any:
    replaced = {contract.weights: weights * 0.999, contract.ids: ids}
    return tuple(replaced.get(place, value) for place, value in enumerate(output))


@pytest.mark.parametrize(
    ("write", "step", "problem"),
    [
        (untouched, "forced", "the dispatcher used exactly them for"),
        (without_gradient, "forced", "the router got none"),
        (half, "native", "log-probs differ"),
    ],
)
def test_the_step_that_fails_is_named(
    write: Callable[..., Any], step: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GateContract, "write", write)
    finding = examine(published("qwen2_moe"))
    assert finding.step == step
    assert problem in finding.problem


def test_a_start_refuses_a_family_that_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    phimoe = published("phimoe") | {"architectures": ["PhimoeForCausalLM"]}
    with pytest.raises(
        CheckpointError, match=r"(?s)not exact for this family.*PhimoeForCausalLM, step attach: .*layer 0"
    ):
        check_conformance(phimoe, "config.json")
    with pytest.raises(CheckpointError, match="step build: KeyError"):
        check_conformance({"num_experts": 8}, "config.json")
    check_conformance(published("qwen2_moe"), "config.json")
    # A dense model, and a family that tests prove.
    monkeypatch.setattr("moe_trm.learner.deepspeed.conformance.examine", lambda _: pytest.fail("examined"))
    check_conformance({"architectures": ["LlamaForCausalLM"]}, "config.json")
    check_conformance({"architectures": ["OlmoeForCausalLM"], "num_experts": 64}, "config.json")


def test_kinds_of_layers_stay() -> None:
    kinds = ["linear"] * 3 + ["full"] + ["linear"] * 3 + ["full"]
    small = shrunk({"num_hidden_layers": 8, "layer_types": kinds, "num_experts": 64, "num_experts_per_tok": 1})
    assert small["layer_types"] == ["linear", "linear", "linear", "full"]
    assert (small["num_hidden_layers"], small["num_experts"], small["num_experts_per_tok"]) == (4, 8, 1)
