"""The probe: one batch scored with the learner's own routes and with the rollout's, at the same weights.

native - rollout = (replayed - rollout) + (native - replayed) = numerics + routing, without remainder.

From a large batch, a random sample of rows is scored (`probe.sample`). Both log-probs are of the same micro-batches, so
that where no expert differs, they are equal to the last bit. So those with the rollout's routes are the anchors' own
where the sample is minibatches with anchors, and a pass more where it is not.

Shape letters: B rows, R forwarded tokens, L MoE layers, N scored tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.config.schema import Config, ReplayMode
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.ratios import k3
from moe_trm.step.anchors import snapshot_name
from moe_trm.step.passes import AnchoredMinibatch, anchor_source, judged_before
from moe_trm.step.probe.bank import BankProbe
from moe_trm.step.probe.close_margins import CloseMargins
from moe_trm.step.probe.flip_causes import flip_causes, flips_of
from moe_trm.step.probe.load_balance import load_balance
from moe_trm.step.probe.rounding_shares import rounding_shares, roundings
from moe_trm.step.probe.sample import ProbeChoice, ProbeRows, products, standard_errors
from moe_trm.step.probe.tokens import ProbeTokens, compared, joined
from moe_trm.types import RolloutRecord, TokenBatch, TrainBatch
from routing.record.sources import Record, ReplayReport

FIGURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "routing/native_flip_rate": ("flipped_token_layers", "token_layers"),
        "routing/native_token_flip_rate": ("flipped_tokens", "tokens"),
        "probe/native_k3_kl": ("native_k3", "tokens"),
        "probe/replayed_k3_kl": ("replayed_k3", "tokens"),
        "probe/numerics_abs_mean": ("numerics_abs", "tokens"),
        "probe/routing_abs_mean": ("routing_abs", "tokens"),
        "probe/kept_mass_mean": ("kept_mass", "tokens"),
        "probe/routing_share": ("k3_by_routes", "native_k3"),
    }
)
"""Metrics that are ratios of sums over tokens: top, bottom."""
ERRORS: Mapping[str, str] = MappingProxyType(
    {
        "routing/native_flip_rate_se": "flipped_token_layers",
        "probe/native_k3_kl_se": "native_k3",
        "probe/replayed_k3_kl_se": "replayed_k3",
        "probe/routing_share_se": "k3_by_routes",
        "probe/numerics_abs_mean_se": "numerics_abs",
        "probe/routing_abs_mean_se": "routing_abs",
    }
)
"""Metrics that are standard errors, with the tops of their ratios."""
SPREAD = MappingProxyType({top: bottom for top, bottom in FIGURES.values() if top in ERRORS.values()})
"""These ratios: top -> bottom."""


class Probe:
    """Probe that runs every `config.probe.every` steps.

    With `config.probe.save` each rank keeps its tokens in `run_dir/probe`. `mode`: whose routes the anchors' passes
    use.
    """

    def __init__(self, config: Config, run_dir: Path, mode: ReplayMode) -> None:
        self._config, self._folder = config, run_dir / "probe"
        self._roundings = roundings(config.learner, config.rollout)
        self._mode, self._choice = mode, ProbeChoice(config, mode)
        self._bank, self._close = BankProbe(self._choice), CloseMargins()

    def due(self, step: int) -> bool:
        """True on steps with a probe."""
        interval = self._config.probe.every
        return bool(interval) and step % interval == 0

    def measures(self, step: int) -> bool:
        """True on steps with a probe or with fixed texts."""
        return self.due(step) or self._config.probe.uses_bank(step)

    def thorough(self, step: int) -> bool:
        """True on steps whose probe also makes the passes of `probe.thorough_every`."""
        probe = self._config.probe
        return self.due(step) and (step // probe.every - 1) % probe.thorough_every == 0

    def anchors_all(self, batch: TrainBatch) -> bool:
        """True where every minibatch of the step is to have a pass before its update.

        A thorough probe compares the first one's with its update's own forward (`update/first_nonzero_fraction`). One
        that looks at the first minibatch takes its log-probs.
        """
        minis = batch.mini_batches
        return self.thorough(batch.step) or (
            self.due(batch.step) and self._mode == "R3" and self._choice.num_minibatches(minis) == len(minis)
        )

    def state(self) -> dict[str, Any]:
        """The figures that later probes compare with, as plain data."""
        return {"bank": self._bank.state(), "close": self._close.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`."""
        self._bank.restore(state["bank"])
        self._close.restore(state["close"])

    def run(
        self,
        step: int,
        learner: Learner,
        minibatches: Sequence[AnchoredMinibatch],
        bank: Sequence[RolloutRecord] = (),
    ) -> dict[str, float]:
        """Probe metrics of this step, reduced over ranks; empty on steps without a probe and without fixed texts.

        `bank`: this rank's share of the texts (`TrainBatch.bank`).

        What the probe itself replays is proved here, and counted apart from what training replays. Raises
        `ReplayProofError`.
        """
        of_bank = self._bank.run(learner, bank) if self._config.probe.uses_bank(step) else {}
        return of_bank | (self._run(step, learner, minibatches) if self.due(step) else {})

    def _run(self, step: int, learner: Learner, minibatches: Sequence[AnchoredMinibatch]) -> dict[str, float]:
        rows = self._choice.rows(learner, minibatches, step)
        batches = rows.batches
        native = learner.score(batches, [Record() for _ in batches], kept_mass=True)
        replayed = self._by_rollout_routes(learner, rows)
        flips = [flips_of(scores, batch, learner.moe_layer_ids) for batch, scores in zip(batches, native, strict=True)]
        tokens = joined(
            [compared(learner, *item) for item in zip(batches, rows.records, native, replayed, flips, strict=True)]
        )
        if self._config.probe.save and learner.is_data_leader:
            self._save(step, learner.data_rank, tokens)
        summary = summarize(learner, tokens, rows)
        if batches[0].kept_ids is not None:
            # A full-vocabulary ratio would be off by this factor on average.
            summary["sampling_mask/learner_kept_mass_mean"] = summary["probe/kept_mass_mean"]
        if self._roundings and self.thorough(step):
            summary |= rounding_shares(learner, batches, replayed, self._roundings, rows)
        older = {
            version: learner.score(batches, [Record() for _ in batches], weights=snapshot_name(version))
            for version in _older(learner, minibatches[0], batches)
        }
        everything = [batch for part in minibatches for batch in part.batches]
        summary |= self._close.run(learner, tokens.flips, tokens.margins)
        summary |= load_balance(learner, everything) | flip_causes(learner, batches, native, older, flips)
        return summary | _replayed(learner.replay_report())

    def _by_rollout_routes(self, learner: Learner, rows: ProbeRows) -> Sequence[Scores]:
        """Scores with the rollout's routes in the probe's micro-batches."""
        if self._mode == "R3" and rows.minibatches and all(part.scored for part in rows.minibatches):
            return [scores for part in rows.minibatches for scores in part.scores]
        # Under R3 the passes of training have judged these rows.
        sources = [
            anchor_source("R3", batch, judged_before(batch) if self._mode == "R3" else ()) for batch in rows.batches
        ]
        return learner.score(rows.batches, sources)

    def _save(self, step: int, rank: int, tokens: ProbeTokens) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(vars(tokens), self._folder / f"step-{step:06d}-rank{rank}.safetensors")


