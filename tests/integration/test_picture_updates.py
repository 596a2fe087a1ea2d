"""Updates of a DeepSpeed learner on rows with pictures: replay with proof, a frozen and a trained vision tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.learner_support.ranks import run_ranks
from tests.integration.picture_model import LAYERS, make_picture_model

SCRIPT = Path(__file__).with_name("picture_rank.py")
FIRST_ROWS_TOKENS = 2 * 3 + 1 + 4
"""Image tokens of the pictures of the first rank."""


def facts_of(folder: Path, checkpoint: Path, tower: str, ranks: int) -> list[dict[str, Any]]:
    run_ranks(folder, checkpoint, ranks, tower, script=SCRIPT)
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.mark.long
@pytest.mark.parametrize(("tower", "ranks"), [("frozen", 2), ("trained", 1)])
def test_an_update_replays_image_tokens_and_exports_the_whole_release(
    tower: str, ranks: int, checkpoint: Path, tmp_path: Path
) -> None:
    facts = facts_of(tmp_path, checkpoint, tower, ranks)
    assert [fact["image_tokens"] for fact in facts] == [FIRST_ROWS_TOKENS, 0][:ranks]
    for fact in facts:
        assert fact["same"]
        assert fact["matched"] == fact["replayed"]
        assert fact["flips"] == 0
        assert fact["applied"]
        assert fact.get("text", True)
        assert any(".visual." in name for name in fact["changed"]) == (tower == "trained")
        assert all(any(part in name for name in fact["changed"]) for part in (".gate.", ".experts.", "lm_head"))
    forwarded = sum(fact["forwarded"] for fact in facts)
    assert facts[0]["matched"] == forwarded * LAYERS
    assert len({fact["grad_norm"] for fact in facts}) == 1
    first, last = (load_file(tmp_path / f"weights-{rank}.safetensors") for rank in (0, ranks - 1))
    assert_same(first, last)
    exported: dict[str, Tensor] = {}
    for file in (tmp_path / "export").glob("*.safetensors"):
        exported |= load_file(file)
    published = load_file(checkpoint / "model.safetensors")
    pushed = {name for fact in facts for name in fact["pushed"]}
    assert exported.keys() == published.keys()
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in published.items()}
    vision = {name for name in published if ".visual." in name}
    assert pushed == published.keys() - (vision if tower == "frozen" else set())
    same = {name for name in vision if torch.equal(exported[name], published[name])}
    assert same == vision if tower == "frozen" else vision - same
    from transformers import Qwen3VLMoeForConditionalGeneration

    again = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert_same(dict(again.named_parameters()), first)


def assert_same(made: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert made.keys() == expected.keys()
    assert [name for name, tensor in made.items() if not torch.equal(tensor, expected[name])] == []
