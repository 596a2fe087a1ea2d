"""The probe: one batch scored with the learner's own routes and with the rollout's, at the same weights.

native - rollout = (replayed - rollout) + (native - replayed) = numerics + routing, without remainder.

Shape letters: B rows, R forwarded tokens, L MoE layers, N scored tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.config.schema import Config, ReplayMode
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.probe.flip_causes import flip_causes
from moe_trm.probe.load_balance import load_balance
from moe_trm.probe.rounding_shares import rounding_shares, roundings
from moe_trm.ratios import k3_sum
from moe_trm.step.anchors import snapshot_name
from moe_trm.step.passes import Anchored, rollout_routes
from moe_trm.types import RolloutRecord, TokenBatch
from routing.flips import flipped_tokens
from routing.replay import Record, ReplayReport


@dataclass(frozen=True)
class ProbeTokens:
    """Scored tokens of one rank, all `[N]`.

    Attributes:
        group_id, sample_id: prompt the token answers, and the row that it is of (`RolloutRecord.row_id`); tokens of one
            row are in order.
        native, replayed: log-prob under the learner minus log-prob under the rollout engine, with own and with replayed
            routes.
        flipped_layers: MoE layers whose expert set differs between the two engines at the token's input row.
        log_kept_mass: log of the learner's own probability of the kept support; 0 without a sampling mask.
    """

    group_id: Tensor
    sample_id: Tensor
    native: Tensor
    replayed: Tensor
    flipped_layers: Tensor
    log_kept_mass: Tensor


class Probe:
    """Probe that runs every `config.probe.every` steps.

    With `config.probe.save` each rank keeps its tokens in `run_dir/probe`.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._folder, self._roundings = config.probe, run_dir / "probe", roundings(config)

    def due(self, step: int) -> bool:
        """True on steps with a probe."""
        return bool(self._config.every) and step % self._config.every == 0

    def run(self, step: int, learner: Learner, anchored: Sequence[Anchored], mode: ReplayMode) -> dict[str, float]:
        """Probe metrics of this step, reduced over ranks; empty on steps without a probe.

        What the probe itself replays is proved here, and counted apart from what training replays. Raises
        `ReplayProofError`.
        """
        if not self.due(step):
            return {}
        batches = [batch for part in anchored for batch in part.batches]
        anchors = [scores for part in anchored for scores in part.scores]
        rows = [[row.record for row in micro.rows] for part in anchored for micro in part.mini.micro_batches]
        native = learner.score(batches, [Record() for _ in batches], kept_mass=True)
        replayed = (
            anchors
            if mode == "R3" and all(part.scored for part in anchored)
            else learner.score(batches, [rollout_routes(batch) for batch in batches])
        )
        tokens = _join([_compare(learner, *item) for item in zip(batches, rows, native, replayed, strict=True)])
        if self._config.save and learner.leads:
            self._save(step, learner.data_rank, tokens)
        summary = _summary(learner.reduce(_sums(tokens, len(learner.model_moe_layer_ids))))
        if batches[0].kept_ids is not None:
            # A full-vocabulary ratio would be off by this factor on average.
            summary["sampling_mask/learner_kept_mass_mean"] = summary["probe/kept_mass_mean"]
        if self._roundings:
            summary |= rounding_shares(learner, batches, replayed, self._roundings)
        older = {
            version: learner.score(batches, [Record() for _ in batches], weights=snapshot_name(version))
            for version in _older(learner, anchored)
        }
        summary |= load_balance(learner, batches) | flip_causes(learner, batches, native, older)
        return summary | _replayed(learner.replay_report())

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


def _older(learner: Learner, anchored: Sequence[Anchored]) -> list[int]:
    """Older versions that sampled tokens of this step, on any rank, and whose weights are held. Collective."""
    if anchored[0].recovery != "snapshot":
        return []
    versions = torch.cat([batch.versions[batch.mask] for part in anchored for batch in part.batches])
    return sorted(set(learner.gather(torch.unique(versions).long()).tolist()) - {anchored[0].version})


def _compare(
    learner: Learner, batch: TokenBatch, records: Sequence[RolloutRecord], native: Scores, replayed: Scores
) -> ProbeTokens:
    assert native.recorded is not None
    rows, _ = batch.mask.nonzero(as_tuple=True)
    ids = torch.tensor([*((record.group_id, record.row_id) for record in records), (0, 0)], dtype=torch.int64)
    own_flips = flipped_tokens(native.recorded, batch.routes, batch.mask.shape[1]).sum(-1)
    flips = learner.sum_over_stages(learner.sum_over_slices(own_flips)).cpu().to(torch.int16)
    mass = native.log_kept_mass
    return ProbeTokens(
        group_id=ids[rows, 0],
        sample_id=ids[rows, 1],
        native=(native.logprobs.cpu() - batch.rollout_logprobs)[batch.mask],
        replayed=(replayed.logprobs.cpu() - batch.rollout_logprobs)[batch.mask],
        flipped_layers=flips[batch.mask],
        log_kept_mass=torch.zeros(len(rows)) if mass is None else mass.cpu()[batch.mask],
    )


def _join(parts: Sequence[ProbeTokens]) -> ProbeTokens:
    return ProbeTokens(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def _sums(tokens: ProbeTokens, num_layers: int) -> dict[str, Tensor]:
    routing = tokens.native - tokens.replayed
    return {
        "tokens": torch.tensor(float(len(tokens.native))),
        "token_layers": torch.tensor(float(len(tokens.native) * num_layers)),
        "flipped_token_layers": tokens.flipped_layers.sum(),
        "flipped_tokens": (tokens.flipped_layers > 0).sum(),
        "native_k3": k3_sum(tokens.native),
        "replayed_k3": k3_sum(tokens.replayed),
        "numerics_abs": tokens.replayed.abs().sum(),
        "routing_abs": routing.abs().sum(),
        "kept_mass": tokens.log_kept_mass.exp().sum(),
    }


def _summary(sums: Mapping[str, float]) -> dict[str, float]:
    n = sums["tokens"]
    return {
        "routing/native_flip_rate": sums["flipped_token_layers"] / sums["token_layers"],
        "routing/native_token_flip_rate": sums["flipped_tokens"] / n,
        "probe/native_k3_kl": sums["native_k3"] / n,
        "probe/replayed_k3_kl": sums["replayed_k3"] / n,
        "probe/numerics_abs_mean": sums["numerics_abs"] / n,
        "probe/routing_abs_mean": sums["routing_abs"] / n,
        "probe/kept_mass_mean": sums["kept_mass"] / n,
    }