def _replayed(report: ReplayReport) -> dict[str, float]:
    """Empty where the probe could use the scores of training."""
    applied, flips = report.applied_fraction, report.local_flip_rate
    if applied is None or flips is None:
        return {}
    moved = {"probe/moved_samples": float(report.moved)} if report.moved else {}
    return {"probe/applied_fraction": applied, "probe/local_flip_rate": flips, **moved}


def _older(learner: Learner, part: AnchoredMinibatch, batches: Sequence[TokenBatch]) -> list[int]:
    """Older versions that sampled tokens of these rows, on any rank, and whose weights are held. Collective."""
    if part.recovery != "snapshot":
        return []
    versions = torch.cat([batch.versions[batch.mask] for batch in batches])
    return sorted(set(learner.gather(torch.unique(versions).long()).tolist()) - {part.version})


def summarize(learner: Learner, tokens: ProbeTokens, rows: ProbeRows) -> dict[str, float]:
    """Means over the tokens of all ranks, and the standard errors that come of the rows not drawn. Collective."""
    columns = _columns(tokens, len(learner.model_moe_layer_ids))
    sums = {name: values.sum() for name, values in columns.items()}
    sums["rows"] = torch.tensor(float(sum(map(len, rows.records))))
    spread = {} if rows.is_complete else products(columns, tokens.sample_id, SPREAD)
    total = learner.reduce(sums | spread)
    errors = standard_errors(total, SPREAD, rows)
    return {
        "probe/rows": total["rows"],
        "probe/token_fraction": rows.token_fraction,
        **{name: total[top] / total[bottom] for name, (top, bottom) in FIGURES.items() if total[bottom] > 0},
        **{name: errors[top] for name, top in ERRORS.items() if top in errors},
    }


def _columns(tokens: ProbeTokens, num_layers: int) -> dict[str, Tensor]:
    native, replayed = k3(tokens.native), k3(tokens.replayed)
    return {
        "tokens": torch.ones(len(native), dtype=torch.float64),
        "token_layers": torch.full((len(native),), float(num_layers), dtype=torch.float64),
        "flipped_token_layers": tokens.flipped_layers,
        "flipped_tokens": tokens.flipped_layers > 0,
        "native_k3": native,
        "replayed_k3": replayed,
        "k3_by_routes": native - replayed,
        "numerics_abs": tokens.replayed.abs(),
        "routing_abs": (tokens.native - tokens.replayed).abs(),
        "kept_mass": tokens.log_kept_mass.exp(),
    }
