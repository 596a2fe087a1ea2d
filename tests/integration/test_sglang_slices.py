"""Predicted checksums of every rank, beside those that SGLang's checker computes of its own layers and loaders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from moe_trm.errors import SyncError
from moe_trm.models.tiny.families import make_family
from moe_trm.rollout.servers.backend import Digests
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.checksum import EngineChecksums, compare
from moe_trm.rollout.sglang.served_shape import shape_of, unpredicted

pytestmark = pytest.mark.long  # tests/unit/sync holds its rules

if find_spec("moe_trm_sglang_cpu") is None:
    pytest.skip("CPU support is installed on machines without CUDA only", allow_module_level=True)

HEADS = {"vocab_size": 250, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 2}
"""Fewer key heads than eight ranks, and a vocabulary that eight ranks do not share in whole multiples of 64."""
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
OPTIONS: Mapping[str, Mapping[str, int]] = {
    "qwen3_moe": HEADS,
    "glm4_moe": HEADS,
    "deepseek_v3": HEADS | {"num_key_value_heads": 16},
    "gpt_oss": HEADS,
    "minimax_m2": HEADS,
}
MORE: Mapping[str, Mapping[str, int]] = {
    "glm4_moe_lite": HEADS | {"num_key_value_heads": 16},
    "qwen3_next": HEADS | DELTA,
    "qwen3_5_moe": HEADS | DELTA,
    "mixtral": HEADS | {"hidden_size": 128},
}
TENSOR = [{"tp_size": 2}, {"tp_size": 4}, {"tp_size": 8}]
EXPERT = [{"tp_size": 2, "ep_size": 2}, {"tp_size": 8, "ep_size": 8}]
BOTH = [{"tp_size": 8, "ep_size": 2}]
DIVIDED = [
    {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True},
    {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "enable_dp_lm_head": True, "moe_dense_tp_size": 1},
]
WRONG = (5, "model.layers.1.self_attn.o_proj.weight")


class Ranks:
    """What SGLang says of the families' tiny checkpoints in these layouts, asked for once."""

    def __init__(self, folder: Path, families: Mapping[str, Mapping[str, int]], layouts: Sequence[Mapping[str, Any]]):
        cases = []
        self.checkpoints = {name: in_bfloat16(make_family(name, folder / name, **families[name])) for name in families}
        for family, checkpoint in self.checkpoints.items():
            own: dict[str, Any] = {"attention_backend": "triton" if family == "gpt_oss" else "torch_native"}
            if DELTA.items() <= families[family].items():
                own |= {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
            cases += [{"checkpoint": str(checkpoint), "dtype": "bfloat16", **own, **layout} for layout in layouts]
        asked, told = folder / "cases.json", folder / "answers.json"
        asked.write_text(json.dumps(cases))
        subprocess.run(
            [sys.executable, "-m", "tests.integration.sglang_ranks", str(asked), str(told)],
            check=True,
            env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.DEVNULL,
        )
        keys = [(family, json.dumps(layout)) for family in families for layout in layouts]
        self._answers = dict(zip(keys, json.loads(told.read_text()), strict=True))

    def answer(self, family: str, layout: Mapping[str, Any]) -> Any:
        return self._answers[family, json.dumps(layout)]

    def predicted(self, family: str, layout: Mapping[str, Any]) -> Digests:
        """From the tensors of the checkpoint, which a learner would push."""
        answer, checkpoint = self.answer(family, layout), self.checkpoints[family]
        model = ServedModel.from_checkpoint(checkpoint)
        # A real server on a CPU would add heads of zeros where ranks share one.
        assert unpredicted({**answer["server"], "device": "cuda"}, model) == ""
        tensors = load_file(checkpoint / "model.safetensors")
        shape = shape_of(answer["server"], model, "bfloat16", answer["ranks"][0]["checksums"])
        checksums = EngineChecksums(tensors, shape)
        for name, tensor in tensors.items():
            checksums.add(name, tensor)
        return checksums.result()


def in_bfloat16(checkpoint: Path) -> Path:
    """The checkpoint, whose config.json says so: tensors of gpt-oss are in that dtype in every server."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    return checkpoint


def reported(answer: Any) -> dict[int, Mapping[str, str]]:
    return {rank["parallelism_info"][0]["tp_rank"]: rank["checksums"] for rank in answer["ranks"]}


def assert_predicted(ranks: Ranks, family: str, layout: Mapping[str, Any]) -> None:
    predicted, answer = ranks.predicted(family, layout), ranks.answer(family, layout)
    assert reported(answer).keys() == {*range(layout["tp_size"])}
    for rank, checksums in reported(answer).items():
        compare(predicted[rank], checksums, f"{family} {layout} rank {rank}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    damaged = {**TENSOR[-1], "damage": WRONG}
    return Ranks(tmp_path_factory.mktemp("ranks"), OPTIONS, [*TENSOR, *EXPERT, damaged])


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("more_ranks"), MORE, [*TENSOR, *EXPERT, *BOTH])


@pytest.fixture(scope="module")
def divided_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("divided_ranks"), {**OPTIONS, **MORE}, DIVIDED)


@pytest.mark.parametrize("layout", [*TENSOR, *EXPERT], ids=str)
@pytest.mark.parametrize("family", OPTIONS)
def test_what_every_rank_holds_is_predicted(ranks: Ranks, family: str, layout: Mapping[str, Any]) -> None:
    if family == "gpt_oss" and layout in EXPERT:
        # SGLang 0.5.23 cannot load all experts of a layer, in one tensor, into ranks that hold some of them.
        assert "match the" in ranks.answer(family, layout)["error"]
    else:
        assert_predicted(ranks, family, layout)


@pytest.mark.parametrize("family", OPTIONS)
def test_one_wrong_element_of_one_rank_is_found(ranks: Ranks, family: str) -> None:
    layout = {**TENSOR[-1], "damage": WRONG}
    predicted, held = ranks.predicted(family, layout), reported(ranks.answer(family, layout))
    assert [rank for rank, checksums in held.items() if checksums != predicted[rank]] == [WRONG[0]]
    with pytest.raises(SyncError) as caught:
        compare(predicted[WRONG[0]], held[WRONG[0]], "rank 5")
    assert caught.value.got == f"1 differ: {WRONG[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*TENSOR, *EXPERT, *BOTH], ids=str)
@pytest.mark.parametrize("family", MORE)
def test_so_it_is_of_the_other_families(more_ranks: Ranks, family: str, layout: Mapping[str, Any]) -> None:
    assert_predicted(more_ranks, family, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", DIVIDED, ids=str)
@pytest.mark.parametrize("family", sorted({*OPTIONS, *MORE} - {"mixtral"}))
def test_and_of_attention_in_data_parallel_groups(divided_ranks: Ranks, family: str, layout: Mapping[str, Any]) -> None:
    assert_predicted(divided_ranks, family, layout)
