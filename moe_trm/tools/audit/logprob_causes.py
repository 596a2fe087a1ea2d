"""Causes of differences between an engine's log-probs and the plain model's: the doctor's, on a dump.

The model takes the place of the learner, at the stated temperature and with the recorded routes, and an engine that of
the rollout: the rollout engine, or the trainer. Rows that are off by themselves are judged apart from the rest, because
a mean over all tokens hides them.

Shape letters: S sampled tokens of a row, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moe_trm.step.probe.pooled import Interval, PooledTokens, k3, pooled
from moe_trm.tools.audit.audit_answer import AuditAnswer
from moe_trm.tools.audit.dump import Array
from moe_trm.tools.audit.misplaced import misplaced
from moe_trm.tools.audit.power import row_power
from moe_trm.tools.audit.reference import PolicyScores, RowScores
from moe_trm.tools.audit.route_causes import overlap
from moe_trm.tools.doctor.causes import ENOUGH, EXPLAINED, LARGE, WARMER, Cause, Finding, find_cause
from moe_trm.tools.doctor.examine import HARMLESS
from moe_trm.tools.doctor.measurements import Measurements, join, touched_experts

Engine = Literal["rollout", "trainer"]
ENGINES: tuple[Engine, ...] = ("rollout", "trainer")
APART, ROW_K3, UNROUTED_ROW_K3 = 20.0, 0.05, 0.2
"""A row is judged by itself from this many times the usual k3 of a row's median token, and from this k3 of its own,
which is larger where routes may differ.

A clean row of a model with random weights reaches 0.007 when it flips an expert early, 0.06 without its routes, and
0.04 with routes of older weights. Two rows of other weights had 0.08 to 0.5.
"""
SECOND_ORDER = 0.1
"""k3 that the trace of a temperature may leave: it is exact to first order only."""
MOST_CELLS = 1 << 28
"""Entries of `Measurements.touched`; rows beyond are left out of the search for one expert."""

SENTENCES: dict[Cause, str] = {
    "none": "They are those of the model to float32 rounding (k3 {replayed_k3:.1e}).",
    "precision": "They differ from the model by rounding (k3 {replayed_k3:.1e} nats with the recorded routes, "
    "{size:.1e} in the median row).",
    "mask": "They are over other ids than the model's: {mask_explains:.0%} of the mismatch is the kept mass.",
    "temperature": "They are at about {temperature:.3g} times the stated temperature: that explains "
    "{temperature_explains:.0%} of the mismatch.",
    "expert": "Contexts that never pass expert {expert_id:.0f} of MoE layer {expert_layer:.0f} agree with the model, "
    "those that do differ {expert_contrast:.0f} times as much: this expert has other weights.",
    "positions": "The start of a context agrees with the model and its later part does not: position encoding, "
    "attention mask, or a stale prefix cache.",
    "routing": "Routers disagree with the model's on {flip_rate:.0%} of token-layers, and most of the mismatch goes "
    "with the recorded routes (k3 {native_k3:.1e}, then {replayed_k3:.1e}).",
    "weights": "They differ from the model everywhere, far beyond rounding (k3 {replayed_k3:.1e}, {size:.1e} in the "
    "median row): other weights.",
}
UNROUTED = (
    "They differ from the model by rounding and routing (k3 {k3:.1e} nats, {typical:.1e} of the median token). The "
    "routes that were used are not known, so the two cannot be told apart."
)
NAMES: dict[Cause, str] = {"mask": "another support", "weights": "another version of the weights"}


@dataclass(frozen=True)
class EngineRow:
    """The measurements of one row; `routed`: the model had the engine's routes, so flips are no part of them."""

    number: int
    measurements: Measurements
    routed: bool

    @property
    def values(self) -> Array:
        """`[S]` log-probs of the engine."""
        return self.measurements.rollout

    @property
    def model(self) -> Array:
        """`[S]` log-probs of the model, over the same ids."""
        model: Array = self.measurements.rollout + self.measurements.replayed
        return model


