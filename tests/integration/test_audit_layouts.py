"""Faults of the kinds that public threads report, in the files of each framework, and clean files that raise no alarm.

The rows are of tiny models that sampled with rounding (`audit_support`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_trm.tools.audit.dump import AuditRow
from moe_trm.tools.audit.examine import Audit, AuditOptions, examine_dump
from moe_trm.tools.audit.frameworks import read_dump
from moe_trm.tools.audit.plain import mask_of
from tests.integration.audit_files import LAYOUTS
from tests.integration.audit_support import Bench, Engine, P, S, T, rows_of, sample, trained

FAMILIES = {"qwen3_moe": {}, "mixtral": {"dtype": "float32", "noise": 5e-4}, "olmoe": {}}
"""In bfloat16 the random weights of Mixtral flip far more experts than those of trained models."""
Rows = list[AuditRow]
Plant = Callable[[Bench], Rows]
ROLLOUT, TRAINER, SUPPORT = "log-probs of the rollout", "log-probs of the trainer", "support of log-probs"
WEIGHTS = "another version of the weights"


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    folder = tmp_path_factory.mktemp("audit")
    return {family: Bench.of(family, folder / family, **options) for family, options in FAMILIES.items()}  # type: ignore[arg-type]


def audit(
    bench: Bench,
    layout: str,
    folder: Path,
    rows: Sequence[AuditRow],
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
) -> Audit:
    dump = read_dump(LAYOUTS[layout](folder, rows))
    assert len(dump.rows) == len(rows), dump.rejected
    options = AuditOptions(temperature=temperature, top_p=top_p)
    return examine_dump(dump, layout, bench.reference, options, lambda _: None)


def causes(result: Audit) -> dict[str, set[str]]:
    """By question the causes that are faults."""
    found: dict[str, set[str]] = {}
    for answer in result.answers:
        if answer.status == "fail":
            found.setdefault(answer.question, set()).add(answer.cause)
    return found


def routed(change: Callable[[int, np.ndarray], np.ndarray]) -> Plant:
    """Rows whose routes are changed, by number and `[T-1, L, K]` ids."""

    def plant(bench: Bench) -> Rows:
        return [
            replace(row, routes=change(n, row.routes)) for n, row in enumerate(bench.rows) if row.routes is not None
        ]

    return plant


def from_row(number: Callable[[int], int], start: int = 0) -> Plant:
    """Routes of another row, from token `start` on."""

    def plant(bench: Bench) -> Rows:
        routes = [row.routes for row in bench.rows if row.routes is not None]
        late = (np.arange(T - 1) >= start)[:, None, None]
        return [replace(row, routes=np.where(late, routes[number(n)], routes[n])) for n, row in enumerate(bench.rows)]

    return plant


def off(bench: Bench) -> Engine:
    """An engine with other weights."""
    return Engine(bench.folder, noise=0.1)


def older_routes(bench: Bench) -> Rows:
    old = off(bench).score(bench.ids).experts
    return [replace(row, routes=old[n]) for n, row in enumerate(bench.rows)]


def of_engine(make: Callable[[Bench], Engine], *, trains: bool = False) -> Plant:
    """The log-probs of this engine in place of the rollout's, or of the trainer's."""

    def plant(bench: Bench) -> Rows:
        scored = make(bench).score(bench.ids)
        return trained(bench.rows, scored) if trains else rows_of(bench.ids, scored)

    return plant


def in_rows(plant: Plant, number: int) -> Plant:
    """The fault in the first rows only."""
    return lambda bench: [
        changed if n < number else row for n, (row, changed) in enumerate(zip(bench.rows, plant(bench), strict=True))
    ]


def at_temperature(value: float, *, trains: bool = False) -> Plant:
    def plant(bench: Bench) -> Rows:
        scored = bench.engine.score(bench.ids, value)
        return trained(bench.rows, scored) if trains else rows_of(bench.ids, scored)

    return plant


def values_of(change: Callable[[list[np.ndarray]], list[np.ndarray]], *, trains: bool = False) -> Plant:
    """Rollout log-probs moved to other places, or the trainer's copies of them."""

    def plant(bench: Bench) -> Rows:
        moved = change([row.rollout for row in bench.rows if row.rollout is not None])
        field = "trainer" if trains else "rollout"
        return [replace(row, **{field: values}) for row, values in zip(bench.rows, moved, strict=True)]  # type: ignore[arg-type]

    return plant


