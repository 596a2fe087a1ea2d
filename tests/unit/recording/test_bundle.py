"""A bundle gives back exactly what was written, or a `BundleError`."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.recording.bundle import FORMAT, FORMAT_VERSION, BundleReader, BundleWriter, Header
from moe_trm.recording.checked_file import read_checked, write_checked
from moe_trm.rollout.recorded import BundleEngine
from moe_trm.sampling_mask.violation import drop
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from routing import RouteRecord, token_digest
from routing.record.groups import encode_group
from tests.unit.sampling_mask.sets import random_mask

PROMPT = Prompt("p", (5, 6))


def record(
    sample_id: int, *, mask: str = "logprobs", routes: bool = True, reward: float | None = 1.0, version: int = 0
) -> RolloutRecord:
    rng = np.random.default_rng(sample_id)
    num_sampled = 1 + sample_id % 3
    kept, sampled = random_mask(rng.integers(1, 4, num_sampled).tolist(), 9, sample_id, logprobs=mask != "ids")
    kept = kept.ascending()
    if sample_id == 4:
        kept = drop(kept, np.array([False, True]))
    tokens = np.concatenate([PROMPT.token_ids, sampled]).astype(np.int32)
    experts = np.argsort(rng.random((len(tokens) - 1, 2, 4)), -1)[..., :2].astype(np.uint8)
    return RolloutRecord(
        sample_id=sample_id,
        group_id=sample_id // 4,
        prompt_id="p",
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= 2,
        turn_ids=np.arange(len(tokens), dtype=np.int16) // 3,
        rollout_logprobs=rng.normal(size=num_sampled).astype(np.float32),
        full_logprobs=rng.normal(size=num_sampled).astype(np.float32),
        versions=np.full(num_sampled, version, np.int32),
        routes=RouteRecord(experts, (0, 2), 4, token_digest(tokens)) if routes else None,
        sampling_mask=None if mask == "none" else kept,
        finish_reason="stop",
        reward=reward,
    )


RECORDS = [record(0), record(1, mask="none"), record(2, routes=False, reward=None), record(3, mask="ids"), record(4)]


def assert_same(one: object, two: object) -> None:
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        assert isinstance(two, np.ndarray)
        assert one.dtype == two.dtype
        assert np.array_equal(one, two)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(two, field.name))
    elif isinstance(one, tuple):
        assert isinstance(two, tuple)
        for left, right in zip(one, two, strict=True):
            assert_same(left, right)
    else:
        assert one == two


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    writer, reader = BundleWriter(str(tmp_path)), BundleReader(str(tmp_path))
    answered = [*RECORDS[:-1], dataclasses.replace(RECORDS[-1], expected="42")]
    writer.write(1, answered)
    writer.write(2, [])
    assert reader.steps() == [1, 2]
    assert reader.read(2) == []
    for written, read in zip(answered, reader.read(1), strict=True):
        assert_same(written, read)


def test_pictures_come_back_with_their_records_and_are_written_once(tmp_path: Path) -> None:
    """A reader of format 6 would take such a step for one of text."""
    one, two = bytes(range(256)) * 40, b"another"
    with_pictures = [dataclasses.replace(RECORDS[0], pictures=(one, two)), RECORDS[1]]
    with_pictures += [dataclasses.replace(record, pictures=(one,)) for record in RECORDS[2:]]
    writer, reader = BundleWriter(str(tmp_path)), BundleReader(str(tmp_path))
    writer.write(1, with_pictures)
    writer.write(2, RECORDS)
    assert [record.pictures for record in reader.read(1)] == [record.pictures for record in with_pictures]
    assert (reader.header(1).version, reader.header(2).version) == (7, 6)
    assert (tmp_path / "step-000001.safetensors").read_bytes().count(one) == 1


def test_every_cut_and_many_flipped_bits_are_noticed(tmp_path: Path) -> None:
    BundleWriter(str(tmp_path)).write(1, RECORDS)
    path, reader = tmp_path / "step-000001.safetensors", BundleReader(str(tmp_path))
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BundleError, match="damaged or truncated"):
            reader.read(1)
    for position in range(8, len(whole), 37):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(BundleError):
            reader.read(1)
    path.write_bytes(whole)
    assert len(reader.read(1)) == len(RECORDS)


@pytest.mark.parametrize("change", [{"version": 8}, {"version": 3}, {"format": "something-else"}])
def test_other_formats_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    BundleWriter(str(tmp_path)).write(1, RECORDS)
    path = tmp_path / "step-000001.safetensors"
    with safe_open(path, framework="np") as file:
        header = msgspec.json.decode(file.metadata()["bundle"])
    save_file(load_file(path), path, metadata={"bundle": msgspec.json.encode(header | change).decode()})
    with pytest.raises(BundleError, match="another format"):
        BundleReader(str(tmp_path)).read(1)


def replayed(
    folder: Path, prompt: Prompt, sample_id: int, group_id: int, version: int = 0, *, prompts_own: bool = False
) -> RolloutRecord:
    async def run() -> RolloutRecord:
        engine = BundleEngine(str(folder), prompts_own=prompts_own)
        await engine.start()
        await engine.load_weights(WeightPush(version, "", ()))
        return await engine.generate(prompt, SamplingParams(), sample_id=sample_id, group_id=group_id)

    return asyncio.run(run())


def test_the_engine_replays_by_sample_id(tmp_path: Path) -> None:
    writer = BundleWriter(str(tmp_path))
    writer.write(1, RECORDS)
    writer.write(2, [record(9, version=1)])
    assert_same(replayed(tmp_path, PROMPT, 3, 0), RECORDS[3])
    assert_same(replayed(tmp_path, PROMPT, 9, 2, version=1), record(9, version=1))


def test_what_an_agent_wrote_is_replayed_by_the_name_of_its_prompt(tmp_path: Path) -> None:
    """An agent writes the context itself: it need not begin with the prompt's ids."""
    BundleWriter(str(tmp_path)).write(1, RECORDS)
    asked = Prompt(RECORDS[0].prompt_id, (99, 98))
    assert_same(replayed(tmp_path, asked, 0, 0, prompts_own=True), RECORDS[0])
    for prompt, group_id in ((Prompt("another", PROMPT.token_ids), 0), (asked, 1)):
        with pytest.raises(BundleError, match="other prompts"):
            replayed(tmp_path, prompt, 0, group_id, prompts_own=True)