def engine_rows(
    scores: Sequence[RowScores], engine: Engine, faulty: set[int], unmasked: set[int], num_experts: int, *, kept: bool
) -> list[EngineRow]:
    """Rows with log-probs of `engine`. `kept`: the model's are taken over the kept ids.

    `faulty`: rows whose recorded routes are not theirs. Of the rollout they are left out where others are left. The
    trainer may have replayed them, or nothing: what is closer to it counts. `unmasked`: rows whose masks are not the
    sampler's, so that their support is not known; they are left out.
    """
    budget, rows = MOST_CELLS, []
    for number, row in enumerate(scores):
        values = getattr(row.row, engine)
        if values is None or row.native is None or number in unmasked:
            continue
        usable = row.replayed is not None and (number not in faulty or engine == "trainer")
        replayed = row.replayed if usable and row.replayed is not None else row.native
        if kept and (row.native.mass is None or replayed.mass is None):
            continue
        native, with_routes = (_logprobs(part, kept=kept) - values for part in (row.native, replayed))
        if engine == "trainer" and k3(native).mean() < k3(with_routes).mean():
            with_routes, usable = native, False
        routes = row.live if replayed is row.native or row.recorded is None else row.recorded
        flipped = (overlap(routes, row.live) < 1).sum(1)[row.row.places]
        budget -= row.row.num_sampled * routes.shape[1] * num_experts
        columns = num_experts if budget > 0 else 0
        touched = touched_experts(routes, num_experts)[row.row.places][..., :columns]
        mass = replayed.mass if replayed.mass is not None and not kept else np.zeros(len(values))
        entropy = replayed.kept_entropy if kept and replayed.kept_entropy is not None else replayed.entropy
        rows.append(
            EngineRow(
                number,
                Measurements(
                    group=np.full(len(values), number),
                    position=row.row.places + 1,
                    rollout=values,
                    full=values + mass,
                    replayed=with_routes,
                    native=native,
                    entropy=entropy,
                    flipped_layers=flipped,
                    touched=touched,
                ),
                usable,
            )
        )
    if engine == "rollout" and any(part.routed for part in rows):
        rows = [part for part in rows if part.routed]
    if rows and any(part.measurements.touched.shape[2] == 0 for part in rows):
        rows = [replace(part, measurements=replace(part.measurements, touched=part.measurements.touched[..., :0]))
                for part in rows]  # fmt: skip
    return rows


def _logprobs(scored: PolicyScores, *, kept: bool) -> Array:
    if not kept:
        return scored.full
    assert scored.mass is not None
    values: Array = scored.full - scored.mass
    return values


@dataclass(frozen=True)
class EngineVerdict:
    """The findings about one engine.

    Attributes:
        kept: its log-probs are over the kept ids; None where that cannot be known.
        bulk, outliers: rows that are alike, and rows that are off by themselves.
        finding, outlier_finding: the doctor's, of each.
    """

    engine: Engine
    kept: bool | None
    bulk: Sequence[EngineRow]
    outliers: Sequence[EngineRow]
    finding: Finding
    outlier_finding: Finding | None


def verdict(
    scores: Sequence[RowScores], engine: Engine, faulty: set[int], unmasked: set[int], num_experts: int
) -> EngineVerdict | None:
    """The doctor's causes for an engine; None where the dump has none of its log-probs."""
    rows = engine_rows(scores, engine, faulty, unmasked, num_experts, kept=False)
    if not rows:
        return None
    over_kept = engine_rows(scores, engine, faulty, unmasked, num_experts, kept=True)
    kept: bool | None = None
    if len(over_kept) == len(rows) and any(row.native is not None and _cuts(row.native) for row in scores):
        kept = _cause([*rows]).cause == "mask" or _size(over_kept) < 0.5 * _size(rows)
        rows = over_kept if kept else rows
    bulk, outliers = _split(rows)
    return EngineVerdict(engine, kept, bulk, outliers, _cause(bulk), _cause(outliers) if outliers else None)


def _cuts(scored: PolicyScores) -> bool:
    """The kept ids leave out enough to show."""
    return scored.mass is not None and bool(np.mean(scored.mass**2) > 1e-6)


def _size(rows: Sequence[EngineRow]) -> float:
    """k3 of the median row, because one token may be off by whole nats. Where routes may differ, of the median token,
    because flips make few tokens large.
    """
    if not all(row.routed for row in rows):
        return _typical(rows)
    return float(np.median([k3(row.measurements.replayed).mean() for row in rows]))


def _typical(rows: Sequence[EngineRow]) -> float:
    """k3 of the median token."""
    return float(k3(np.median(np.abs(np.concatenate([row.measurements.replayed for row in rows])))))


