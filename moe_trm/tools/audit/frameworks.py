"""Readers of what trainers and this harness write, into the rows of an audit. docs/healthy.md names the fields.

slime and miles take the routes out of the training data when they replay them. Their rollout dump has the routes, and
their training dump the trainer's log-probs: both are read, and rows of one sample are joined.

Shape letters: B samples, P columns of prompts, R columns of responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.recording.bundle import BundleReader
from moe_trm.recording.scores import ScoresReader
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.tools.audit.dump import Array, AuditDump, AuditRow, gather
from moe_trm.tools.audit.nemo_rl import is_nemo_rl, read_nemo_rl
from moe_trm.tools.audit.plain import read_plain
from moe_trm.tools.whatif.foreign import SUFFIXES, open_dump
from moe_trm.types import RolloutRecord

Part = AuditRow | RecordRejected


def read_dump(paths: Sequence[Path], learner_scores: Path | None = None) -> AuditDump:
    """The rows of all files and folders; `learner_scores`: a plain file with the trainer's log-probs.

    Raises:
        BundleError: nothing there, a file that is not read, or no row that can be judged.
    """
    parts: list[Part] = []
    names: set[str] = set()
    for path in _files(paths):
        framework, rows = _read(path)
        names.add(framework)
        parts += rows
    beside = [] if learner_scores is None else [row for row in read_plain(learner_scores) if isinstance(row, AuditRow)]
    dump = gather(" and ".join(sorted(names)), parts, beside=beside)
    if not dump.rows:
        raise BundleError("no row can be judged", where=str(paths[0]), got=dict(dump.rejected), expected="whole rows")
    return dump


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir() and not BundleReader(str(path)).steps():
            yield from sorted(file for file in path.iterdir() if file.suffix in (*SUFFIXES, ".safetensors"))
        elif path.exists():
            yield path
        else:
            raise BundleError("there is no dump here", where=str(path), expected="a file or folder")


def _read(path: Path) -> tuple[str, list[Part]]:
    if path.is_dir():
        return "moe-trm", list(_bundle(path))
    if path.suffix == ".jsonl" and is_nemo_rl(path):
        return "nemo-rl", list(read_nemo_rl(path))
    if path.suffix in (".jsonl", ".safetensors"):
        return "plain", list(read_plain(path))
    data = open_dump(path)
    if isinstance(data.get("rollout_data"), Mapping):
        return "miles", list(_miles(path, data))
    if isinstance(data.get("samples"), Sequence):
        of_miles = any("rollout_indexer_topk" in sample for sample in data["samples"])
        return "miles" if of_miles else "slime", [_sample(sample, data, n) for n, sample in enumerate(data["samples"])]
    if "input_ids" in data and "response_mask" in data:
        return "verl", list(_verl(path, data))
    raise BundleError(
        "this dump has no token ids that could be scored",
        where=str(path),
        got=f"keys {sorted(map(str, data))[:8]}",
        expected="a dump of slime or miles, tensors of verl with input_ids and response_mask, or the plain layout",
        fix="docs/healthy.md says what each framework has to write.",
    )


def _bundle(folder: Path) -> Iterator[AuditRow]:
    """Records of a bundle with the learner's log-probs at the start of their step."""
    reader, scores = BundleReader(str(folder)), ScoresReader(folder)
    temperature = scores.config().rollout.temperature if (folder / "config.json").is_file() else None
    for step in reader.steps():
        scored: dict[int, Array] = {}
        for update in scores.read(step) if step in scores.steps() else ():
            for batch in update.batches:
                anchor = batch.current_logprobs if batch.anchor_logprobs is None else batch.anchor_logprobs
                for row, number in enumerate(batch.sample_ids.tolist()):
                    scored.setdefault(number, anchor[row][batch.mask[row]].numpy().astype(np.float64))
        for record in reader.read(step):
            yield _record(record, step, scored.get(record.row_id), temperature)


def _record(record: RolloutRecord, step: int, trainer: Array | None, temperature: float | None) -> AuditRow:
    sampled, counted, mask = record.sampled.copy(), record.scored, record.sampling_mask
    sampled[np.flatnonzero(sampled)[~counted]] = False
    if mask is not None:  # rows of tokens that are not counted are empty
        mask = SamplingMask(mask.ids, np.concatenate([[0], np.cumsum(np.diff(mask.offsets)[counted])]))
    return AuditRow(
        f"step {step}, row {record.row_id}",
        record.tokens.astype(np.int64),
        sampled,
        rollout=record.rollout_logprobs[counted].astype(np.float64),
        trainer=trainer,
        routes=None if record.routes is None else record.routes.experts,
        mask=mask,
        versions=record.versions[counted].astype(str),
        temperature=temperature,
    )


