"""A recorded run: every accepted record of every step on disk, written and read step by step.

A bundle is a folder with one file `step-NNNNNN.safetensors` per training step, in format 6, or 7 where a record has
pictures (docs/bundles.md). What the updates saw is in files of its own, `recording.scores`. Shape letters, summed over
the N records of a step: T tokens, S sampled tokens, Q bytes of encoded routes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.recording.checked_file import Arrays, CheckedHeader, damaged, read_checked, read_header, write_checked
from moe_trm.sampling_mask.codec import decode as decode_masks
from moe_trm.sampling_mask.codec import encode as encode_masks
from moe_trm.sampling_mask.record import SamplingMask, join, split
from moe_trm.types import RolloutRecord, SessionTurn
from routing import RouteError, RouteRecord
from routing.layout.row_ids import row_id
from routing.record.groups import decode_group, encode_group

FORMAT = "moe-trm-bundle"
FORMAT_VERSION = 6
PICTURES = 7
"""The version of a step with pictures: a reader that does not know them would take it for text."""
WHOLE_SAMPLES = 5
"""The version in which every record is a whole sample."""
TOKENS_ALONE = 4
"""The version whose routes are bound to their tokens alone; reading binds them to their samples."""
READABLE = (PICTURES, FORMAT_VERSION, WHOLE_SAMPLES, TOKENS_ALONE)
_FILE = re.compile(r"step-(\d{6,})\.safetensors")


class Header(CheckedHeader, kw_only=True):
    """Metadata of one step's file."""

    step: int
    sample_ids: list[int]
    group_ids: list[int]
    prompt_ids: list[str]
    finish_reasons: list[str]
    mask_kinds: list[str]
    mask_violations: list[int]
    rejected: dict[int, str]
    route_groups: list[list[int]]
    """Numbers of the records with routes, grouped by prompt: their routes are encoded as one group."""
    reward_parts: list[dict[str, float]] = msgspec.field(default_factory=list)
    rows: list[int] = msgspec.field(default_factory=list)
    """Place of each record among the rows of its sample; empty: every record is a whole sample."""
    sessions: dict[int, list[SessionTurn]] = msgspec.field(default_factory=dict)
    """Trees of the samples that are sessions, by sample id."""
    baselines: list[float | None] = msgspec.field(default_factory=list)
    """Rewards of greedy answers to the records' prompts; empty where none was asked for."""
    pictures: list[list[int]] = msgspec.field(default_factory=list)
    """Numbers of each record's pictures among the different ones of the step; empty: no record has any."""
    expected: list[str] = msgspec.field(default_factory=list)
    """Answers that the reward compares with, for transcripts; empty where the task has none."""


class BundleWriter:
    """Writes a bundle, step by step.

    Args:
        folder: made if missing; steps that are there already are replaced, later ones are removed by the first `write`.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._has_header = False

    def write(self, step: int, records: Sequence[RolloutRecord], rejected: Mapping[int, str] | None = None) -> None:
        """Write one step: its accepted records with all their rows, and the reason by sample id of each rejected one.

        The file appears whole or not at all.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._has_header:
            for later in (number for number in BundleReader(str(self._folder)).steps() if number > step):
                _path(self._folder, later).unlink()
            self._has_header = True
        records = [row for record in records for row in record.rows]
        groups = _route_groups(records)
        arrays = _pack(records, groups)
        files = list(dict.fromkeys(data for record in records for data in record.pictures))
        if files:
            arrays["pictures"] = np.frombuffer(b"".join(files), np.uint8)
            arrays["picture_offsets"] = _offsets([len(data) for data in files])
        baselines = [record.baseline for record in records]
        header = Header(
            format=FORMAT,
            version=PICTURES if files else FORMAT_VERSION,
            step=step,
            sample_ids=[record.sample_id for record in records],
            group_ids=[record.group_id for record in records],
            prompt_ids=[record.prompt_id for record in records],
            finish_reasons=[record.finish_reason for record in records],
            mask_kinds=[_mask_kind(record) for record in records],
            reward_parts=[dict(record.reward_parts) for record in records],
            baselines=baselines if any(value is not None for value in baselines) else [],
            mask_violations=[record.sampling_mask.violations if record.sampling_mask else 0 for record in records],
            rejected=dict(rejected or {}),
            route_groups=groups,
            rows=[record.row for record in records],
            sessions={record.sample_id: [*record.session] for record in records if record.session},
            pictures=[[*map(files.index, record.pictures)] for record in records] if files else [],
            expected=[record.expected for record in records] if any(record.expected for record in records) else [],
        )
        write_checked(_path(self._folder, step), header, arrays)


