"""Reading checkpoints lazily, and every way they can be incomplete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint


def write(folder: Path, files: dict[str, list[str]]) -> None:
    for file, names in files.items():
        save_file({name: torch.full((2,), float(len(name))) for name in names}, folder / file)
    if list(files) != ["model.safetensors"]:
        weight_map = {name: file for file, names in files.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "files", [{"model.safetensors": ["a", "bc"]}, {"one.safetensors": ["a"], "two.safetensors": ["bc"]}]
)
def test_tensors_are_found_in_one_file_or_in_shards(tmp_path: Path, files: dict[str, list[str]]) -> None:
    write(tmp_path, files)
    checkpoint = HfCheckpoint(tmp_path)
    assert checkpoint.names == {"a", "bc"}
    assert checkpoint.read("bc").tolist() == [2.0, 2.0]


def test_missing_tensor_names_it(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": ["a"]})
    with pytest.raises(CheckpointError, match=r"tensor missing.*\n.*\n.*expected: b"):
        HfCheckpoint(tmp_path).read("b")


def test_missing_shard_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b"]})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no two\.safetensors"):
        HfCheckpoint(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        HfCheckpoint(tmp_path)


def test_shard_cut_short_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": ["a"]})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="damaged"):
        HfCheckpoint(tmp_path)


def test_only_the_shard_that_is_asked_is_opened(tmp_path: Path) -> None:
    write(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b"]})
    checkpoint = HfCheckpoint(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(b"rubbish")
    assert checkpoint.read("a").tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read("b")
