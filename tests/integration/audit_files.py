"""Rows of an audit in the files of each framework, to the letter of what its own writer makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from moe_trm.tools.audit.dump import AuditRow

Write = Callable[[Path, Sequence[AuditRow]], list[Path]]


def plain(folder: Path, rows: Sequence[AuditRow]) -> list[Path]:
    """JSONL; prime-rl and TRL write it by the lines in docs/healthy.md."""
    lines = []
    for row in rows:
        line: dict[str, Any] = {"id": row.name, "tokens": row.tokens.tolist(), "sampled": row.sampled.tolist()}
        arrays = {"rollout_logprobs": row.rollout, "trainer_logprobs": row.trainer, "routes": row.routes}
        line |= {name: values.tolist() for name, values in arrays.items() if values is not None}
        if row.mask is not None:
            line["kept_ids"] = [ids.tolist() for ids in np.split(row.mask.ids, row.mask.offsets[1:-1])]
        lines.append(json.dumps(line | {"versions": "7"}))
    (folder / "3.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [folder / "3.jsonl"]


def arrays(folder: Path, rows: Sequence[AuditRow]) -> list[Path]:
    """The same in safetensors."""
    columns: dict[str, list[Any]] = {"tokens": [row.tokens for row in rows], "sampled": [row.sampled for row in rows]}
    names = {"rollout_logprobs": "rollout", "trainer_logprobs": "trainer", "routes": "routes"}
    columns |= {name: [getattr(row, field) for row in rows] for name, field in names.items()}
    masks = [row.mask for row in rows if row.mask is not None]
    if masks:
        columns |= {"kept_ids": [mask.ids for mask in masks], "kept_sizes": [np.diff(mask.offsets) for mask in masks]}
    joined = {name: np.concatenate(parts) for name, parts in columns.items() if parts[0] is not None}
    save_file(joined | {"lengths": np.array([len(row.tokens) for row in rows])}, folder / "3.safetensors")
    return [folder / "3.safetensors"]


def _rollout_sample(number: int, row: AuditRow, **fields: Any) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "index": number,
        "tokens": row.tokens.tolist(),
        "response_length": row.num_sampled,
        "loss_mask": [1] * row.num_sampled,
        "weight_versions": ["7"],
        **fields,
    }
    if row.rollout is not None:
        sample["rollout_log_probs"] = row.rollout.tolist()
    if row.routes is not None:
        sample["rollout_routed_experts"] = torch.from_numpy(np.ascontiguousarray(row.routes)).int()
    if row.mask is not None:
        sample["rollout_top_p_token_ids"] = row.mask.ids.tolist()
        sample["rollout_top_p_token_offsets"] = row.mask.offsets.tolist()
    return sample


def slime(folder: Path, rows: Sequence[AuditRow], **fields: Any) -> list[Path]:
    """`--save-debug-rollout-data` and `--save-debug-train-data`."""
    samples = [_rollout_sample(n, row, **fields) for n, row in enumerate(rows)]
    torch.save({"rollout_id": 3, "samples": samples}, folder / "rollout_3.pt")
    if rows[0].trainer is None:
        return [folder / "rollout_3.pt"]
    training = [
        {
            "sample_index": n,
            "tokens": torch.from_numpy(row.tokens),
            "response_lengths": row.num_sampled,
            "loss_masks": torch.ones(row.num_sampled, dtype=torch.int32),
            "log_probs": torch.from_numpy(row.trainer),
        }
        for n, row in enumerate(rows)
        if row.trainer is not None
    ]
    torch.save({"format_version": 2, "rollout_id": 3, "samples": training}, folder / "train_3.pt")
    return [folder / "rollout_3.pt", folder / "train_3.pt"]


def miles(folder: Path, rows: Sequence[AuditRow]) -> list[Path]:
    """The rollout dump of miles, and one training file."""
    [rollout, *_] = slime(folder, rows, rollout_indexer_topk=None)
    if rows[0].trainer is None:
        return [rollout]
    columns = {
        "tokens": [torch.from_numpy(row.tokens) for row in rows],
        "response_lengths": [row.num_sampled for row in rows],
        "loss_masks": [torch.ones(row.num_sampled) for row in rows],
        "log_probs": [torch.from_numpy(row.trainer) for row in rows if row.trainer is not None],
        "sample_indices": [*range(len(rows))],
    }
    torch.save({"rollout_id": 3, "rank": 0, "rollout_data": columns, "cp_size": 1}, folder / "train_3_0.pt")
    return [rollout, folder / "train_3_0.pt"]


def verl(folder: Path, rows: Sequence[AuditRow]) -> list[Path]:
    """`DataProto.batch`, with two columns of padding on either side."""
    data: dict[str, list[Any]] = {}
    for row in rows:
        pad, size = np.zeros(2), row.num_sampled
        columns: dict[str, Any] = {"response_mask": [*np.ones(size), 0, 0], "input_ids": [*pad, *row.tokens, *pad]}
        columns["attention_mask"] = [*pad, *np.ones(len(row.tokens)), *pad]
        for name, values in (("rollout_log_probs", row.rollout), ("old_log_probs", row.trainer)):
            columns |= {} if values is None else {name: [*values, *pad]}
        if row.routes is not None:
            routes = np.zeros((len(row.tokens) + 4, *row.routes.shape[1:]), np.int16)
            routes[2 : len(row.routes) + 2] = row.routes
            columns["routed_experts"] = routes
        for name, values in columns.items():
            integers = name in ("input_ids", "attention_mask", "response_mask", "routed_experts")
            data.setdefault(name, []).append(torch.as_tensor(np.asarray(values, np.int64 if integers else np.float64)))
    torch.save({name: torch.stack(values) for name, values in data.items()}, folder / "3.pt")
    return [folder / "3.pt"]


def nemo_rl(folder: Path, rows: Sequence[AuditRow]) -> list[Path]:
    """`train_data_stepN.jsonl`, without routes."""
    lines = []
    for row in rows:
        before, pad = [0.0] * int(np.argmax(row.sampled)), [0.0] * 2
        line: dict[str, Any] = {"token_ids": [*row.tokens.tolist(), 0, 0], "input_lengths": len(row.tokens)}
        line |= {"token_loss_mask": [*row.sampled.astype(float).tolist(), *pad], "sample_loss_mask": 1.0}
        for name, values in (("generation_logprobs", row.rollout), ("prev_logprobs", row.trainer)):
            line |= {} if values is None else {name: [*before, *values.tolist(), *pad]}
        lines.append(json.dumps(line))
    (folder / "train_data_step3.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [folder / "train_data_step3.jsonl"]


LAYOUTS: dict[str, Write] = {
    "slime": slime, "miles": miles, "verl": verl, "nemo-rl": nemo_rl, "plain": plain, "arrays": arrays,
}  # fmt: skip
