"""Every layout gives the same rows, and what a dump lacks or breaks is listed and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from moe_trm.errors import BundleError
from moe_trm.recording.bundle import BundleReader
from moe_trm.tools.audit.dump import AuditRow
from moe_trm.tools.audit.frameworks import read_dump

TOKENS = ([5, 6, 7, 8, 9], [5, 6, 3, 4])
PROMPT = 2
MARKS = ([1, 0, 1], [1, 1])
ROLLOUT = ([-1.0, 0.0, -3.0], [-0.5, -0.25])
TRAINER = ([-1.5, 0.0, -3.5], [-0.75, -0.5])
ADVANTAGES = ([0.5, 0.0, 0.5], [-0.5, -0.5])
KEPT = ([[7, 1], [], [9]], [[3], [4, 2]])
ROUTES = [np.arange((len(tokens) - 1) * 6).reshape(-1, 3, 2) % 7 for tokens in TOKENS]
ALL = ("rollout", "trainer", "advantages", "routes", "mask", "versions", "temperature")


def of_sampled(values: list[Any], marks: list[int]) -> list[Any]:
    return [value for value, mark in zip(values, marks, strict=True) if mark]


def plain_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": f"step 3, sample {7 + n}",
            "tokens": tokens,
            "sampled": [0] * PROMPT + MARKS[n],
            "rollout_logprobs": of_sampled(ROLLOUT[n], MARKS[n]),
            "trainer_logprobs": of_sampled(TRAINER[n], MARKS[n]),
            "advantages": of_sampled(ADVANTAGES[n], MARKS[n]),
            "routes": ROUTES[n].tolist(),
            "kept_ids": of_sampled(KEPT[n], MARKS[n]),
            "versions": 12,
            "temperature": 0.7,
        }
        for n, tokens in enumerate(TOKENS)
    ]


def jsonl(folder: Path) -> list[Path]:
    path = folder / "3.jsonl"
    path.write_text("\n".join(map(json.dumps, plain_rows())), encoding="utf-8")
    return [path]


def arrays(folder: Path) -> list[Path]:
    rows = plain_rows()
    kept = [ids for row in rows for ids in row["kept_ids"]]
    joined: dict[str, np.ndarray] = {
        name: np.concatenate([np.asarray(row[name]) for row in rows])
        for name in ("tokens", "sampled", "rollout_logprobs", "trainer_logprobs", "advantages", "routes")
    }
    joined |= {"lengths": np.array([5, 4]), "kept_ids": np.concatenate([np.array(ids) for ids in kept])}
    joined |= {"kept_sizes": np.array([len(ids) for ids in kept]), "versions": np.full(4, 12)}
    save_file(joined | {"temperature": np.full(2, 0.7)}, folder / "3.safetensors")
    return [folder / "3.safetensors"]


def slime_rollout(path: Path, **changes: Any) -> Path:
    """`--save-debug-rollout-data`."""
    samples = [
        {
            "index": 7 + n,
            "tokens": tokens,
            "response_length": len(MARKS[n]),
            "loss_mask": MARKS[n],
            "rollout_log_probs": ROLLOUT[n],
            "rollout_routed_experts": torch.from_numpy(ROUTES[n]).int(),
            "rollout_top_p_token_ids": [i for ids in KEPT[n] for i in ids],
            "rollout_top_p_token_offsets": [0, *np.cumsum([len(ids) for ids in KEPT[n]]).tolist()],
            "weight_versions": ["12"],
            "status": "completed",
            **changes,
        }
        for n, tokens in enumerate(TOKENS)
    ]
    torch.save({"rollout_id": 3, "samples": samples}, path)
    return path


def slime_training(path: Path) -> Path:
    """`--save-debug-train-data`, format version 2."""
    samples = [
        {
            "sample_index": 7 + n,
            "rollout_position": n,
            "tokens": torch.tensor(tokens),
            "response_lengths": len(MARKS[n]),
            "total_lengths": len(tokens),
            "loss_masks": torch.tensor(MARKS[n], dtype=torch.int32),
            "rollout_log_probs": torch.tensor(ROLLOUT[n]),
            "log_probs": torch.tensor(TRAINER[n]),
            "advantages": torch.tensor(ADVANTAGES[n]),
        }
        for n, tokens in enumerate(TOKENS)
    ]
    torch.save({"format_version": 2, "rollout_id": 3, "samples": samples}, path)
    return path


def slime(folder: Path) -> list[Path]:
    return [slime_rollout(folder / "rollout_3.pt"), slime_training(folder / "train_3.pt")]


def miles(folder: Path) -> list[Path]:
    columns = {
        "tokens": [torch.tensor(tokens) for tokens in TOKENS],
        "response_lengths": [len(marks) for marks in MARKS],
        "loss_masks": [torch.tensor(marks) for marks in MARKS],
        "log_probs": [torch.tensor(values) for values in TRAINER],
        "advantages": [torch.tensor(values) for values in ADVANTAGES],
        "sample_indices": [7, 8],
    }
    torch.save({"rollout_id": 3, "rank": 0, "rollout_data": columns, "cp_size": 1}, folder / "train_3_0.pt")
    return [slime_rollout(folder / "rollout_3.pt", rollout_indexer_topk=None), folder / "train_3_0.pt"]


def verl(folder: Path) -> list[Path]:
    """Prompts padded on the left to 3 columns, responses on the right to 3."""
    data: dict[str, list[Any]] = {}
    for n, tokens in enumerate(TOKENS):
        pad = 3 - len(MARKS[n])
        of_response: dict[str, Any] = {"response_mask": MARKS, "rollout_log_probs": ROLLOUT, "old_log_probs": TRAINER}
        columns: dict[str, Any] = {name: [*values[n], *[0] * pad] for name, values in of_response.items()}
        columns |= {"advantages": [*ADVANTAGES[n], *[0] * pad], "input_ids": [0, *tokens, *[0] * pad]}
        columns["attention_mask"] = [0, *[1] * len(tokens), *[0] * pad]
        routes = np.zeros((6, 3, 2), np.int16)
        routes[1 : len(tokens)] = ROUTES[n]
        for name, values in {**columns, "routed_experts": routes}.items():
            data.setdefault(name, []).append(torch.as_tensor(np.asarray(values)))
    torch.save({name: torch.stack(values) for name, values in data.items()}, folder / "3.pt")
    return [folder / "3.pt"]


def nemo_rl(folder: Path) -> list[Path]:
    """`train_data_stepN.jsonl`, and a sample that trains nothing."""
    lines = []
    for n, tokens in enumerate(TOKENS):
        pad, before = [0] * (6 - len(tokens)), [0] * PROMPT
        of_tokens = {"generation_logprobs": ROLLOUT, "prev_logprobs": TRAINER, "advantages": ADVANTAGES}
        columns: dict[str, Any] = {name: [*before, *values[n], *pad] for name, values in of_tokens.items()}
        columns |= {"token_ids": tokens + pad, "token_loss_mask": [*before, *MARKS[n], *pad]}
        columns |= {"input_lengths": len(tokens), "sample_loss_mask": 1.0, "rewards": 0.5, "content": ["a", "b"]}
        lines.append(columns)
    lines.append(lines[0] | {"sample_loss_mask": 0.0})
    (folder / "train_data_step3.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return [folder / "train_data_step3.jsonl"]


LACKING = {jsonl: set(), arrays: set(), slime: {"temperature"}, miles: {"temperature"},
           verl: {"temperature", "mask", "versions"},
           nemo_rl: {"temperature", "mask", "versions", "routes"}}  # fmt: skip


@pytest.mark.parametrize("write", list(LACKING))
def test_every_layout_gives_the_same_rows(tmp_path: Path, write: Any) -> None:
    dump = read_dump(write(tmp_path))
    assert (len(dump.rows), dict(dump.rejected)) == (2, {})
    assert set(dump.lacking()) == LACKING[write]
    for n, row in enumerate(dump.rows):
        assert row.tokens.tolist() == TOKENS[n]
        assert np.flatnonzero(row.sampled).tolist() == [PROMPT + place for place in np.flatnonzero(MARKS[n])]
        for name, values in (("rollout", ROLLOUT), ("trainer", TRAINER), ("advantages", ADVANTAGES)):
            assert getattr(row, name).tolist() == pytest.approx(of_sampled(values[n], MARKS[n]))
        if "routes" not in LACKING[write]:
            assert row.routes is not None
            assert row.routes.tolist() == ROUTES[n].tolist()
        if "mask" not in LACKING[write]:
            assert row.mask is not None
            kept = np.split(row.mask.ids, row.mask.offsets[1:-1])
            assert [ids.tolist() for ids in kept] == of_sampled(KEPT[n], MARKS[n])
            assert row.versions is not None
            assert set(row.versions) == {"12"}


def test_scores_of_a_learner_are_joined_by_name(tmp_path: Path) -> None:
    scores = [{k: row[k] for k in ("id", "tokens", "sampled", "trainer_logprobs")} for row in plain_rows()]
    (tmp_path / "scores.jsonl").write_text("\n".join(map(json.dumps, scores)), encoding="utf-8")
    dump = read_dump([slime_rollout(tmp_path / "rollout_3.pt")], tmp_path / "scores.jsonl")
    assert "trainer" not in dump.lacking()
    assert "advantages" in dump.lacking()
    with pytest.raises(BundleError, match="no row of the learner's scores"):
        read_dump([slime_rollout(tmp_path / "other.pt", index=99)], tmp_path / "scores.jsonl")


def broken(**changes: Any) -> list[dict[str, Any]]:
    first, second = plain_rows()
    return [{key: value for key, value in (first | changes).items() if value is not None}, second]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout_logprobs": [-1.0]}, "rollout"),
        ({"rollout_logprobs": [-1.0, float("nan")]}, "rollout_finite"),
        ({"routes": ROUTES[0][:-1].tolist()}, "route_rows"),
        ({"kept_ids": [[7]]}, "mask_shape"),
        ({"sampled": [1, 0, 0, 0, 0]}, "sampled"),
        ({"sampled": None}, "sampled"),
        ({"tokens": ["a", "b"]}, "tokens"),
        ({"routes": [[1], [2, 3]]}, "types"),
    ],
)
def test_a_row_that_does_not_fit_is_counted(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, broken(**changes))), encoding="utf-8")
    dump = read_dump([tmp_path / "a.jsonl"])
    assert (len(dump.rows), dict(dump.rejected)) == (1, {reason: 1})


def test_other_tokens_under_the_same_name_are_not_joined(tmp_path: Path) -> None:
    slime_rollout(tmp_path / "a.pt", tokens=[1, 2, 3, 4, 5], loss_mask=[1, 1, 1], rollout_log_probs=[-1.0] * 3,
                  response_length=3, rollout_routed_experts=None, rollout_top_p_token_ids=None)  # fmt: skip
    dump = read_dump([tmp_path / "a.pt", slime_training(tmp_path / "b.pt")])
    assert dump.rejected == {"joined": 2}


def test_several_versions_of_an_answer_are_not_spread_over_its_tokens(tmp_path: Path) -> None:
    dump = read_dump([slime_rollout(tmp_path / "a.pt", weight_versions=["12", "13"])])
    assert dump.lacking()["versions"] == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", '{"tokens": [1, 2], "logprobs": [1]}'), ("a.jsonl", "no"), ("a.pt", "no"), ("a.safetensors", "no")],
)
def test_a_file_of_another_layout_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(BundleError):
        read_dump([tmp_path / name])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no dump here"):
        read_dump([tmp_path / "none.pt"])
    torch.save({"old_log_probs": torch.zeros(1, 2)}, tmp_path / "a.pt")
    with pytest.raises(BundleError, match="no token ids"):
        read_dump([tmp_path / "a.pt"])


def test_rows_of_one_prompt_are_recognised() -> None:
    row = AuditRow("a", np.array([1, 2, 3]), np.array([False, False, True]))
    assert row.prompt == AuditRow("b", np.array([1, 2, 9]), row.sampled).prompt


def test_a_bundle_of_this_project() -> None:
    folder = Path(__file__).resolve().parents[3] / "data" / "bundle-6"
    dump, records = read_dump([folder]), BundleReader(str(folder)).read(1)
    assert len(dump.rows) + sum(dump.rejected.values()) == len(records)
    by_name = {row.name: row for row in dump.rows}
    for record in records:
        row = by_name[f"step 1, row {record.row_id}"]
        assert row.num_sampled == record.num_scored
        assert (row.routes is None) == (record.routes is None)
        assert row.mask is None or len(row.mask.offsets) == record.num_scored + 1
        assert row.temperature is None
