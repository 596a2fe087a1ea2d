"""The first operation that differs: of two small decoders, one in SGLang's files and one in a learner's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch.start.bisect import BOUNDS, differences, learner_states, verdict
from launch.start.checks import Check
from moe_trm.errors import EngineError
from moe_trm.learner.protocol import Scores
from moe_trm.models.stream_names import around_norm
from moe_trm.rollout.sglang.hidden_states import read_states
from moe_trm.types import TokenBatch
from tests.unit.doubles import StandInLearner

LAYERS, WIDTH, IDS = 3, 8, torch.arange(1, 7)[None]
NAMES = [
    "embedding",
    *(
        f"layer {layer}: {part}"
        for layer in range(LAYERS)
        for part in ("input norm", "attention", "post-attention norm", "MLP")
    ),
    "final norm",
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Model(nn.Module):
    """`dumped` has its values as SGLang writes them, with norms that add to the stream first.

    Its products are exact, by powers of two of one number each: how a library orders a sum changes no bit.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.norm = nn.Embedding(10, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for part in self.layers.modules():
            if isinstance(part, nn.Linear):
                part.weight.data = torch.eye(WIDTH)[torch.randperm(WIDTH)] / 2

    def forward(self, ids: Tensor) -> dict[str, Tensor | list[Tensor]]:
        stream = self.embed_tokens(ids)
        dumped: dict[str, Tensor | list[Tensor]] = {"model.embed_tokens": stream}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            normed, name = layer.input_layernorm(stream), f"model.layers.{number}"
            dumped[f"{name}.input_layernorm"] = [normed, stream] if number else normed
            stream = stream + layer.attention(normed)
            normed = layer.post_attention_layernorm(stream)
            dumped[f"{name}.post_attention_layernorm"] = [normed, stream]
            dumped[f"{name}.mlp.experts"] = layer.mlp(normed)
            stream = stream + layer.mlp(normed)
        dumped["model.norm"] = [self.norm(stream), stream]
        return dumped


class Modules(StandInLearner):
    """Runs the model on the tokens that have a successor, and on padding after them."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return nn.ModuleDict({"model": self.model}).named_modules()

    def score(self, batches: Sequence[TokenBatch], sources: Any, **options: Any) -> list[Scores]:
        [batch] = batches
        self.model(torch.cat([batch.input_ids, torch.zeros(1, 3, dtype=torch.int64)], 1))
        return [Scores(torch.zeros(batch.mask.shape))]


def write(folder: Path, number: int, ids: Tensor, model: Model) -> None:
    own = {"model.forward_batch_info.input_ids": ids, **model(ids)}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(own, folder / f"Pass{number:05d}.pt")


@pytest.fixture(autouse=True)
def fixed() -> Iterator[None]:
    """The two passes have other numbers of rows, by which torch's own products choose their order of sums."""
    fixed_order = pytest.importorskip("moe_trm_sglang_cpu.fixed_order", reason="installed without CUDA only")
    with fixed_order.fixed_order():
        yield


def bisected(folder: Path, change: Callable[[Any], Any], bound: float = 1e-6) -> Check:
    """The verdict on a server with one change."""
    served, own = Model(), Model()
    with torch.no_grad():
        change(served)
        write(folder / "TP0", 0, IDS[0], served)
    found = learner_states(Modules(own), IDS, LAYERS)
    return verdict(differences(read_states(folder, IDS[0].tolist(), LAYERS), found), bound)


def test_the_same_model_agrees_to_the_last_bit_in_every_hidden_state(tmp_path: Path) -> None:
    check = bisected(tmp_path, lambda _: None)
    assert check.status == "ok"
    assert "to the last bit" in check.says
    found = learner_states(Modules(Model()), IDS, LAYERS)
    assert [*found] == NAMES
    assert [*read_states(tmp_path, IDS[0].tolist(), LAYERS)] == NAMES
    assert {state.shape for state in found.values()} == {(IDS.shape[1] - 1, WIDTH)}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.embed_tokens.weight.mul_(1.01), "embedding"),
        (lambda model: model.layers[1].input_layernorm.weight.mul_(1.01), "layer 1: input norm"),
        (lambda model: model.layers[0].attention.bias.add_(0.01), "layer 0: attention"),
        (lambda model: model.layers[2].post_attention_layernorm.weight.mul_(1.01), "layer 2: post-attention norm"),
        (lambda model: model.layers[2].mlp.weight.mul_(1.01), "layer 2: MLP"),
        (lambda model: model.norm.weight.mul_(1.01), "final norm"),
        (lambda model: model.layers[1].mlp.weight.fill_(float("nan")), "layer 1: MLP"),
    ],
)
def test_the_first_operation_that_differs_is_named(change: Callable[[Model], Any], name: str, tmp_path: Path) -> None:
    check = bisected(tmp_path, change)
    assert check.status == "fail"
    assert check.says.startswith(f"{name} differs first")


def test_differences_within_the_arithmetic_pass_and_the_first_bits_are_named(tmp_path: Path) -> None:
    check = bisected(tmp_path, lambda model: model.layers[1].attention.bias.add_(1e-4), BOUNDS["bfloat16"])
    assert check.status == "ok"
    assert "the first bits differ at layer 1: attention" in check.says


def test_the_pass_of_these_tokens_is_taken_and_no_other(tmp_path: Path) -> None:
    with torch.no_grad():
        write(tmp_path, 0, IDS[0], Model())
        write(tmp_path, 1, IDS[0, :2], Model())
    assert read_states(tmp_path, IDS[0].tolist(), LAYERS)["embedding"].shape == (IDS.shape[1], WIDTH)
    with pytest.raises(EngineError, match="no hidden states of this text"):
        read_states(tmp_path, [9, 9], LAYERS)


def test_a_norm_that_is_fused_with_the_next_operation_has_no_output_of_its_own() -> None:
    model = Model()
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
    found = learner_states(Modules(model), IDS, LAYERS)
    assert "embedding" in found
    assert "layer 0: input norm" not in found


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("decoder.layers.0.input_layernorm", ("embedding", "layer 0: input norm")),
        ("module.decoder.layers.12.pre_mlp_layernorm", ("layer 12: attention", "layer 12: post-attention norm")),
        ("causal.model.layers.3.input_layernorm", ("layer 2: MLP", "layer 3: input norm")),
        ("decoder.final_layernorm", ("layer 19: MLP", "final norm")),
        ("causal.model.norm", ("layer 19: MLP", "final norm")),
        ("model.layers.0.self_attn.q_norm", None),
        ("decoder.layers.0.self_attention.q_layernorm", None),
        ("model.layers.0.mlp", None),
    ],
)
def test_norms_of_the_stream_are_known_by_the_names_of_every_implementation(
    module: str, names: tuple[str, str] | None
) -> None:
    assert around_norm(module, 20) == names
