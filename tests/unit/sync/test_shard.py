"""Pushed files read tensor by tensor: the bytes that safetensors wrote, refusals of damaged ones, no leftovers."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_trm.sync import shard as sync_shard
from moe_trm.sync.shard import Memory, Shard, write_joined, write_tensors
from moe_trm.sync.tensors import tensor_bytes

NUM_TENSORS = 20


def read_tensors(path: Path, names: Iterable[str]) -> list[tuple[str, Tensor]]:
    with Shard(path) as shard:
        return [(name, shard.tensor(name)) for name in names]


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return {f"t{n}": torch.randn(3, n + 1, generator=generator).to(dtypes[n % 3]) for n in range(NUM_TENSORS)}


@pytest.fixture
def shard(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, tmp_path / "shard.safetensors", metadata={"format": "pt"})
    return tmp_path / "shard.safetensors"


def test_tensors_are_those_that_were_written(shard: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors, reverse=True)
    read = read_tensors(shard, names)
    assert [name for name, _ in read] == names
    for name, tensor in read:
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("most", [1, 3, 512])
@pytest.mark.parametrize("write", [write_tensors, write_joined])
def test_written_files_are_those_that_safetensors_reads(
    tmp_path: Path, tensors: dict[str, Tensor], write: Callable[..., object], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types in turn, odd sizes before wide types, a scalar, no tensor at all, and writes that stop halfway."""
    writev = os.writev

    def write_some(file: int, buffers: list[memoryview]) -> int:
        whole = memoryview(b"".join(buffers))
        return writev(file, [whole[: max(1, len(whole) // 2)]])

    monkeypatch.setattr(sync_shard, "_MOST_BUFFERS", most)
    monkeypatch.setattr(os, "writev", write_some)
    for number, sent in enumerate(({}, tensors, {**tensors, "scalar": torch.tensor(2.5), "odd": torch.ones(3).half()})):
        path = tmp_path / f"{number}.safetensors"
        write(path, sent)
        found = load_file(path)
        assert found.keys() == sent.keys()
        for name, tensor in sent.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
        assert [name for name, _ in read_tensors(path, sent)] == list(sent)


def test_joined_tensors_are_the_bytes_that_each_has_alone(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    sent = {**tensors, "transposed": torch.arange(6.0).view(2, 3).t(), "trained": torch.ones(2, requires_grad=True)}
    written = write_joined(tmp_path / "t", sent)
    assert {name: bytes(data) for name, data in written.items()} == {
        name: bytes(tensor_bytes(tensor)) for name, tensor in sent.items()
    }
    assert write_joined(tmp_path / "none", {}) == {}


def test_tensors_share_memory_one_after_the_other(shard: Path, tensors: dict[str, Tensor]) -> None:
    """Longer ones and shorter ones in turn, of other types too: each is whole while it is there."""
    memory, places = Memory(), set()
    with Shard(shard) as opened:
        for name in [*sorted(tensors), *sorted(tensors, reverse=True)]:
            data, dtype, shape = opened.read(name, memory)
            tensor = torch.frombuffer(data, dtype=dtype).reshape(shape)
            places.add(tensor.data_ptr())
            assert dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name])
    assert len(places) < len(tensors)


def test_a_file_that_is_written_again_is_read_as_it_is_now(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """Other values at the same places, other shapes under the same names, a file that ends earlier, and the first."""
    path, names = tmp_path / "s", sorted(tensors)
    turned = {name: tensors[name].t().contiguous() + 1 for name in names}
    swapped = dict(zip(names, (tensors[name] for name in reversed(names)), strict=True))
    for written in (tensors, turned, {name: tensors[name] + 1 for name in names}, swapped, tensors):
        save_file(written, path)
        for name, tensor in read_tensors(path, names):
            assert tensor.dtype == written[name].dtype
            assert torch.equal(tensor, written[name])
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ValueError, match="is impossible"):
            read_tensors(path, names)


def test_a_scalar_is_read(tmp_path: Path) -> None:
    save_file({"t": torch.tensor(2.5)}, tmp_path / "s")
    assert [(name, tensor.shape, tensor.item()) for name, tensor in read_tensors(tmp_path / "s", ["t"])] == [
        ("t", torch.Size([]), 2.5)
    ]


def test_reading_leaves_nothing_behind(shard: Path, tensors: dict[str, Tensor]) -> None:
    """`safe_open` leaves two objects for each tensor. What other threads keep is far below one."""

    def blocks() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    for _ in range(5):
        read_tensors(shard, tensors)
    before = blocks()
    rounds = 50
    for _ in range(rounds):
        read_tensors(shard, tensors)
    assert blocks() - before < rounds * NUM_TENSORS // 2


def rewritten(shard: Path, **place: object) -> None:
    """The header says something else of `t0`."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["t0"] |= place
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "place",
    [
        {"shape": [4, 4]},
        {"shape": [-3, -1]},
        {"dtype": "I64"},
        {"data_offsets": [-12, 0]},
        {"data_offsets": [12, 0]},
        {"data_offsets": [1 << 40, (1 << 40) + 12]},
        {"data_offsets": [0, 1 << 60], "shape": [1 << 58]},
    ],
)
def test_an_impossible_place_is_refused(shard: Path, place: dict[str, object]) -> None:
    rewritten(shard, **place)
    with pytest.raises(ValueError, match="the place of t0 is impossible"):
        read_tensors(shard, ["t0"])


def test_a_header_that_is_none_is_refused(shard: Path) -> None:
    content = shard.read_bytes()
    shard.write_bytes(content[:8] + b"[" + content[9:])
    with pytest.raises(ValueError, match="the header is damaged"):
        read_tensors(shard, ["t0"])


@pytest.mark.parametrize("left", [0, 4, 20])
def test_a_file_that_ends_early_is_refused(shard: Path, left: int) -> None:
    shard.write_bytes(shard.read_bytes()[:left])
    with pytest.raises(ValueError, match="header"):
        read_tensors(shard, ["t0"])


def test_threads_read_one_file_at_the_same_time(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((50_000,), float(n)) for n in range(40)}
    save_file(tensors, tmp_path / "s")
    with Shard(tmp_path / "s") as shard, ThreadPoolExecutor(8) as pool:
        for name, tensor in zip(tensors, pool.map(shard.tensor, tensors), strict=True):
            assert torch.equal(tensor, tensors[name])


def test_a_file_that_shrinks_while_it_is_open_is_refused(shard: Path) -> None:
    with Shard(shard) as opened:
        os.truncate(shard, shard.stat().st_size - 4)
        with pytest.raises(ValueError, match="the file ends within"):
            [opened.tensor(f"t{number}") for number in range(NUM_TENSORS)]


def test_a_missing_tensor_is_named(shard: Path) -> None:
    with pytest.raises(ValueError, match="no tensor t99"):
        read_tensors(shard, ["t99"])