def _cause(rows: Sequence[EngineRow]) -> Finding:
    """The doctor's cause.

    A large mean alone does not show other weights: `_size` does. Where routers differ, what replay leaves may.
    """
    finding = find_cause(join([row.measurements for row in rows]))
    if finding.cause == "routing" and _size(rows) >= LARGE:
        finding = replace(finding, cause="weights")
    if finding.cause == "temperature":
        tokens = join([row.measurements for row in rows])
        trace = finding.figures["temperature_slope"] * (tokens.full + tokens.entropy)
        finding = finding if k3(tokens.replayed - trace).mean() < SECOND_ORDER else replace(finding, cause="weights")
    if finding.cause == "weights" and _size(rows) < LARGE:
        return replace(finding, cause="precision")
    if finding.cause == "weights" and not all(row.routed for row in rows):
        return _typical_temperature(finding, rows)
    return finding


def _typical_temperature(finding: Finding, rows: Sequence[EngineRow]) -> Finding:
    """The temperature, where its trace explains the median token: flips make few tokens large, and hide it.

    The slope has the least absolute deviations.
    """
    tokens = join([row.measurements for row in rows])
    by = tokens.full + tokens.entropy
    ratios, weights = tokens.replayed / np.where(by == 0, np.inf, by), np.abs(by)
    order = np.argsort(ratios)
    slope = float(ratios[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)])
    explained = 1 - float(np.median(np.abs(tokens.replayed - slope * by)) / np.median(np.abs(tokens.replayed)))
    if explained < EXPLAINED or abs(slope) < WARMER:
        return finding
    figures = {**finding.figures, "temperature_slope": slope, "temperature_explains": explained}
    return replace(finding, cause="temperature", figures=figures)


def _split(rows: Sequence[EngineRow]) -> tuple[list[EngineRow], list[EngineRow]]:
    """Rows alike, and those that are off by themselves; where most are off, nobody is by itself.

    Their median token is compared: a clean row may have a large mean by a single token.
    """
    sizes, typical = (np.array([size([row]) for row in rows]) for size in (_size, _typical))
    enough = np.array([len(row.measurements) >= ENOUGH for row in rows])
    least = np.array([ROW_K3 if row.routed else UNROUTED_ROW_K3 for row in rows])
    off = enough & (sizes >= LARGE) & (typical >= np.maximum(least, APART * np.median(typical)))
    return [r for r, is_off in zip(rows, off, strict=True) if not is_off], [
        r for r, is_off in zip(rows, off, strict=True) if is_off
    ]


def engine_answers(
    scores: Sequence[RowScores], engine_verdict: EngineVerdict, rows: int, share: float, fix: Callable[[str], str]
) -> list[AuditAnswer]:
    """The doctor's causes for this engine: of all rows, and of those that are off by themselves."""
    question = f"log-probs of the {engine_verdict.engine}"
    judged = sum(len(row.measurements) for row in (*engine_verdict.bulk, *engine_verdict.outliers))
    support = {None: "", True: " They are over the kept ids.", False: " They are over the whole vocabulary."}[
        engine_verdict.kept
    ]
    answers = []
    for finding, part in (
        (engine_verdict.finding, engine_verdict.bulk),
        (engine_verdict.outlier_finding, engine_verdict.outliers),
    ):
        if finding is None:
            continue
        figures = {**finding.figures, "temperature": 1 + finding.figures["temperature_slope"], "size": _size(part)}
        sentence = SENTENCES[finding.cause].format_map(figures)
        if finding.cause == "precision" and not all(row.routed for row in part):
            sentence = UNROUTED.format(k3=finding.figures["replayed_k3"], typical=figures["size"])
        status = HARMLESS.get(finding.cause, "fail")
        name = NAMES.get(finding.cause, finding.cause)
        if finding.cause == "weights":
            moved = misplaced([row.values for row in part], [row.model for row in part])
            name, sentence = (name, sentence + by_version(scores, part)) if moved is None else (
                moved.cause, moved.sentence
            )  # fmt: skip
        named = status != "ok"
        answers.append(
            AuditAnswer(
                question,
                name if named else "none",
                status,
                sentence + support,
                fix(name) if named else "",
                sum(len(row.measurements) for row in part) if named else 0,
                judged,
                tuple(scores[row.number].row.name for row in part) if named else (),
                figures,
                _excluded(part, rows, share) if not named and not engine_verdict.outliers else "",
            )
        )
    return answers


