"""Summary of a run: key figures, proofs, alarms and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moe_trm.observe.advice.verdict_changes import VerdictChanges
from moe_trm.run_folder.run import Row, Run


@dataclass(frozen=True)
class Tile:
    """A key figure: the last value of the first of `metrics` that the run has, and its first value if `first`."""

    label: str
    metrics: tuple[str, ...]
    note: str
    first: bool = False
    log: bool = False


TILES = (
    Tile(
        "Accuracy",
        ("eval/accuracy",),
        "right greedy answers on held-out prompts, first → last; interval over prompts",
        first=True,
    ),
    Tile(
        "Evaluation", ("eval/reward",), "mean reward of greedy answers, first → last; interval over prompts", first=True
    ),
    Tile("Reward", ("reward/mean",), "mean of a step, first step → last", first=True),
    Tile("Engine mismatch", ("engine/k3_kl",), "k3 KL in nats at equal weights, at the last step", log=True),
    Tile(
        "Router flips",
        ("routing/native_flip_rate", "routing/local_flip_rate"),
        "share of token-layers, at the last step",
    ),
    Tile("Kept tokens", ("correction/kept_fraction",), "share that corrections let through, at the last step"),
    Tile("Seconds per step", ("time/step_s",), "wall clock of the last, without evaluation"),
)


CheckState = Literal["good", "note", "bad", "none"]


@dataclass(frozen=True)
class ProofCheck:
    """One property over all steps.

    Attributes:
        value: the worst step's metric; None when it is none of one step, or was never measured.
        state: `bad` breaks a promise, `note` is worth a look, `none` was not measured.
    """

    what: str
    value: float | None
    state: CheckState


def checks(run: Run) -> list[ProofCheck]:
    """Conditions that must hold at every step, and the alarms."""
    bound = run.config.get("replay", {}).get("max_local_flip_rate", 1.0)
    proofs = [
        _worst(run, "Replayed token-layers that used their recorded route",
               "replay/applied_fraction", min, lambda v: v == 1.0),
        _worst(run, "Tokens that the first update pass did not reproduce bit for bit",
               "update/first_nonzero_fraction", max, lambda v: v == 0.0),
        *_reordered(run),
        _worst(run, f"Live router against the record, at most {bound:g}",
               "routing/local_flip_rate", max, lambda v: v <= bound, "note"),
        _worst(run, "Optimizer steps skipped in a step", "optimizer/skipped", max, lambda v: v == 0.0, "note"),
        _worst(run, "Times that a rollout server was lost", "rollout/losses", max, lambda v: v == 0.0, "note"),
        _worst(run, "Samples rejected since the start", "ledger/rejected", max, lambda v: v == 0.0, "note"),
    ]  # fmt: skip
    rollout = run.config.get("rollout", {})
    if rounding := rollout.get("quantization") or rollout.get("fake_quantization"):
        proofs.append(
            ProofCheck(
                f"The rollout's weights are rounded ({rounding}): "
                "the engine mismatch is the distance of two policies, no fault",
                None,
                "note",
            )
        )
    return [*proofs, _books(run)]


def _reordered(run: Run) -> list[ProofCheck]:
    """Of a run whose learner does not repeat its bits, in place of the alarm (`Learner.repeats_passes`)."""
    values = [value for _, value in run.series("update/first_reordered_fraction") if value is not None]
    what = "Tokens whose first update pass differs in the order of a sum on the GPU"
    return [ProofCheck(what, max(values), "note")] if values else []


def _books(run: Run) -> ProofCheck:
    balances = {row["step"]: balance for row in run.rows if (balance := _balance(row)) is not None}
    wrong = [step for step, balance in balances.items() if balance]
    if wrong:
        return ProofCheck("First step whose sample ledger does not balance", float(wrong[0]), "bad")
    return ProofCheck("The sample ledger balances at every step", None, "good" if balances else "none")


def _worst(
    run: Run,
    what: str,
    metric: str,
    worst: Callable[[list[float]], float],
    holds: Callable[[float], bool],
    otherwise: CheckState = "bad",
) -> ProofCheck:
    values = [value for _, value in run.series(metric)]
    if not values:
        return ProofCheck(what, None, "none")
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return ProofCheck(f"{what} (not finite at {len(values) - len(finite)} steps)", None, "bad")
    value = worst(finite)
    return ProofCheck(what, value, "good" if holds(value) else otherwise)


def _balance(row: Row) -> float | None:
    places = [f"ledger/{place}" for place in ("queued", "in_flight", "trained", "rejected", "dropped")]
    if any(row.get(name) is None for name in ("ledger/issued", *places)):
        return None
    return float(row["ledger/issued"] - sum(row[name] for name in places))


State = Literal["good", "fair", "bad"]


@dataclass(frozen=True)
class Saying:
    """A verdict from the step on which it was first given."""

    step: int
    unix_s: float | None
    sentence: str
    setting: str
    state: State


def sayings(run: Run) -> list[Saying]:
    """The verdicts of a run, one for each change."""
    changes, entries = VerdictChanges(), []
    for row in run.rows:
        if changes.of(row):
            entries.append(
                Saying(
                    int(row["step"]),
                    row.get("time/unix_s"),
                    str(row["verdict"]),
                    str(row.get("verdict/config", "")),
                    _state(row),
                )
            )
    return entries


def _state(row: Any) -> State:
    if row.get("verdict/config") or row.get("verdict/case") in ("servers", "stalled", "jump", "labels", "routes"):
        return "bad"
    learned = row.get("verdict/case") == "learned"
    return "good" if learned or "nothing needs to change" in row["verdict"] else "fair"
