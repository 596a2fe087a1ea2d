"""Reader of NeMo-RL's log of training data, `train_data_stepN.jsonl`: one sample a line, padded on the right.

Its log-probs have one value for each token, 0 where there is none. A line has no routes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.tools.audit.dump import AuditRow

KEYS = {"token_ids", "input_lengths", "token_loss_mask"}
FIELDS = {"rollout": "generation_logprobs", "trainer": "prev_logprobs", "advantages": "advantages"}


def is_nemo_rl(path: Path) -> bool:
    """True for a file whose first line has this layout."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(next(islice((line for line in file if line.strip()), 1), "null"))
    except (ValueError, OSError):
        return False
    return isinstance(first, dict) and first.keys() >= KEYS


def read_nemo_rl(path: Path) -> Iterator[AuditRow | RecordRejected]:
    """The rows of one file; in place of one that does not fit, why. Samples that train nothing are left out.

    Raises `BundleError` for a line of another layout.
    """
    step = "".join(character for character in path.stem if character.isdigit()) or "0"
    for number, line in enumerate(filter(str.strip, path.read_text(encoding="utf-8").splitlines())):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise BundleError("a line is no JSON", where=f"{path}, line {number + 1}", got=str(error)) from error
        if not isinstance(values, dict) or not values.keys() >= KEYS:
            raise BundleError(
                "a line of another layout", where=f"{path}, line {number + 1}", expected=f"keys {sorted(KEYS)}"
            )
        if _number(values.get("sample_loss_mask", 1.0)):
            yield _row(f"step {step}, row {number}", values)


def _row(name: str, values: Mapping[str, Any]) -> AuditRow | RecordRejected:
    try:
        length = int(_number(values["input_lengths"]))
        tokens = np.asarray(values["token_ids"])[:length]
        sampled = np.asarray(values["token_loss_mask"])[:length].astype(bool)
        columns = {
            field: np.asarray(values[key], np.float64)[:length][sampled]
            for field, key in FIELDS.items()
            if values.get(key) is not None
        }
    except (ValueError, TypeError, IndexError) as error:
        return RecordRejected("types", f"values are no numbers of each token: {error}", where=name)
    return AuditRow(name, tokens.astype(np.int64) if tokens.dtype.kind in "iu" else tokens, sampled, **columns)


def _number(value: Any) -> float:
    """A number, or the one in a list."""
    return float(np.asarray(value, np.float64).reshape(-1)[0])
