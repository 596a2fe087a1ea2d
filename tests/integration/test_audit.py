"""Dumps of tiny models that sampled with rounding: clean ones raise no alarm, and each planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_trm.cli import main
from moe_trm.errors import BundleError, ConfigError
from moe_trm.tools.audit.dump import AuditDump, AuditRow
from moe_trm.tools.audit.examine import Audit, AuditOptions, examine_dump
from moe_trm.tools.audit.plain import mask_of
from tests.integration.audit_support import Bench, Engine, P, S, T, dump_of, rows_of, sample, trained


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.of("qwen3_moe", tmp_path_factory.mktemp("audit") / "qwen3_moe")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """In bfloat16 these random weights flip far more experts than those of trained models."""
    return Bench.of("mixtral", tmp_path_factory.mktemp("audit") / "mixtral", dtype="float32", noise=5e-4)


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def bench(request: pytest.FixtureRequest, qwen: Bench, mixtral: Bench) -> Bench:
    return qwen if request.param == "qwen3_moe" else mixtral


def audit(bench: Bench, of_dump: Sequence[AuditRow], **options: float) -> Audit:
    return examine_dump(dump_of(of_dump), "dump", bench.reference, AuditOptions(**options), lambda _: None)  # type: ignore[arg-type]


def faults(result: Audit) -> dict[str, str]:
    """The cause of every question with a fault."""
    return {answer.question: answer.cause for answer in result.answers if answer.status == "fail"}


def test_a_clean_dump_raises_no_alarm(bench: Bench) -> None:
    result = audit(bench, bench.rows)
    assert (faults(result), result.healthy, result.power) == ({}, True, 1.0)
    (routes,) = (answer for answer in result.answers if answer.question == "routes")
    assert "Excluded: routes that are shifted" in routes.excluded
    (split,) = (answer for answer in result.answers if answer.question == "rounding and routing")
    assert 0 < split.figures["replayed_k3"] < split.figures["native_k3"]
    assert set(result.lacking) == {"trainer", "mask", "advantages"}


def test_clean_masks_and_a_trainer_that_renormalises_alike(qwen: Bench) -> None:
    rows = masked(qwen)
    assert faults(audit(qwen, [replace(row, trainer=row.rollout) for row in rows])) == {}


def masked(bench: Bench, temperature: float = 1.0) -> list[AuditRow]:
    ids = sample(bench.engine, top_p=0.9)
    return rows_of(ids, bench.engine.score(ids, temperature), top_p=0.9)


def some(rows: Sequence[AuditRow], changed: Sequence[AuditRow], numbers: Sequence[int]) -> list[AuditRow]:
    return [changed[n] if n in numbers else row for n, row in enumerate(rows)]


def with_routes(rows: Sequence[AuditRow], routes: Sequence[np.ndarray]) -> list[AuditRow]:
    return [replace(row, routes=ids) for row, ids in zip(rows, routes, strict=True)]


ROUTE_FAULTS = {
    "shifted: all": "shifted",
    "shifted: one row": "shifted",
    "request: other prompts": "request",
    "request: one prompt": "request",
    "padded: zeros": "padded",
    "padded: repeated": "padded",
    "layer: two": "layer",
    "layer: all": "layer",
    "older weights: all": "older weights",
    "older weights: two rows": "older weights",
}


def planted(bench: Bench, fault: str) -> list[AuditRow]:
    rows, late = bench.rows, (np.arange(T - 1) > P + S // 2)[:, None, None]
    routes = [row.routes for row in rows if row.routes is not None]
    layers = routes[0].shape[1]
    changes = {
        "shifted: all": lambda: [np.roll(ids, -1, 0) for ids in routes],
        "shifted: one row": lambda: [np.roll(ids, 1, 0) if n == 3 else ids for n, ids in enumerate(routes)],
        "request: other prompts": lambda: [routes[{1: 7, 7: 1}.get(n, n)] for n in range(len(routes))],
        "request: one prompt": lambda: [routes[{1: 2, 2: 1}.get(n, n)] for n in range(len(routes))],
        "padded: zeros": lambda: [np.where(late & (n == 3), 0, ids) for n, ids in enumerate(routes)],
        "padded: repeated": lambda: [np.where(late, ids[P + S // 2], ids) for ids in routes],
        "layer: two": lambda: [ids[:, [1, 0, *range(2, layers)]] for ids in routes],
        "layer: all": lambda: [np.roll(ids, 1, axis=1) for ids in routes],
        "older weights: all": lambda: list(Engine(bench.folder, noise=0.1).score(bench.ids).experts),
        "older weights: two rows": lambda: [
            old if n < 2 else ids
            for n, (ids, old) in enumerate(
                zip(routes, Engine(bench.folder, noise=0.1).score(bench.ids).experts, strict=True)
            )
        ],
    }
    return with_routes(rows, changes[fault]())


@pytest.mark.parametrize("fault", list(ROUTE_FAULTS))
def test_wrong_routes_are_named(qwen: Bench, fault: str) -> None:
    result = audit(qwen, planted(qwen, fault))
    answers = [answer for answer in result.answers if answer.status == "fail"]
    answer = answers[0]
    assert (answer.question, answer.cause) == ("routes", ROUTE_FAULTS[fault]), [a.check.says for a in result.answers]
    # One of two rows with routes of older weights may look like a row of other weights.
    also = {"log-probs of the rollout"} if fault == "older weights: two rows" else set[str]()
    assert {answer.question for answer in answers} <= {"routes"} | also
    assert len(answers) == 1 or also or len(answer.rows) > 0.9 * len(qwen.rows), "one row in ten has another cause"
    assert answer.fix
    if "one row" in fault:
        assert answer.rows == ("row 3",)
    if fault == "padded: zeros":
        assert S // 4 < answer.tokens < S


@pytest.mark.parametrize("fault", ["shifted: one row", "layer: two", "older weights: all"])
def test_wrong_routes_of_another_family(mixtral: Bench, fault: str) -> None:
    assert faults(audit(mixtral, planted(mixtral, fault))) == {"routes": ROUTE_FAULTS[fault]}


def test_another_temperature(bench: Bench) -> None:
    result = audit(bench, rows_of(bench.ids, bench.engine.score(bench.ids, 1.1)))
    assert faults(result) == {"log-probs of the rollout": "temperature"}
    (answer,) = (answer for answer in result.answers if answer.status == "fail")
    assert answer.figures["temperature"] == pytest.approx(1.1, abs=0.04)


def test_other_weights_in_all_rows_and_in_two(bench: Bench) -> None:
    other = rows_of(bench.ids, Engine(bench.folder, noise=0.1).score(bench.ids))
    other = [replace(row, versions=np.array(["6"] * S)) for row in other]
    question, cause = "log-probs of the rollout", "another version of the weights"
    assert faults(audit(bench, other))[question] == cause
    (answer,) = (a for a in audit(bench, some(bench.rows, other, (0, 1))).answers if a.question == question and a.rows)
    assert (answer.cause, answer.rows, answer.tokens) == (cause, ("row 0", "row 1"), 2 * S)
    assert "By weight version, k3 is 6: " in answer.sentence


def test_the_engine_that_is_off_is_named(qwen: Bench) -> None:
    off = Engine(qwen.folder, noise=0.1).score(qwen.ids)
    result = audit(qwen, trained(qwen.rows, off))
    assert faults(result) == {
        "log-probs of the trainer": "another version of the weights",
        "which engine is off": "trainer",
    }
    clean = audit(qwen, trained(qwen.rows, qwen.scored))
    assert faults(clean) == {}


def test_masks_that_are_not_those_of_the_sampler(qwen: Bench) -> None:
    rows = masked(qwen)
    kept = [np.split(row.mask.ids, row.mask.offsets[1:-1]) for row in rows if row.mask is not None]
    late = [replace(row, mask=mask_of([*ids[1:], ids[0]])) for row, ids in zip(rows, kept, strict=True)]
    assert faults(audit(qwen, late))["sampling masks"] == "shifted"
    swapped = [replace(row, mask=rows[{1: 7, 7: 1}.get(n, n)].mask) for n, row in enumerate(rows)]
    result = audit(qwen, swapped)
    assert faults(result)["sampling masks"] == "not the sampler's"
    (answer,) = (answer for answer in result.answers if answer.question == "sampling masks")
    assert answer.rows == ("row 1", "row 7")


def test_log_probs_over_another_support(qwen: Bench) -> None:
    rows = masked(qwen)
    question = {"support of log-probs": "another support"}
    ids = np.stack([row.tokens for row in rows])
    assert faults(audit(qwen, [replace(row, mask=None) for row in rows], top_p=0.9)) == question
    import torch

    over_vocabulary = qwen.engine.score(torch.from_numpy(ids))
    assert faults(audit(qwen, trained(rows, over_vocabulary))) == question
    assert faults(audit(qwen, rows_of(torch.from_numpy(ids), over_vocabulary), top_p=0.9)) == {}


def test_questions_without_their_fields_stay_open(qwen: Bench) -> None:
    rows = [replace(row, temperature=None, routes=None) for row in qwen.rows]
    result = audit(qwen, rows)
    assert {"routes", "temperature"} <= set(result.lacking)
    assert {answer.status for answer in result.answers} == {"ok", "skip"}
    assert audit(qwen, qwen.rows, rows=4).answers[0].sentence == "4 of 18 rows scored."


def test_what_does_not_fit_the_checkpoint_is_refused(qwen: Bench) -> None:
    wide = [replace(row, routes=np.zeros((T - 1, 9, 2), int)) for row in qwen.rows]
    with pytest.raises(BundleError, match="no row of the sample"):
        audit(qwen, wide)
    result = examine_dump(
        AuditDump("plain", (wide[0], *qwen.rows[1:])), "dump", qwen.reference, AuditOptions(), lambda _: None
    )
    assert result.rejected == {"route_shape": 1}
    with pytest.raises(ConfigError, match="another temperature"):
        audit(qwen, qwen.rows, temperature=0.5)


def test_the_command_writes_a_page_and_json(
    qwen: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def write(name: str, rows: Sequence[AuditRow]) -> str:
        lines = [
            {"id": f"<b>{row.name}</b>", "tokens": row.tokens.tolist(), "prompt_length": P, "temperature": 1.0}
            | {"rollout_logprobs": rollout.tolist(), "routes": routes.tolist()}
            for row in rows
            if (rollout := row.rollout) is not None and (routes := row.routes) is not None
        ]
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        return name

    checkpoint = ["--checkpoint", str(qwen.folder), "--device", "cpu"]
    assert main(["audit", write("clean.jsonl", qwen.rows), *checkpoint]) == 0
    assert main(["audit", write("bad.jsonl", planted(qwen, "shifted: one row")), *checkpoint, "--json", "a.json"]) == 1
    assert "routes: shifted" in capsys.readouterr().out
    document, page = json.loads((tmp_path / "a.json").read_text()), (tmp_path / "audit.html").read_text()
    assert not document["healthy"]
    assert "routes: shifted" in page
    assert "<b>row 3</b>" not in page
    assert "default-src 'none'" in page