def _excluded(part: Sequence[EngineRow], rows: int, share: float) -> str:
    median, least = ("row", ROW_K3) if all(row.routed for row in part) else ("token", UNROUTED_ROW_K3)
    return (
        "Excluded: another temperature by more than 0.5%, another support, position faults, one bad expert, weights "
        f"that set the median {median} apart by a k3 of {LARGE:g}, and single rows whose median token they set apart "
        f"by {least:g}. Of such a fault in {share:.0%} of the rows, one is in the sample with "
        f"{row_power(len(part), rows, share):.1%}."
    )


def by_version(scores: Sequence[RowScores], rows: Sequence[EngineRow]) -> str:
    """The k3 of each weight version, where the rows have several or are all of one."""
    sizes: dict[str, list[Array]] = {}
    for row in rows:
        versions = scores[row.number].row.versions
        if versions is None:
            return ""
        for version in np.unique(versions):
            sizes.setdefault(str(version), []).append(k3(row.measurements.replayed[versions == version]))
    words = ", ".join(f"{version}: {np.concatenate(parts).mean():.1e}" for version, parts in sorted(sizes.items()))
    return f" By weight version, k3 is {words}."


def shares(scores: Sequence[RowScores], engine_verdict: EngineVerdict) -> dict[str, Interval]:
    """Pooled k3 of the rollout against the model, with its own and with the recorded routes; empty without the tokens'
    own routes.
    """
    rows = [row for row in engine_verdict.bulk if row.routed]
    if not rows:
        return {}
    prompts: dict[bytes, int] = {}
    group = [prompts.setdefault(scores[row.number].row.prompt, len(prompts)) for row in rows]
    joined = join([row.measurements for row in rows])
    groups = np.repeat(group, [len(row.measurements) for row in rows])
    tokens = PooledTokens(groups, joined.native, joined.replayed, joined.flipped_layers)
    return pooled(tokens, num_layers=joined.num_layers)


def share_answer(figures: dict[str, Interval]) -> AuditAnswer:
    """The share of the rollout's mismatch that is routing, and the share that is left with its routes."""
    native, replayed = figures["all/native_k3"], figures["all/replayed_k3"]
    routed = max(0.0, 1 - replayed.value / native.value) if native.value else 0.0
    return AuditAnswer(
        "rounding and routing",
        "none",
        "ok",
        f"k3 to the rollout is {native} nats with the model's own routes and {replayed} with the recorded ones: "
        f"{routed:.0%} of it is routing, the rest rounding or weights. {figures['layer_flip_rate'].value:.2%} of "
        "token-layers differ.",
        figures={"native_k3": native.value, "replayed_k3": replayed.value, "routing_share": routed},
    )


def support_answer(
    rollout: EngineVerdict, trainer: EngineVerdict | None, *, masks: bool, fix: Callable[[str], str]
) -> AuditAnswer | None:
    """True when both sides' log-probs are over the same ids; None where that is not known."""
    if rollout.kept is None or (trainer is None and masks):
        return None
    if trainer is not None and trainer.kept == rollout.kept:
        return None
    if trainer is None and not rollout.kept:
        return None
    over = {True: "the kept ids", False: "the whole vocabulary"}
    side = "The dump has no masks, so the trainer cannot renormalise alike." if trainer is None else (
        f"Those of the trainer are over {over[bool(trainer.kept)]}."
    )  # fmt: skip
    words = f"Log-probs of the rollout are over {over[rollout.kept]}. {side}"
    return AuditAnswer("support of log-probs", NAMES["mask"], "fail", words, fix("mask"))


def which_answer(rollout: EngineVerdict, trainer: EngineVerdict) -> AuditAnswer:
    """The engine that is farther from the model, and by how much."""
    sizes = {part.engine: _size(part.bulk) for part in (rollout, trainer)}
    far, near = sorted(sizes, key=lambda engine: -sizes[engine])
    factor = sizes[far] / max(sizes[near], 1e-15)
    words = f"k3 to the model: rollout {sizes['rollout']:.1e}, trainer {sizes['trainer']:.1e} nats."
    off = sizes[far] >= LARGE and factor >= 3
    words += f" The {far} is off, {factor:.0f} times as far as the {near}." if off else " Neither stands out as off."
    figures = {f"{engine}_k3": size for engine, size in sizes.items()}
    return AuditAnswer("which engine is off", far if off else "none", "fail" if off else "ok", words, figures=figures)
