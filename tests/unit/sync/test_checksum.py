"""Predicted engine checksums on tensors small enough to hash by hand, and pushes on disk without an engine."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moe_trm.errors import CheckpointError, EngineLost, SyncError
from moe_trm.rollout.servers.backend import Digests
from moe_trm.rollout.sglang import broadcast
from moe_trm.rollout.sglang.api import check_weights
from moe_trm.rollout.sglang.checksum import EngineChecksums, compare
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape, engine_place
from moe_trm.sync.disk import finish_push, write_buckets, write_shard
from moe_trm.sync.distributed import tensors_of
from moe_trm.sync.manifest import TensorEntry, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.sync.tensors import in_lots, tensor_bytes, tensor_digest

TENSORS = {
    "model.embed_tokens.weight": torch.arange(6.0).reshape(3, 2),
    "model.layers.0.self_attn.v_proj.weight": torch.full((1, 2), 3.0),
    "model.layers.0.self_attn.q_proj.weight": torch.full((2, 2), 1.0),
    "model.layers.0.self_attn.k_proj.weight": torch.full((1, 2), 2.0),
    "model.layers.0.mlp.gate.weight": torch.full((11, 2), 9.0),
    **{
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": torch.full((2, 2), 10.0 * expert + index)
        for expert in range(11)
        for index, part in enumerate(("down", "gate", "up"))
    },
    "model.layers.1.mlp.up_proj.weight": torch.full((1, 2), 5.0),
    "model.layers.1.mlp.gate_proj.weight": torch.full((1, 2), 4.0),
    "model.norm.weight": torch.ones(2),
}
LITERAL = torch.tensor([1.0, -2.0])
"""Bytes 00 00 80 3f 00 00 00 c0."""


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def expected() -> dict[str, str]:
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    w13 = torch.stack(
        [torch.cat([TENSORS[f"{experts}.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(11)]
    )
    w2 = torch.stack([TENSORS[f"{experts}.{e}.down_proj.weight"] for e in range(11)])
    return {
        "model.embed_tokens.weight": sha(TENSORS["model.embed_tokens.weight"], torch.zeros(61, 2)),
        f"{attention}.qkv_proj.weight": sha(*(TENSORS[f"{attention}.{part}_proj.weight"] for part in "qkv")),
        "model.layers.0.mlp.gate.weight": sha(TENSORS["model.layers.0.mlp.gate.weight"]),
        f"{experts}.w13_weight": sha(w13),
        f"{experts}.w2_weight": sha(w2),
        "model.layers.1.mlp.gate_up_proj.weight": sha(torch.tensor([[4.0, 4.0], [5.0, 5.0]])),
        "model.norm.weight": sha(torch.ones(2)),
    }


def checksums(tensors: Mapping[str, torch.Tensor], dtype: str = "float32") -> dict[str, str]:
    result = EngineChecksums(tensors, EngineShape(dtype))
    for name, tensor in tensors.items():
        result.add(name, tensor)
    return dict(result.result()[0])


def test_a_literal() -> None:
    assert checksums({"model.norm.weight": LITERAL}) == {"model.norm.weight": "ee4ac73c2bd27756"}
    # bfloat16 keeps the upper half of each number: 80 3f 00 c0.
    assert checksums({"model.norm.weight": LITERAL}, "bfloat16") == {"model.norm.weight": "7b429b1e3fd37fd0"}
    assert tensor_digest(LITERAL) == "d11372a3f8d4096998cd4bf727a9d2ae"


def test_fused_tensors_are_hashed_part_by_part() -> None:
    assert checksums(TENSORS) == expected()


@given(st.permutations(sorted(TENSORS)))
def test_the_order_of_arrival_does_not_matter(names: list[str]) -> None:
    assert checksums({name: TENSORS[name] for name in names}) == expected()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_taken_where_the_engine_hashes_them_as_they_are(dtype: str) -> None:
    """Tensors that it casts, pads or turns are refused, and so are parts before their turn: nothing of these counts."""
    result, refused = EngineChecksums(TENSORS, EngineShape(dtype)), set[str]()
    for name in [part for parts in result.parts() for part in reversed(parts)]:
        if not result.add_bytes(name, tensor_bytes(TENSORS[name]), torch.float32):
            refused.add(name)
    first = {parts[0] for parts in result.parts()} - {"model.embed_tokens.weight"}
    assert TENSORS.keys() - refused == (first if dtype == "float32" else set())
    for name in sorted(refused):
        result.add(name, TENSORS[name])
    assert result.result() == [checksums(TENSORS, dtype)]
    stacked = EngineChecksums(
        ["model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.sinks"], EngineShape("float32")
    )
    assert not stacked.add_bytes("model.layers.0.mlp.experts.down_proj", memoryview(bytes(4)), torch.float32)
    assert not stacked.add_bytes("model.layers.0.self_attn.sinks", memoryview(bytes(4)), torch.float32)


def test_a_tensor_that_never_came_is_named() -> None:
    result = EngineChecksums(TENSORS, EngineShape("float32"))
    for name, tensor in TENSORS.items():
        if "experts.10.up" not in name:
            result.add(name, tensor)
    with pytest.raises(SyncError, match=r"experts\.10\.up_proj"):
        result.result()


def test_every_single_changed_value_changes_its_checksum() -> None:
    for name, tensor in TENSORS.items():
        changed = tensor.clone()
        changed.view(-1)[-1] = torch.nextafter(changed.view(-1)[-1], torch.tensor(1e6))
        with pytest.raises(SyncError) as caught:
            compare(checksums(TENSORS), checksums({**TENSORS, name: changed}), "here")
        assert caught.value.got == f"1 differ: {engine_place(name)[0]}"


@pytest.mark.parametrize(
    ("expected", "reported", "got"),
    [
        ({"a": "0"}, {"a": "0", "b": "1"}, "1 never pushed: b"),
        ({"a": "0", "b": "1"}, {"a": "0"}, "1 not in the engine: b"),
        ({"a": "0", "b": "1", "c": "2"}, {"a": "0", "b": "1", "c": "3"}, "1 differ: c"),
    ],
)
def test_one_thing_that_is_wrong_suffices(expected: dict[str, str], reported: dict[str, str], got: str) -> None:
    compare(expected, expected, "here")
    with pytest.raises(SyncError) as caught:
        compare(expected, reported, "here")
    assert caught.value.got == got


def test_every_rank_of_the_engine_is_compared_and_none_is_no_proof() -> None:
    class Ranks(FakeEngine):
        def __init__(self, *held: Mapping[str, torch.Tensor]) -> None:
            super().__init__(TENSORS, "1")
            self.ranks = held

        async def post(self, path: str, body: Mapping[str, object]) -> Any:
            return {"success": True, "ranks": reported(*self.ranks)}

    both = [expected(), expected()]
    asyncio.run(check_weights(Ranks(TENSORS, TENSORS), both))
    wrong = {**TENSORS, "model.norm.weight": torch.zeros(2)}
    for number, ranks in enumerate(((wrong, TENSORS), (TENSORS, wrong))):
        with pytest.raises(SyncError, match=r"model\.norm") as caught:
            asyncio.run(check_weights(Ranks(*ranks), both))
        assert caught.value.where == f"engine rank {number}"
    with pytest.raises(SyncError, match="gave no checksums"):
        asyncio.run(check_weights(Ranks(), both))
    with pytest.raises(SyncError, match="gave no checksums") as silent:
        asyncio.run(check_weights(Ranks(TENSORS), both))
    assert silent.value.got == "none of ranks [1]"


def test_a_broadcast_that_changed_any_tensor_is_witnessed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        TensorEntry(name=name, file="", dtype="float32", shape=tuple(tensor.shape), digest=tensor_digest(tensor))
        for name, tensor in TENSORS.items()
    ]
    for damaged in [None, *TENSORS]:

        def receive(_group: object, data: torch.Tensor) -> None:
            for entry, tensor in tensors_of(entries, data):
                tensor.copy_(TENSORS[entry.name])
                if entry.name == damaged:  # noqa: B023
                    tensor.view(-1)[-1] += 1

        monkeypatch.setattr(broadcast, "broadcast", receive)
        witness = broadcast.DistributedPush(FakeEngine(TENSORS, "1"))
        witness._groups["g"] = None  # type: ignore[assignment]
        found = witness._witness("g", entries, EngineChecksums(TENSORS, EngineShape("float32")))
        assert found == ([damaged] if damaged else [])


def checkpoint(folder: Path) -> str:
    folder.mkdir()
    for name, text in (
        ("config.json", "{}"),
        ("tokenizer.json", "[]"),
        ("model.safetensors", "weights of the base model"),
    ):
        (folder / name).write_text(text)
    return str(folder)


def push(tmp_path: Path, version: int = 1) -> WeightPush:
    folder = tmp_path / "pushes" / f"v{version:06d}"
    names = sorted(TENSORS)
    halves = (names[::2], names[1::2])
    entries = [
        write_shard(folder / f"{i}.safetensors", [(name, TENSORS[name]) for name in half], Rounding("float32"))
        for i, half in enumerate(halves)
    ]
    base = tmp_path / "base"
    return finish_push(str(folder), entries[0] + entries[1], version, str(base) if base.exists() else checkpoint(base))


def test_a_push_folder_is_complete_and_verifiable(tmp_path: Path) -> None:
    made = push(tmp_path)
    names = {path.name for path in Path(made.directory).iterdir()}
    assert names == {
        "0.safetensors",
        "1.safetensors",
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "push.json",
    }
    assert verified_checksums(made, EngineShape("float32")) == [expected()]
    assert verified_checksums(made, EngineShape("bfloat16")) == [checksums(TENSORS, "bfloat16")]
    assert verified_checksums(made, None) == ()


@pytest.mark.parametrize("lot_bytes", [1, 40, 1 << 30])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 30])
def test_buckets_hold_what_one_file_holds(tmp_path: Path, bucket_bytes: int, lot_bytes: int) -> None:
    """Tensors of every kind in files of every size, in threads and without: the same entries but for the file, and the
    same proof.
    """
    folder = tmp_path / "v000001"
    rounding = Rounding("bfloat16")
    whole = write_shard(tmp_path / "whole.safetensors", TENSORS.items(), rounding)
    cut = write_buckets(folder, "rank-0", TENSORS.items(), rounding, bucket_bytes=bucket_bytes, lot_bytes=lot_bytes)
    assert [(e.name, e.dtype, e.shape, e.digest) for e in cut] == [(e.name, e.dtype, e.shape, e.digest) for e in whole]
    files = sorted(path.name for path in folder.iterdir())
    assert sorted({entry.file for entry in cut}) == files
    assert files[-1] == "rank-0.safetensors"
    assert (len(files) == 1) == (bucket_bytes > 100)
    made = finish_push(str(folder), cut, 1, checkpoint(tmp_path / "base"))
    assert verified_checksums(made, EngineShape("bfloat16"), lot_bytes=lot_bytes) == [checksums(TENSORS, "bfloat16")]


def test_lots_end_with_the_item_that_reaches_them() -> None:
    assert list(in_lots([("a", 3), ("b", 1), ("c", 9), ("d", 0), ("e", 2)], 4)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(in_lots([], 4)) == []


@pytest.mark.parametrize("lot_bytes", [1, 1 << 30])
def test_two_buckets_are_held_at_most(tmp_path: Path, lot_bytes: int) -> None:
    """The third tensor is asked for when the first is on disk."""
    there: list[list[str]] = []

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            there.append(sorted(path.stem for path in tmp_path.glob("*.safetensors")))
            yield f"tensor.{number}", torch.ones(8)

    write_buckets(tmp_path, "t", made(), Rounding("float32"), bucket_bytes=1, lot_bytes=lot_bytes)
    assert "t" in there[2]
    assert {"t", "t-0001"} <= set(there[3])


def test_an_export_that_fails_is_no_push(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "tensor.0", torch.ones(8)
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        write_buckets(tmp_path, "t", broken(), Rounding("float32"), bucket_bytes=1)


def test_a_rank_without_tensors_writes_no_file(tmp_path: Path) -> None:
    assert write_buckets(tmp_path, "t", [], Rounding("float32")) == ()
    assert list(tmp_path.iterdir()) == []


def test_two_pushes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "pushes" / "v000077").mkdir(parents=True)
    (tmp_path / "pushes" / "notes").mkdir()
    for version in range(4):
        push(tmp_path, version)
    assert sorted(path.name for path in (tmp_path / "pushes").iterdir()) == ["notes", "v000002", "v000003"]


def test_a_shard_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    stray = tmp_path / "pushes" / "v000001" / "9.safetensors"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"old")
    push(tmp_path)
    assert not stray.exists()


def test_broken_pushes_are_refused(tmp_path: Path) -> None:
    made = push(tmp_path)
    with pytest.raises(SyncError, match="two ranks"):
        finish_push(made.directory, made.tensors + made.tensors[:1], 1, str(tmp_path / "base"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        finish_push(made.directory, made.tensors, 1, str(tmp_path))
    (Path(made.directory) / "0.safetensors").unlink()
    with pytest.raises(SyncError, match="missing"):
        finish_push(made.directory, made.tensors, 1, str(tmp_path / "base"))
    with pytest.raises(SyncError, match="cannot be read"):
        verified_checksums(made, EngineShape("float32"))


@pytest.mark.parametrize("lot_bytes", [1, 1 << 30])
def test_a_file_that_fails_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lot_bytes: int
) -> None:
    made = push(tmp_path)

    def fail(*_: object) -> int:
        raise OSError("Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SyncError, match="cannot be read") as caught:
        verified_checksums(made, EngineShape("float32"), lot_bytes=lot_bytes)
    assert caught.value.got == "Input/output error"


def test_a_file_that_differs_from_memory_is_refused_by_name(tmp_path: Path) -> None:
    made, refused = push(tmp_path), 0
    for file, name in itertools.product(("0.safetensors", "1.safetensors"), sorted(TENSORS)):
        path = Path(made.directory) / file
        tensors = load_file(path)
        if name in tensors:
            changed = tensors[name].clone()
            changed.view(-1)[0] += 1
            save_file({**tensors, name: changed}, path)
            for lot_bytes in (1, 60, 1 << 30):
                with pytest.raises(SyncError) as caught:
                    verified_checksums(made, EngineShape("float32"), lot_bytes=lot_bytes)
                assert caught.value.got == name
            save_file(tensors, path)
            refused += 1
    assert refused == len(TENSORS)


def reported(*held: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The answer of ranks that hold whole tensors."""
    return [{"parallelism_info": [{"tp_rank": n}], "checksums": checksums(own)} for n, own in enumerate(held)]


