"""A tensor-parallel rank's share of a parameter: saved by one layout, read by another, the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trm.learner.checkpoint.pieces import PieceReader, write_pieces

state = pytest.importorskip("moe_trm.learner.megatron.state")
convert = pytest.importorskip("moe_trm.learner.megatron.convert")

VOCAB, HIDDEN, WIDTH = 7, 4, 6
HF = {"vocab_size": VOCAB}
WHOLE = {
    "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
    "output_layer.weight": (VOCAB, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "decoder.layers.3.self_attention.linear_qkv.weight": (12, HIDDEN),
    "decoder.layers.3.self_attention.linear_proj.weight": (HIDDEN, 8),
    "decoder.layers.0.mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN),
    "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight": (2 * WIDTH, HIDDEN),
    "decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight": (HIDDEN, WIDTH),
    "decoder.layers.3.mlp.router.weight": (6, HIDDEN),
}


@dataclass(frozen=True)
class Group:
    """A tensor-parallel group as one of its ranks sees it."""

    at: int
    of: int

    def size(self) -> int:
        return self.of

    def rank(self) -> int:
        return self.at


def local_part(name: str, whole: Tensor, size: int, rank: int) -> Tensor:
    """A rank's share of the model; the vocabulary is padded to a multiple of the ranks."""
    dim = convert.split_dim(name)
    if dim is None or size == 1:
        return whole
    if whole.shape[0] == VOCAB:
        whole = F.pad(whole, (0, 0, 0, -VOCAB % size))
    part: Tensor = convert.part(name, whole, dim, size, rank)
    return part


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("saved_by", "read_by"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_parts_of_one_layout_are_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, saved_by: int, read_by: int
) -> None:
    whole = torch.arange(torch.Size(WHOLE[name]).numel(), dtype=torch.float32).view(WHOLE[name]) + 1
    if any(size > 1 and convert.split_dim(name) == 1 and whole.shape[1] % size for size in (saved_by, read_by)):
        pytest.skip("this matrix does not divide over so many ranks")
    paths = []
    for rank in range(saved_by):
        monkeypatch.setattr(state, "tensor_group", lambda _name, rank=rank: Group(rank, saved_by))
        part = local_part(name, whole, saved_by, rank)
        share = state._share(name, part, HF)
        cut = part.numel() // 3  # as two data-parallel ranks divide the optimizer's state between them
        for index, values in enumerate((part.reshape(-1)[:cut], part.reshape(-1)[cut:])):
            paths.append(tmp_path / f"{rank}-{index}")
            write_pieces(paths[-1], [share.piece("weight", values, cut * index)])
    reader = PieceReader(paths)
    for rank in range(read_by):
        monkeypatch.setattr(state, "tensor_group", lambda _name, rank=rank: Group(rank, read_by))
        part = local_part(name, whole, read_by, rank)
        read = state._share(name, part, HF).flat("weight", reader, part.numel())
        assert torch.equal(read.view(part.shape), part)