class BundleReader:
    """Reads a bundle.

    Every method raises `BundleError` when a file is missing, damaged, truncated or of a newer format.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def steps(self) -> list[int]:
        """The recorded steps, ascending."""
        names = (_FILE.fullmatch(path.name) for path in self._folder.glob("step-*.safetensors"))
        return sorted(int(name[1]) for name in names if name)

    def header(self, step: int) -> Header:
        """The header of one step, without reading its arrays; the checksum is not verified."""
        return read_header(self._existing(step), Header, FORMAT, *READABLE)

    def read(self, step: int) -> list[RolloutRecord]:
        """The rows of one step as they were written, after checking the checksum and the lengths.

        `joined` puts those of a sample together.
        """
        path = self._existing(step)
        header, arrays = read_checked(path, Header, FORMAT, *READABLE)
        try:
            return _unpack(header, arrays)
        except (KeyError, ValueError, IndexError, RouteError, RecordRejected) as error:
            raise damaged(path, f"{type(error).__name__}: {error}") from error

    def logprobs(self, step: int) -> dict[int, np.ndarray]:
        """`[S]` rollout log-probs of each row of one step by `row_id`; routes and masks are not decoded."""
        path = self._existing(step)
        header, arrays = read_checked(path, Header, FORMAT, *READABLE)
        parts = np.split(arrays["rollout_logprobs"], arrays["sampled_offsets"][1:-1])
        names = [row_id(*sample_and_row) for sample_and_row in zip(header.sample_ids, _rows(header), strict=True)]
        return dict(zip(names, parts, strict=True))

    def _existing(self, step: int) -> Path:
        path = _path(self._folder, step)
        if not path.is_file():
            raise BundleError(
                "the recording has no such step", where=str(self._folder), got=step, expected=f"one of {self.steps()}"
            )
        return path


def joined(rows: Iterable[RolloutRecord]) -> dict[int, RolloutRecord]:
    """Samples by their ids, with the rows of each in the order in which they are given."""
    samples: dict[int, RolloutRecord] = {}
    for row in rows:
        first = samples.get(row.sample_id)
        samples[row.sample_id] = row if first is None else replace(first, further=(*first.further, row))
    return samples


def _rows(header: Header) -> list[int]:
    return header.rows or [0] * len(header.sample_ids)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def _mask_kind(record: RolloutRecord) -> str:
    if record.sampling_mask is None:
        return "none"
    return "ids" if record.sampling_mask.logprobs is None else "logprobs"


def _pack_masks(records: Sequence[RolloutRecord], kind: str) -> np.ndarray:
    members = [record for record in records if _mask_kind(record) == kind]
    mask = join([record.sampling_mask for record in members if record.sampling_mask])
    sampled = _join([record.tokens[record.sampled] for record in members], np.int32)
    vocab_size = 1 + max([0, *mask.ids.tolist(), *sampled.tolist()])
    return np.frombuffer(encode_masks(mask, sampled, vocab_size), np.uint8)


def _unpack_masks(arrays: Arrays, name: str, numbers: Sequence[int]) -> dict[int, SamplingMask]:
    """Masks of the records `numbers`, which have one of this kind, by number."""
    tokens, sampled, offsets = arrays["tokens"], arrays["sampled"].astype(bool), arrays["token_offsets"]
    sampled_ids = [tokens[slice(*offsets[n : n + 2])][sampled[slice(*offsets[n : n + 2])]] for n in numbers]
    mask = decode_masks(arrays[name].tobytes(), _join(sampled_ids, np.int32))
    return dict(zip(numbers, split(mask, [len(ids) for ids in sampled_ids]), strict=True))


def _route_groups(records: Sequence[RolloutRecord]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number, record in enumerate(records):
        if record.routes is not None:
            groups.setdefault(record.group_id, []).append(number)
    return list(groups.values())


def _unpack_routes(header: Header, arrays: Arrays) -> dict[int, RouteRecord]:
    """Routes by the number of their record."""
    rows = np.diff(arrays["token_offsets"]) - 1
    routes: dict[int, RouteRecord] = {}
    for place, numbers in enumerate(header.route_groups):
        block = arrays["routes"][slice(*arrays["route_offsets"][place : place + 2])].data
        routes |= zip(numbers, decode_group(block, rows[numbers].tolist()), strict=True)
    return routes


def _pack(records: Sequence[RolloutRecord], groups: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    members = [[member_routes for number in numbers if (member_routes := records[number].routes)] for numbers in groups]
    routes = [np.frombuffer(encode_group(group), np.uint8) for group in members]
    return {
        "tokens": _join([record.tokens for record in records], np.int32),
        "sampled": _join([record.sampled for record in records], np.uint8),
        "turn_ids": _join([record.turn_ids for record in records], np.int16),
        "rollout_logprobs": _join([record.rollout_logprobs for record in records], np.float32),
        "full_logprobs": _join([record.full_logprobs for record in records], np.float32),
        "versions": _join([record.versions for record in records], np.int32),
        "token_offsets": _offsets([record.num_tokens for record in records]),
        "sampled_offsets": _offsets([record.num_sampled for record in records]),
        "masks": _pack_masks(records, "logprobs"),
        "bare_masks": _pack_masks(records, "ids"),
        "routes": _join(routes, np.uint8),
        "route_offsets": _offsets([len(data) for data in routes]),
        "rewards": np.array([np.nan if record.reward is None else record.reward for record in records], np.float64),
    }


def _join(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(part.astype(dtype, copy=False) for part in parts)])


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])


def _unpack_pictures(header: Header, arrays: Arrays) -> list[tuple[bytes, ...]]:
    """Those of each record; empty where none has any."""
    if not header.pictures:
        return []
    data, offsets = arrays["pictures"].tobytes(), arrays["picture_offsets"].tolist()
    files = [data[start:end] for start, end in pairwise(offsets)]
    return [tuple(files[number] for number in numbers) for numbers in header.pictures]


def _unpack(header: Header, arrays: Arrays) -> list[RolloutRecord]:
    records, masks = [], dict[int, SamplingMask]()
    for name, kind in (("masks", "logprobs"), ("bare_masks", "ids")):
        masks |= _unpack_masks(
            arrays, name, [n for n, other_kind in enumerate(header.mask_kinds) if other_kind == kind]
        )
    routes, rows, pictures = _unpack_routes(header, arrays), _rows(header), _unpack_pictures(header, arrays)
    for number, sample_id in enumerate(header.sample_ids):
        of_tokens = slice(*arrays["token_offsets"][number : number + 2])
        of_sampled = slice(*arrays["sampled_offsets"][number : number + 2])
        mask = masks.get(number)
        if mask is not None:
            mask = replace(mask, violations=header.mask_violations[number])
        reward = float(arrays["rewards"][number])
        records.append(
            RolloutRecord(
                sample_id=sample_id,
                group_id=header.group_ids[number],
                prompt_id=header.prompt_ids[number],
                tokens=arrays["tokens"][of_tokens],
                sampled=arrays["sampled"][of_tokens].astype(bool),
                turn_ids=arrays["turn_ids"][of_tokens],
                rollout_logprobs=arrays["rollout_logprobs"][of_sampled],
                full_logprobs=arrays["full_logprobs"][of_sampled],
                versions=arrays["versions"][of_sampled],
                routes=routes.get(number),
                sampling_mask=mask,
                finish_reason=header.finish_reasons[number],
                reward=None if np.isnan(reward) else reward,
                reward_parts=header.reward_parts[number] if header.reward_parts else {},
                row=rows[number],
                session=tuple(header.sessions.get(sample_id, ())),
                baseline=header.baselines[number] if header.baselines else None,
                pictures=pictures[number] if pictures else (),
                expected=header.expected[number] if header.expected else "",
            )
        )
    return [record.bound() for record in records] if header.version == TOKENS_ALONE else records
