"""Dumps of slime, miles and verl as recordings, as far as they hold the fields. The mapping is in docs/bundles.md.

A dump is taken at the start of a step. Its learner log-probs stand for the behaviour, proximal and current policy
alike, so it shows the engine mismatch and no update. Files are opened with `torch.load(weights_only=True)`: nothing in
them is executed.

Shape letters: B rows and R columns of a micro-batch, S response tokens of one sample.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_trm.errors import BundleError
from moe_trm.recording.scores import ScoredBatch, ScoredUpdate

SUFFIXES = (".pt", ".pth", ".jsonl", ".pkl")
MICRO_BATCH_ROWS = 64
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_NUMPY: list[Any] = [np.ndarray, np.dtype, _RECONSTRUCT, *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQfd")]


@dataclass(frozen=True)
class ForeignRow:
    """One sample; `[S]` float32 tensors of its response, `mask` bool. `reward`: None where the dump has none."""

    mask: Tensor
    rollout_logprobs: Tensor
    learner_logprobs: Tensor
    advantages: Tensor
    reward: float | None
    sample_id: int


@dataclass(frozen=True)
class Dump:
    """The samples of one file, and the step it is of. Which samples answer the same prompt is not known."""

    framework: str
    step: int
    rows: tuple[ForeignRow, ...]


def read(path: Path) -> Dump:
    """One file of any of the three.

    Raises:
        BundleError: not a dump that is known, damaged, cut over ranks, or without the fields that are needed.
    """
    if path.suffix == ".jsonl":
        raise _lacking(path, "verl's generation log has texts and scores only", _VERL_FIX)
    data = open_dump(path)
    if isinstance(data.get("rollout_data"), Mapping):
        return _miles(path, data)
    if isinstance(data.get("samples"), Sequence):
        return _slime(path, data)
    if "rollout_log_probs" in data or "old_log_probs" in data:
        return _verl(path, data)
    raise _lacking(path, f"its keys are {sorted(map(str, data))[:8]}", "Give a dump of slime, miles or verl.")


def open_dump(path: Path) -> Mapping[str, Any]:
    """The dict in a file of `torch.save`. Raises `BundleError` where that needs code to run, or is another object."""
    try:
        with torch.serialization.safe_globals(_NUMPY), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            data = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AssertionError, KeyError) as error:
        raise BundleError(
            "this file cannot be read without executing what is in it, or is damaged",
            where=str(path),
            got=str(error).splitlines()[0],
            expected="a file of tensors, lists, dicts and numbers written by torch.save",
            fix=f"A pickled DataProto of verl is not read: {_VERL_FIX}",
        ) from error
    if not isinstance(data, Mapping):
        raise _lacking(path, f"it holds a {type(data).__name__}", "Give a dump of slime, miles or verl.")
    return data


def by_step(dumps: Sequence[Dump]) -> dict[int, list[ScoredUpdate]]:
    """One update per step, rows of all files of it together; a sample that several ranks wrote counts once."""
    rows: dict[int, dict[tuple[int, int], ForeignRow]] = {}
    for place, dump in enumerate(dumps):
        for number, row in enumerate(dump.rows):
            key = (0, row.sample_id) if row.sample_id >= 0 else (1 + place, number)
            rows.setdefault(dump.step, {}).setdefault(key, row)
    return {step: [_update(list(rows[step].values()))] for step in sorted(rows)}


def _slime(path: Path, data: Mapping[str, Any]) -> Dump:
    samples, raw = data["samples"], data.get("raw_reward")
    rows = []
    for number, sample in enumerate(samples):
        if (
            not isinstance(sample, Mapping)
            or sample.get("log_probs") is None
            or sample.get("rollout_log_probs") is None
        ):
            raise _lacking(
                path,
                f"sample {number} has no log_probs or no rollout_log_probs",
                "Dump with --save-debug-train-data (the rollout dump has no learner log-probs) "
                "and --use-tis or --get-mismatch-metrics.",
            )
        place = int(sample.get("rollout_position", number))
        reward = raw[place] if raw is not None and len(raw) == len(samples) else sample.get("rewards")
        rows.append(_row(path, number, sample, reward, sample_id=int(_or(sample.get("sample_index"), place))))
    return Dump("slime", int(data.get("rollout_id", 0)), tuple(rows))


def _miles(path: Path, data: Mapping[str, Any]) -> Dump:
    if int(data.get("cp_size", 1)) != 1:
        raise _lacking(
            path,
            f"its log-probs are cut over {data['cp_size']} context-parallel ranks",
            "Dump without context parallelism.",
        )
    columns = data["rollout_data"]
    if columns.get("log_probs") is None or columns.get("rollout_log_probs") is None:
        raise _lacking(
            path, f"its columns are {sorted(columns)}", "Dump with --save-debug-train-data and rollout log-probs on."
        )
    names = ("loss_masks", "log_probs", "rollout_log_probs", "advantages", "rewards")
    rows = []
    for number, _ in enumerate(columns["log_probs"]):
        sample = {name: columns[name][number] for name in names if columns.get(name) is not None}
        ids = columns.get("sample_indices")
        rows.append(_row(path, number, sample, sample.get("rewards"), sample_id=int(_or(ids and ids[number], -1))))
    return Dump("miles", int(data.get("rollout_id", 0)), tuple(rows))


def _verl(path: Path, data: Mapping[str, Any]) -> Dump:
    required = ("rollout_log_probs", "old_log_probs", "response_mask", "advantages")
    missing = [name for name in required if not isinstance(data.get(name), Tensor)]
    if missing:
        raise _lacking(path, f"it has no tensor {', '.join(missing)}", _VERL_FIX)
    scores = data.get("token_level_scores", data.get("token_level_rewards"))
    rewards = [None] * len(data["response_mask"]) if scores is None else scores.float().sum(-1).tolist()
    rows = []
    for number, reward in enumerate(rewards):
        names = {"loss_masks": "response_mask", "log_probs": "old_log_probs"} | {
            n: n for n in ("rollout_log_probs", "advantages")
        }
        sample = {ours: data[theirs][number] for ours, theirs in names.items()}
        rows.append(_row(path, number, sample, reward, sample_id=-1))
    digits = "".join(character for character in path.stem if character.isdigit())
    return Dump("verl", int(digits or 0), tuple(rows))


def _row(path: Path, number: int, sample: Mapping[str, Any], reward: Any, *, sample_id: int) -> ForeignRow:
    learner = torch.as_tensor(sample["log_probs"], dtype=torch.float32).flatten()
    rollout = torch.as_tensor(sample["rollout_log_probs"], dtype=torch.float32).flatten()
    if sample.get("loss_masks") is None:
        raise _lacking(
            path, f"sample {number} has no loss mask", "Dump what training reads: it has one of every sample."
        )
    mask = torch.as_tensor(sample["loss_masks"]).flatten().bool()
    if sample.get("advantages") is None:
        raise _lacking(path, f"sample {number} has no advantages", "Dump after advantages were computed.")
    advantages = torch.as_tensor(sample["advantages"], dtype=torch.float32).flatten()
    lengths = {len(mask), len(rollout), len(learner), len(advantages)}
    if len(lengths) > 1:
        raise _lacking(
            path,
            f"sample {number} has columns of {sorted(lengths)} tokens",
            "Every column needs one value per response token.",
        )
    if not all(bool(values[mask].isfinite().all()) for values in (rollout, learner, advantages)):
        raise _lacking(path, f"sample {number} has values that are not finite", "Leave the sample out of the dump.")
    return ForeignRow(mask, rollout, learner, advantages, None if reward is None else float(reward), sample_id)


def _update(rows: Sequence[ForeignRow]) -> ScoredUpdate:
    rows = sorted(rows, key=lambda row: -len(row.mask))
    batches = [_batch(rows[start : start + MICRO_BATCH_ROWS], start) for start in range(0, len(rows), MICRO_BATCH_ROWS)]
    return ScoredUpdate(tuple(batches), len(rows), int(sum(int(row.mask.sum()) for row in rows)))


def _batch(rows: Sequence[ForeignRow], start: int) -> ScoredBatch:
    shape = len(rows), max(1, *(len(row.mask) for row in rows))
    mask = torch.zeros(shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        mask[number, : len(row.mask)] = row.mask

    def spread(name: str) -> Tensor:
        packed = torch.cat([getattr(row, name)[row.mask] for row in rows])
        return torch.zeros(shape).masked_scatter(mask, packed)

    learner, rewards = spread("learner_logprobs"), [row.reward for row in rows]
    return ScoredBatch(
        mask=mask,
        rollout_logprobs=spread("rollout_logprobs"),
        anchor_logprobs=learner,
        current_logprobs=learner,
        advantages=spread("advantages"),
        turn_ids=torch.zeros(shape, dtype=torch.int16),
        versions=torch.where(mask, 0, -1).int(),
        sample_ids=torch.arange(start, start + len(rows)),
        group_ids=torch.full((len(rows),), -1),
        rewards=None if None in rewards else torch.tensor(rewards),
    )


_VERL_FIX = (
    "in the trainer, once advantages are there: torch.save({k: batch.batch[k] for k in ("
    "'rollout_log_probs', 'old_log_probs', 'response_mask', 'advantages', 'token_level_scores')}, f'{step}.pt')"
)


def _lacking(path: Path, how: str, fix: str) -> BundleError:
    return BundleError(
        "this dump cannot be judged",
        where=str(path),
        got=how,
        expected="log-probs of the rollout and of the learner, loss mask and advantages of every sample",
        fix=fix,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