@pytest.mark.parametrize(
    ("prompt", "sample_id", "group_id", "version", "message"),
    [
        (Prompt("p", (5, 7)), 0, 0, 0, "other prompts"),
        (Prompt("p", (5,)), 0, 0, 0, "other prompts"),
        (Prompt("p", (5, 6, 0, 0)), 0, 0, 0, "other prompts"),
        (PROMPT, 0, 1, 0, "other prompts"),
        (PROMPT, 99, 24, 0, "recording ends"),
        (PROMPT, 9, 2, 0, "ahead of this run"),
    ],
)
def test_another_run_is_refused(
    tmp_path: Path, prompt: Prompt, sample_id: int, group_id: int, version: int, message: str
) -> None:
    writer = BundleWriter(str(tmp_path))
    writer.write(1, RECORDS)
    writer.write(2, [record(9, version=1)])
    with pytest.raises(BundleError, match=message):
        replayed(tmp_path, prompt, sample_id, group_id, version)


@pytest.mark.parametrize(("sample_id", "reason"), [(5, "not_recorded"), (6, "route_range"), (40, "mask_sum")])
def test_a_sample_the_recorded_run_rejected_is_rejected_again(tmp_path: Path, sample_id: int, reason: str) -> None:
    BundleWriter(str(tmp_path)).write(1, RECORDS, {6: "route_range", 40: "mask_sum"})
    with pytest.raises(RecordRejected) as caught:
        replayed(tmp_path, PROMPT, sample_id, sample_id // 4)
    assert caught.value.reason == reason


def test_an_empty_folder_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nothing is recorded"):
        replayed(tmp_path, PROMPT, 0, 0)


def test_a_few_bytes_that_claim_many_rows_take_no_memory(tmp_path: Path) -> None:
    """Where every expert is chosen, a row takes one bit: the number of rows is checked before any memory is taken."""
    small = record(0)
    assert small.routes is not None
    rows = 4 * 10**6
    bomb = RouteRecord(np.broadcast_to(np.arange(2, dtype=np.uint8), (rows, 1, 2)), (0,), 2)
    encoded = encode_group([bomb], "set")
    assert len(encoded) < rows // 7
    BundleWriter(str(tmp_path)).write(1, [small])
    path = tmp_path / "step-000001.safetensors"
    header, arrays = read_checked(path, Header, FORMAT, FORMAT_VERSION)
    changed = {"routes": np.frombuffer(encoded, np.uint8), "route_offsets": np.array([0, len(encoded)])}
    write_checked(path, header, {**arrays, **changed})
    tracemalloc.start()
    with pytest.raises(BundleError, match="another number of tokens"):
        BundleReader(str(tmp_path)).read(1)
    assert tracemalloc.get_traced_memory()[1] < rows
    tracemalloc.stop()


def test_rows_that_samples_of_a_prompt_share_are_stored_once(tmp_path: Path) -> None:
    prompt, rng = np.arange(400, dtype=np.int32), np.random.default_rng(0)

    def sample(sample_id: int) -> RolloutRecord:
        own = record(sample_id)
        tokens = np.concatenate([prompt, [sample_id]]).astype(np.int32)
        experts = np.argsort(shared, -1)[..., :2].astype(np.uint8)
        return dataclasses.replace(
            own,
            tokens=tokens,
            sampled=np.arange(401) == 400,
            turn_ids=np.zeros(401, np.int16),
            routes=RouteRecord(experts, (0, 2), 4, token_digest(tokens)),
            sampling_mask=None,
            **{name: getattr(own, name)[:1] for name in ("rollout_logprobs", "full_logprobs", "versions")},
        )

    shared = rng.random((400, 2, 4))
    records = [sample(number) for number in range(4)]
    shared = rng.random((400, 2, 4))
    records[1] = dataclasses.replace(records[1], routes=sample(1).routes)
    BundleWriter(str(tmp_path)).write(1, records)
    _, arrays = read_checked(tmp_path / "step-000001.safetensors", Header, FORMAT, FORMAT_VERSION)
    one = 400 * 2 * 2
    assert 2 * one < len(arrays["routes"]) < 2.4 * one
    for written, read in zip(records, BundleReader(str(tmp_path)).read(1), strict=True):
        assert_same(written, read)


def test_only_files_of_its_own_names_belong_to_a_bundle(tmp_path: Path) -> None:
    BundleWriter(str(tmp_path)).write(1, RECORDS)
    for name in ("step-..safetensors", "step-1.safetensors", "step-000002.safetensors.77.partial"):
        (tmp_path / name).write_bytes(b"")
    assert BundleReader(str(tmp_path)).steps() == [1]


def test_a_shorter_run_in_the_same_folder_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (1, 2)):
        writer = BundleWriter(str(tmp_path))
        for step in steps:
            writer.write(step, RECORDS)
    assert BundleReader(str(tmp_path)).steps() == [1, 2]


def test_a_recording_of_other_pushes_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Step 2 was sampled with version 1, which a push every second step brings after step 2."""
    writer = BundleWriter(str(tmp_path))
    writer.write(2, [record(0, version=1)])
    writer.write(3, [record(4, version=2)])

    async def ask(sample_id: int, push_every: int) -> RolloutRecord:
        engine = BundleEngine(str(tmp_path), waits=True, push_every=push_every)
        await engine.start()
        await engine.load_weights(WeightPush(0, "", ()))
        asking = asyncio.ensure_future(
            engine.generate(PROMPT, SamplingParams(), sample_id=sample_id, group_id=sample_id // 4)
        )
        await asyncio.sleep(0)
        await engine.load_weights(WeightPush(2, "", ()))
        return await asking

    with pytest.raises(BundleError, match="other pushes"):
        asyncio.run(ask(0, 2))
    assert asyncio.run(ask(0, 1)).sample_id == 0
    assert asyncio.run(ask(4, 2)).sample_id == 4
