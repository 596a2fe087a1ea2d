"""Saved pieces of every model family become the tensors of its Hugging Face checkpoint again, without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_trm.errors import CheckpointError
from moe_trm.learner.checkpoint.folder import STATE_FILE, CheckpointFolder, entry_of, rank_file
from moe_trm.learner.checkpoint.pieces import Piece, Place, write_pieces
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.megatron.convert import heads, is_gated, pack
from moe_trm.models.hf_config import num_experts, read_hf_config
from moe_trm.models.registry import MOE_FAMILIES, family_of
from moe_trm.models.tensors import parameters
from moe_trm.models.tiny.families import make_family
from moe_trm.tools.export.checkpoint import export_checkpoint

CONSTANT = "router.expert_bias"


def megatron_parameters(start: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors that Megatron trains, as `learner.megatron.state` saves them."""
    hf, source = read_hf_config(start), HfCheckpoint(start)
    for name, link in parameters(family_of(hf, "config.json"), hf):
        if name.endswith(CONSTANT):
            continue
        tensors = [
            source.read(hf_name) if link.row is None else source.read_row(hf_name, link.row, num_experts(hf))
            for hf_name in link.hf_names
        ]
        packed = pack(link.packing, tensors, heads(hf))
        yield name, packed.unflatten(0, (2, -1)) if is_gated(name) else packed


def deepspeed_parameters(start: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors that DeepSpeed trains: the parameters of transformers' model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def save(root: Path, start: Path, backend: str, tensors: Iterator[tuple[str, Tensor]], **learner: Any) -> Path:
    """A checkpoint of two ranks that hold two ranges of every tensor, moved away from the start by a doubling."""
    pieces: tuple[list[Piece], list[Piece]] = [], []
    for name, tensor in tensors:
        flat, shape = (2 * tensor).flatten(), tuple(tensor.shape)
        middle = flat.numel() // 3
        for rank, part in enumerate((flat[:middle], flat[middle:])):
            place = Place(f"weight/{name}", shape, (0,) * len(shape), shape, middle if rank else 0)
            pieces[rank].append(Piece(place, part.clone()))
    folder = CheckpointFolder(root)
    partial = folder.partial(7)
    for rank, of_rank in enumerate(pieces):
        write_pieces(partial / rank_file(rank), of_rank)
    (partial / STATE_FILE).write_bytes(b"")
    files = {name: entry_of(partial / name) for name in (rank_file(0), rank_file(1), STATE_FILE)}
    settings = {"model": {"checkpoint": str(start)}, "learner": {"backend": backend, "dtype": "float32", **learner}}
    return folder.commit(7, files, settings)


@pytest.mark.parametrize("name", MOE_FAMILIES)
def test_megatron_pieces_of_every_family(tmp_path: Path, name: str) -> None:
    start = make_family(name, tmp_path / "start")
    checkpoint = save(tmp_path, start, "megatron", megatron_parameters(start), dtype="bfloat16")
    exported = HfCheckpoint(export_checkpoint(checkpoint, tmp_path / "out", shard_bytes=1 << 16))
    source = HfCheckpoint(start)
    assert exported.names == source.names
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    for tensor in exported.names:
        expected = source.read(tensor)
        if tensor.endswith("e_score_correction_bias"):
            assert torch.equal(exported.read(tensor), expected), tensor
        else:
            assert torch.equal(exported.read(tensor), (2 * expected).bfloat16()), tensor


@pytest.mark.parametrize("name", ["gpt_oss", "glm4_moe"])
def test_deepspeed_pieces_in_the_form_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    """transformers fuses experts, or keeps a selection bias that nothing trains."""
    start = make_family(name, tmp_path / "start")
    checkpoint = save(tmp_path, start, "deepspeed", deepspeed_parameters(start))
    exported, source = HfCheckpoint(export_checkpoint(checkpoint, tmp_path / "out")), HfCheckpoint(start)
    assert exported.names == source.names
    for tensor in exported.names:
        factor = 1 if tensor.endswith("e_score_correction_bias") else 2
        assert torch.equal(exported.read(tensor), factor * source.read(tensor)), tensor


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    start = make_family("qwen3_moe", tmp_path / "start", tie_word_embeddings=True)
    tensors = dict(megatron_parameters(start))
    # The last pipeline stage has the embedding a second time.
    tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"]
    checkpoint = save(tmp_path, start, "megatron", iter(tensors.items()))
    export_checkpoint(checkpoint, tmp_path / "out")
    found = [name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)]
    assert "lm_head.weight" not in found
    assert found.count("model.embed_tokens.weight") == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_a_router_that_was_not_saved_comes_from_the_start_only_where_it_was_frozen(
    tmp_path: Path, *, frozen: bool
) -> None:
    start = make_family("olmoe", tmp_path / "start")
    trained = ((name, tensor) for name, tensor in megatron_parameters(start) if "router" not in name)
    checkpoint = save(tmp_path, start, "megatron", trained, freeze_router=frozen)
    if frozen:
        exported = HfCheckpoint(export_checkpoint(checkpoint, tmp_path / "out"))
        router = "model.layers.0.mlp.gate.weight"
        assert torch.equal(exported.read(router), HfCheckpoint(start).read(router))
        return
    with pytest.raises(CheckpointError, match="a trained tensor is missing"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