def masked(bench: Bench) -> Rows:
    ids = sample(bench.engine, top_p=0.9)
    return rows_of(ids, bench.engine.score(ids), top_p=0.9)


def late_masks(bench: Bench) -> Rows:
    rows = masked(bench)
    kept = [np.split(row.mask.ids, row.mask.offsets[1:-1]) for row in rows if row.mask is not None]
    return [replace(row, mask=mask_of([*ids[1:], ids[0]])) for row, ids in zip(rows, kept, strict=True)]


def swapped_masks(bench: Bench) -> Rows:
    rows = masked(bench)
    return [replace(row, mask=rows[{1: 7, 7: 1}.get(n, n)].mask) for n, row in enumerate(rows)]


def full_trainer(bench: Bench) -> Rows:
    rows = masked(bench)
    return trained(rows, bench.engine.score(torch.from_numpy(np.stack([row.tokens for row in rows]))))


def repeated(n: int, ids: np.ndarray) -> np.ndarray:
    return np.where((np.arange(T - 1) > P + S // 2)[:, None, None], ids[P + S // 2], ids)


def zeros(n: int, ids: np.ndarray, rows: range = range(P + S // 2, T)) -> np.ndarray:
    return np.where(np.isin(np.arange(T - 1), rows)[:, None, None] & (n == 3), 0, ids)


def at_random(n: int, ids: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    other = rng.random((*ids.shape[:2], int(ids.max()) + 1)).argsort(-1)[..., : ids.shape[2]]
    return other if n == 3 else ids


def two_swapped(n: int, ids: np.ndarray) -> np.ndarray:
    return ids[:, [1, 0, *range(2, ids.shape[1])]]


def swap(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [values[n + 1 - 2 * (n % 2)] for n in range(len(values))]


FAULTS: dict[str, tuple[str, str, set[str], Plant]] = {
    "routes one token early": ("slime", "routes", {"shifted"}, routed(lambda n, ids: np.roll(ids, -1, 0))),
    "routes one token late, one row": ("miles", "routes", {"shifted"}, routed(lambda n, ids: np.roll(ids, n == 3, 0))),
    "routes two tokens early": ("verl", "routes", {"shifted"}, routed(lambda n, ids: np.roll(ids, -2, 0))),
    "routes of another prompt": ("slime", "routes", {"request"}, from_row(lambda n: {1: 7, 7: 1}.get(n, n))),
    "routes of another answer": ("verl", "routes", {"request"}, from_row(lambda n: {1: 2, 2: 1}.get(n, n))),
    "routes of another row from the middle on": ("miles", "routes", {"request"},
                                                 from_row(lambda n: {1: 7}.get(n, n), P + S // 3)),
    "routes sorted by length": ("arrays", "routes", {"request"}, from_row(lambda n: (n + 5) % 18)),
    "routes of the end not filled": ("slime", "routes", {"padded"}, routed(zeros)),
    "routes of the cached prefix not filled": ("verl", "routes", {"padded"},
                                               routed(lambda n, ids: zeros(n, ids, range(P - 1)))),
    "last routes repeated": ("miles", "routes", {"padded"}, routed(repeated)),
    "an expert twice": ("plain", "routes", {"padded"}, routed(lambda n, ids: ids[..., [0, 0]] if n == 3 else ids)),
    "expert ids out of range": ("arrays", "routes", {"padded"}, routed(lambda n, ids: ids + 200 * (n == 3))),
    "two layers swapped": ("slime", "routes", {"layer"}, routed(two_swapped)),
    "layers one further": ("verl", "routes", {"layer"}, routed(lambda n, ids: np.roll(ids, 1, axis=1))),
    "pipeline stages swapped": ("miles", "routes", {"layer"},
                                routed(lambda n, ids: np.roll(ids, ids.shape[1] // 2, axis=1))),
    "layers reversed": ("plain", "routes", {"layer"}, routed(lambda n, ids: ids[:, ::-1])),
    "routes of older weights": ("slime", "routes", {"older weights"}, older_routes),
    "routes of nothing": ("verl", "routes", {"unrelated"}, routed(at_random)),
    "rollout at another temperature": ("nemo-rl", ROLLOUT, {"temperature"}, at_temperature(1.1)),
    "trainer at another temperature": ("slime", TRAINER, {"temperature"}, at_temperature(1.2, trains=True)),
    "rollout with other weights": ("nemo-rl", ROLLOUT, {WEIGHTS}, of_engine(off)),
    "two rows of other weights": ("verl", ROLLOUT, {WEIGHTS}, in_rows(of_engine(off), 2)),
    "trainer with other weights": ("miles", TRAINER, {WEIGHTS}, of_engine(off, trains=True)),
    "the trainer is off": ("nemo-rl", "which engine is off", {"trainer"}, of_engine(off, trains=True)),
    "trainer log-probs one token late": ("nemo-rl", TRAINER, {"shifted log-probs"},
                                         values_of(lambda rows: [np.roll(x, 1) for x in rows], trains=True)),
    "rollout log-probs one token early": ("slime", ROLLOUT, {"shifted log-probs"},
                                          values_of(lambda rows: [np.roll(x, -1) for x in rows])),
    "trainer log-probs of other rows": ("verl", TRAINER, {"log-probs of another row"}, values_of(swap, trains=True)),
    "masks one token late": ("slime", "sampling masks", {"shifted"}, late_masks),
    "masks of another row": ("plain", "sampling masks", {"not the sampler's"}, swapped_masks),
    "trainer over the vocabulary": ("slime", SUPPORT, {"another support"}, full_trainer),
    "no kept ids under top-p": ("nemo-rl", SUPPORT, {"another support"},
                                lambda bench: [replace(row, mask=None) for row in masked(bench)]),
}  # fmt: skip


CASES = [
    pytest.param(family, fault, marks=[] if family == "qwen3_moe" else pytest.mark.slow)
    for family in FAMILIES
    for fault in FAULTS
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "fault"), CASES)
def test_a_planted_fault_is_named_in_the_files_of_its_framework(
    benches: dict[str, Bench], tmp_path: Path, family: str, fault: str
) -> None:
    layout, question, named, plant = FAULTS[fault]
    top_p = 0.9 if "top-p" in fault else None
    found = audit(benches[family], layout, tmp_path, plant(benches[family]), top_p=top_p)
    assert causes(found).get(question, set()) & named, [answer.check.says for answer in found.answers]


@pytest.mark.long
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_clean_files_raise_no_alarm(benches: dict[str, Bench], tmp_path: Path, family: str, layout: str) -> None:
    bench = benches[family]
    assert causes(audit(bench, layout, tmp_path, trained(bench.rows, bench.scored))) == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_sixty_seven_clean_dumps_raise_no_alarm(benches: dict[str, Bench], tmp_path: Path, family: str) -> None:
    """Other texts in each, in turn at two temperatures, in all layouts, and truncated where the layout has masks."""
    bench, alarms = benches[family], []
    for seed in range(100, 167):
        layout, temperature = [*LAYOUTS][seed % 6], (1.0, 0.7)[seed // 6 % 2]
        top_p = 0.9 if layout in ("slime", "plain", "arrays") and seed // 12 % 2 else 1.0
        ids = sample(bench.engine, temperature=temperature, top_p=top_p, seed=seed)
        scored = bench.engine.score(ids, temperature)
        rows = rows_of(ids, scored, top_p=top_p, temperature=temperature)
        rows = [replace(row, trainer=row.rollout) for row in rows] if top_p < 1 else trained(rows, scored)
        found = audit(bench, layout, tmp_path, rows, temperature=temperature)
        if causes(found):
            alarms.append((seed, layout, temperature, top_p, [answer.check.says for answer in found.answers]))
    assert not alarms
