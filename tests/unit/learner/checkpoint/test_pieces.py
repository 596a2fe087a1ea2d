"""Pieces that ranks save come back as a whole, or are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe_trm.errors import CheckpointError
from moe_trm.learner.checkpoint.pieces import Piece, PieceReader, Place, whole, write_pieces


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[Piece]]]:
    """A tensor cut into boxes along one dimension, each cut into flat ranges, dealt out to ranks; some pieces twice."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    bounds = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=2))})
    num_ranks = draw(st.integers(1, 3))
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for first, last in pairwise(bounds):
        part = tensor.narrow(dim, first, last - first)
        offset = tuple(first if i == dim else 0 for i in range(len(shape)))
        flat = part.reshape(-1)
        cuts = sorted({0, len(flat), *draw(st.lists(st.integers(0, len(flat)), max_size=2))})
        for start, stop in pairwise(cuts):
            place = Place("w", shape, offset, tuple(part.shape), start)
            for rank in {draw(st.integers(0, num_ranks - 1)) for _ in range(2)}:
                ranks[rank].append(Piece(place, flat[start:stop].clone()))
    return tensor, ranks


@settings(max_examples=60)
@given(layouts())
def test_any_layout_reads_back_whole(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[torch.Tensor, list[list[Piece]]]
) -> None:
    tensor, ranks = case
    folder = tmp_path_factory.mktemp("pieces")
    paths = [folder / f"rank-{rank}.safetensors" for rank in range(len(ranks))]
    for path, pieces in zip(paths, ranks, strict=True):
        write_pieces(path, pieces)
    assert torch.equal(PieceReader(paths).read("w", tensor.shape), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_dtypes_and_bits_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(6).to(dtype).view(2, 3)
    write_pieces(tmp_path / "a", [whole("x", values), whole("scalar", values[0, 1])])
    reader = PieceReader([tmp_path / "a"])
    assert reader.read("x").dtype == dtype
    assert torch.equal(reader.read("x"), values)
    assert reader.read("scalar", ()).shape == ()
    assert reader.names("x") == ["x"]
    assert "y" not in reader


def test_a_host_copy_does_not_follow_training() -> None:
    values = torch.ones(3)
    piece = whole("x", values)
    values.zero_()
    assert piece.values.tolist() == [1, 1, 1]


def test_a_box_that_is_contiguous_by_chance(tmp_path: Path) -> None:
    pieces = [Piece(Place("w", (1, 2), (0, i), (1, 1)), torch.tensor([float(i)])) for i in range(2)]
    write_pieces(tmp_path / "a", pieces)
    assert PieceReader([tmp_path / "a"]).read("w").tolist() == [[0.0, 1.0]]


def test_missing_elements_are_told(tmp_path: Path) -> None:
    write_pieces(tmp_path / "a", [Piece(Place("w", (4,), (0,), (4,), 1), torch.zeros(2))])
    with pytest.raises(CheckpointError, match="2 of 4 elements missing"):
        PieceReader([tmp_path / "a"]).read("w")


def test_another_shape_and_another_name_are_refused(tmp_path: Path) -> None:
    write_pieces(tmp_path / "a", [whole("w", torch.zeros(4))])
    reader = PieceReader([tmp_path / "a"])
    with pytest.raises(CheckpointError, match="another shape"):
        reader.read("w", (2, 2))
    with pytest.raises(CheckpointError, match="does not hold"):
        reader.read("v")


@pytest.mark.parametrize(
    "place",
    [
        Place("w", (4,), (1,), (4,)),
        Place("w", (4,), (3,), (4,)),
        Place("w", (4,), (-1,), (4,)),
        Place("w", (4,), (0,), (4,), 3),
        Place("w", (4,), (0,), (4,), -1),
        Place("w", (4,), (0, 0), (2, 2)),
        Place("w", (2, 2), (0, 0), (2, 2)),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(tmp_path: Path, place: Place) -> None:
    good = Place("w", (4,), (0,), (4,))
    write_pieces(tmp_path / "a", [Piece(good, torch.zeros(4)), Piece(place, torch.zeros(4))])
    with pytest.raises(CheckpointError, match="damaged"):
        PieceReader([tmp_path / "a"]).read("w")


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    save_file({"0": torch.zeros(1)}, tmp_path / "bare")
    table = msgspec.json.encode([Place("w", (1,), (0,), (1,))] * 2).decode()
    save_file({"0": torch.zeros(1)}, tmp_path / "short", metadata={"pieces": table})
    for name in ("text", "bare", "absent"):
        with pytest.raises(CheckpointError, match="damaged"):
            PieceReader([tmp_path / name])
    with pytest.raises(CheckpointError, match="damaged"):
        PieceReader([tmp_path / "short"]).read("w")