class FakeEngine:
    """Answers like an engine that holds the tensors of `held` under `version`."""

    def __init__(self, held: Mapping[str, torch.Tensor], version: str) -> None:
        self.held, self.version = held, version

    async def get(self, path: str) -> Any:
        return {"weight_version": self.version}

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        if path == "/weights_checker":
            return {"success": True, "ranks": reported(self.held)}
        return {"success": True, "message": ""}


@dataclass
class Known:
    """Checksums that are there at once."""

    checksums: Digests

    def __await__(self) -> Generator[None, None, Digests]:
        yield from ()
        return self.checksums


def test_only_the_pushed_weights_under_the_right_version_are_accepted(tmp_path: Path) -> None:
    made = push(tmp_path)
    expected = verified_checksums(made, EngineShape("float32"))
    asyncio.run(load_folder(FakeEngine(TENSORS, "1"), made, Known(expected)))
    wrong = {**TENSORS, "model.norm.weight": torch.zeros(2)}
    with pytest.raises(SyncError, match="another version"):
        asyncio.run(load_folder(FakeEngine(TENSORS, "0"), made, Known(expected)))
    with pytest.raises(SyncError, match=r"model\.norm\.weight"):
        asyncio.run(load_folder(FakeEngine(wrong, "1"), made, Known(expected)))
    for unasked in (None, Known(())):
        asyncio.run(load_folder(FakeEngine(wrong, "1"), made, unasked))


def test_an_engine_that_is_lost_while_it_loads_may_be_given_the_push_again(tmp_path: Path) -> None:
    class LostEngine(FakeEngine):
        async def post(self, path: str, body: Mapping[str, object]) -> Any:
            raise EngineLost("the connection was dropped")

    with pytest.raises(EngineLost, match="dropped"):
        asyncio.run(load_folder(LostEngine(TENSORS, "1"), push(tmp_path), None))