def _miles(path: Path, data: Mapping[str, Any]) -> Iterator[Part]:
    """A training dump of miles: columns of one rank's samples."""
    if int(data.get("cp_size", 1)) != 1:
        raise BundleError(
            "its log-probs are cut over context-parallel ranks", where=str(path), got=data["cp_size"], expected=1,
            fix="Dump without context parallelism.",
        )  # fmt: skip
    columns = data["rollout_data"]
    for number in range(len(columns["tokens"])):
        sample = {
            name: values[number]
            for name, values in columns.items()
            if isinstance(values, list) and len(values) == len(columns["tokens"])
        }
        yield _sample(sample | {"sample_index": sample.get("sample_indices")}, data, number)


def _sample(sample: Mapping[str, Any], data: Mapping[str, Any], number: int) -> Part:
    """One sample of slime or miles: of a rollout dump, or of a training dump, whose log-probs are the trainer's."""
    index = sample.get("sample_index", sample.get("index"))
    name = f"step {data.get('rollout_id', 0)}, sample {number if index is None else index}"
    try:
        tokens = np.asarray(sample["tokens"]).astype(np.int64)
        length = int(np.asarray(sample["response_length" if "response_length" in sample else "response_lengths"]))
        marks = sample.get("loss_mask", sample.get("loss_masks"))
        counted = np.ones(length, bool) if marks is None else np.asarray(marks).astype(bool)
        if len(counted) != length:
            raise RecordRejected("sampled", "a loss mask of another length", where=name, got=len(counted))
        sampled = np.concatenate([np.zeros(len(tokens) - length, bool), counted])
        routes = sample.get("rollout_routed_experts")
        return AuditRow(
            name,
            tokens,
            sampled,
            rollout=_of_response(name, sample.get("rollout_log_probs"), counted),
            trainer=_of_response(name, sample.get("log_probs"), counted),
            advantages=_of_response(name, sample.get("advantages"), counted),
            routes=None if routes is None else np.asarray(routes),
            mask=_kept(name, sample, counted),
            versions=_versions(sample.get("weight_versions"), int(counted.sum())),
        )
    except RecordRejected as error:
        return error
    except (KeyError, ValueError, TypeError) as error:
        return RecordRejected("types", f"a sample without tokens or lengths: {error}", where=name)


def _of_response(name: str, values: Any, counted: Array) -> Array | None:
    if values is None:
        return None
    array = np.asarray(values, np.float64).reshape(-1)
    if len(array) != len(counted):
        raise RecordRejected("lengths", "not one value for each response token", where=name, got=len(array))
    return array[counted]


def _kept(name: str, sample: Mapping[str, Any], counted: Array) -> SamplingMask | None:
    ids, offsets = sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets")
    if ids is None or offsets is None:
        return None
    ids, ends = np.asarray(ids, np.int32), np.asarray(offsets, np.int64)
    sizes: Array = ends[1:] - ends[:-1]
    if len(sizes) != len(counted) or sizes.sum() != len(ids):
        raise RecordRejected("mask_shape", "kept ids do not fit the response", where=name, got=len(sizes))
    kept = ids[np.repeat(counted, sizes)]
    return SamplingMask(kept, np.concatenate([[0], np.cumsum(sizes[counted])]))


def _versions(versions: Any, num_sampled: int) -> Array | None:
    """One version is that of every token. Which tokens several belong to is not recorded."""
    different = {str(version) for version in versions or ()}
    return np.array([different.pop()] * num_sampled) if len(different) == 1 else None


def _verl(path: Path, data: Mapping[str, Any]) -> Iterator[Part]:
    """Tensors of verl's `DataProto.batch`: prompts padded on the left, responses on the right.

    Its routes have a row for each column, of which that of the last token is filler.
    """
    ids, response_mask = np.asarray(data["input_ids"]), np.asarray(data["response_mask"]).astype(bool)
    if "attention_mask" not in data:
        raise BundleError("the dump has no attention_mask", where=str(path), expected="which columns are tokens")
    real_BC, width = np.asarray(data["attention_mask"]).astype(bool), response_mask.shape[1]
    step = "".join(character for character in path.stem if character.isdigit()) or "0"
    for number, real in enumerate(real_BC):
        sampled = np.concatenate([np.zeros(len(real) - width, bool), response_mask[number]])
        columns = {
            ours: None if data.get(theirs) is None else np.asarray(data[theirs][number], np.float64)
            for ours, theirs in (("rollout", "rollout_log_probs"), ("trainer", "old_log_probs"))
        } | {"advantages": None if data.get("advantages") is None else np.asarray(data["advantages"][number])}
        routes = data.get("routed_experts")
        yield AuditRow(
            f"step {step}, row {number}",
            ids[number][real].astype(np.int64),
            sampled[real],
            **{name: None if v is None else v[response_mask[number]].astype(float) for name, v in columns.items()},
            routes=None if routes is None else np.asarray(routes[number])[real][:-1],
        )
