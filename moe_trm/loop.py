"""The algorithm on one page. Every learner rank runs it; all ranks make collective calls in the same order.

Synchronous training: the engine serves exactly the learner's weights while it samples. So the behaviour pass is the
proximal pass (age 0), and the first update pass of a step must reproduce it bit for bit, where the learner's passes
repeat their bits (`Learner.repeats_passes`). With an overlapping
`pipeline.mode` the controller samples for later steps while this step trains, and a push returns as soon as the engine
has its files. Pushes are made every `pipeline.push_every` steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean

from moe_trm.config.flat import flatten
from moe_trm.config.schema import Config, ReplayMode
from moe_trm.diagnostics import gradient_noise
from moe_trm.errors import ControllerLeaving
from moe_trm.learner.checkpoint.resumption import Checkpoints, RunPart, capture, folder_of, restore
from moe_trm.learner.protocol import Learner, UpdateResult
from moe_trm.observe.judge import Judge
from moe_trm.observe.phases import Phases
from moe_trm.observe.sinks import Sink
from moe_trm.rollout.client import RolloutClient
from moe_trm.rollout.kept_sets import sampler_bounds
from moe_trm.step import exact
from moe_trm.step.advantages import Advantages
from moe_trm.step.anchors import Anchors
from moe_trm.step.arrivals import Arrivals, joined
from moe_trm.step.best import Best
from moe_trm.step.cadence import Cadence, Replicas
from moe_trm.step.mask_judge import MaskJudge, check_refused
from moe_trm.step.objective import Objective
from moe_trm.step.probe.run import Probe
from moe_trm.step.proximal_average import ProximalAverage
from moe_trm.step.push import Pusher
from moe_trm.step.rate_guard import RateGuard
from moe_trm.step.reference import Reference
from moe_trm.step.score_recorder import ScoreRecorder
from moe_trm.types import TrainBatch
from routing.errors import MisalignedError
from routing.indexer.proof import IndexerReport
from routing.record.sources import ReplayReport


def train(
    config: Config,
    learner: Learner,
    rollouts: RolloutClient,
    pusher: Pusher,
    sinks: Sequence[Sink],
    checkpoints: Checkpoints,
    *,
    mode: ReplayMode,
    run_dir: Path,
) -> None:
    """Run `config.train.steps` steps, or what is left of them.

    Raises on the first broken proof or failed push; nothing unproved is trained on.
    """
    masks = MaskJudge(sampler_bounds(config.rollout, config.sampling_mask)) if config.keeps_masks else None
    objective, probe, phases = Objective(config, run_dir, sinks, masks), Probe(config, run_dir, mode), Phases(sinks)
    settings = flatten(config.dump()) | {"pipeline.max_staleness": config.pipeline.staleness_limit}
    judge = Judge(config.rollout.rounds_weights, settings)
    scores = ScoreRecorder(config, learner.data_rank, learner.data_size, is_data_leader=learner.is_data_leader)
    reference, average = Reference(config, learner), ProximalAverage.of(config.pipeline)
    anchors = Anchors(
        config,
        mode,
        reads_minibatch=objective.reads_minibatch,
        watches=objective.watches_routers,
        first=checkpoints.first_step,
        average=average,
        masks=masks,
    )
    guard = RateGuard(config.optimizer)
    advantages = Advantages(config.advantage, config.batch, config.task.reward_weights)
    best = Best(config.eval, config.task, config.rollout, folder_of(config.checkpoint, run_dir))
    steps, done = config.train.steps, checkpoints.first_step
    cadence = Cadence(config.pipeline.push_every, done, steps)
    pushed, arrivals = done, Arrivals(config.parts, rollouts, phases)
    resumable: dict[str, RunPart] = {
        "objective": RunPart(partial(objective.state, learner), partial(objective.restore, learner=learner)),
        "judge": RunPart(judge.state, judge.restore),
        "probe": RunPart(probe.state, probe.restore),
        "reference": RunPart(reference.state, reference.restore),
        "best": RunPart(best.state, best.restore),
        "guard": RunPart(guard.state, guard.restore),
        "anchors": RunPart(anchors.state, anchors.restore),
        "rollouts": RunPart(rollouts.state, rollouts.restore),
    }
    if average is not None:
        resumable["proximal"] = RunPart(average.state, average.restore)
    if saved := checkpoints.load(learner):
        restore(resumable, saved)
    replicas = Replicas(config.sync.prove_every)
    replicas.check(learner)
    pusher.push(version=done)
    if not done:
        evaluation = rollouts.evaluate(0)
        best.offer(0, evaluation, learner)
        emit(sinks, 0, evaluation)

    checkpoints.begin_steps()
    for step in range(done + 1, steps + 1):
        arrived: list[TrainBatch] = []
        updates: list[UpdateResult] = []
        probed: dict[str, float] = {}
        replayed, leaving = ReplayReport(), False
        with phases.time("step"), rescued(checkpoints, step, learner):
            for batch in arrivals.of(step, learner.moe_layer_ids, whole=probe.measures(step)):
                arrived.append(batch)
                if not batch.mini_batches:
                    continue
                with phases.time("score"):
                    score_all = config.exact or probe.anchors_all(batch)
                    scored = anchors.score(learner, batch, moved=bool(updates), score_all=score_all)
                    if config.exact:
                        replayed += exact.proved(scored, learner.replay_report())
                    minibatches = reference.add_logprobs(learner, scored)
                    penalties = reference.kl_penalties(minibatches)
                    minibatches = advantages.add_advantages(learner, minibatches, batch.compared, penalties)
                    minibatches = reference.subtract_kl_from_advantages(minibatches)
                with phases.time("probe"):
                    replayed += learner.replay_report() if probe.measures(step) else ReplayReport()
                    probed |= probe.run(step, learner, minibatches, batch.bank)
                lr_scale, guarded = guard.scale(
                    learner, minibatches, batch.metrics.get("response/length_mean", math.nan)
                )
                with phases.time("update"):
                    begins = not updates
                    updates += [
                        learner.update(
                            part.batches,
                            part.sources,
                            scores.watch(part, objective.bind(part, learner, first=begins and index == 0)),
                            entropy=objective.needs_entropy,
                            kept_mass=masks is not None and not part.scores,
                            lr_scale=lr_scale,
                            router_terms=objective.router_terms(part),
                        )
                        for index, part in enumerate(minibatches * config.learner.epochs)
                    ]
            if arrivals.undone:
                checkpoints.end_undone(step - 1, learner, partial(capture, resumable))
                break
            scores.write(step)
            replayed += learner.replay_report()
            with phases.time("sync"):
                if cadence.pushes(step):
                    replicas.check(learner)
                    try:
                        pusher.push(version=step)
                        pushed = step
                    except ControllerLeaving:  # the next start pushes these weights
                        leaving = True
        with phases.time("eval"):
            evaluation = rollouts.evaluate(step) if config.train.evaluates_after(step) else {}
            best.offer(step, evaluation, learner)
        batch = joined(arrived)
        measured = objective.take(learner) | anchors.labels.take(learner) | probed
        num_rows = sum(mini.num_sequences for mini in batch.mini_batches)
        measured |= reference.adapt(measured, num_rows)
        updated = update_metrics(updates)
        norm, rows_per_update = updated.get("optimizer/grad_norm", math.nan), num_rows / max(1, len(batch.mini_batches))
        noise = gradient_noise(measured, norm, rows_per_update)
        metrics = {
            **batch.metrics,
            **measured,
            **updated,
            **noise,
            **guarded,
            **replay_metrics(replayed),
            **phases.take(),
            "weights/version": step,
            "weights/pushed": pushed,
            **evaluation,
        }
        emit(sinks, step, {**metrics, **judge.say(metrics), "pipeline/behavior": config.pipeline.recovery})
        check_refused(metrics, num_rows)
        with phases.time("checkpoint"):
            if checkpoints.end_step(step, learner, partial(capture, resumable), leaving=leaving):
                break


@contextmanager
def rescued(checkpoints: Checkpoints, step: int, learner: Learner) -> Iterator[None]:
    """Keep the weights where wrong routes stop the run: every rank finds them at the same point."""
    try:
        yield
    except MisalignedError:
        checkpoints.rescue(step, learner)
        raise


def update_metrics(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """`optimizer/*` of a step, and `loss/router_*` where routers have losses of their own.

    Updates in which nothing trained are counted (`empty`), and are no part of the rest.
    """
    tried = [update for update in updates if not update.is_empty]
    metrics = {
        "optimizer/steps": float(len(tried)),
        "optimizer/skipped": float(sum(not result.applied for result in tried)),
        "optimizer/empty": float(len(updates) - len(tried)),
    }
    if updates:
        metrics["optimizer/lr"] = updates[-1].lr
    if tried:
        metrics["optimizer/grad_norm"] = fmean(
            [result.grad_norm for result in tried if result.applied] or [tried[-1].grad_norm]
        )
    if updates and (scale := updates[-1].loss_scale) is not None:
        metrics["optimizer/loss_scale"] = float(scale)
    if cosines := [result.cosine for result in tried if result.cosine is not None]:
        metrics["optimizer/grad_cosine"] = fmean(cosines)
    if updates and (noise := updates[-1].layer_noise) is not None:
        metrics["optimizer/layer_noise"] = noise
    if terms := [result.router_losses for result in updates if result.router_losses is not None]:
        metrics["loss/router_aux"] = fmean(term.balance for term in terms)
        metrics["loss/router_z"] = fmean(term.z for term in terms)
    return metrics


def replay_metrics(report: ReplayReport) -> dict[str, float]:
    """`replay/*` and `routing/local_flip_rate*`. Where nothing was replayed, only the counts are given."""
    counted = {"replay/token_layers": float(report.replayed), "replay/native_fraction": report.native_fraction}
    applied, flips = report.applied_fraction, report.local_flip_rate
    if applied is None or flips is None:
        return counted
    return {
        "replay/applied_fraction": applied,
        **counted,
        **({"routing/moved_samples": float(report.moved)} if report.moved else {}),
        "routing/local_flip_rate": flips,
        **{f"routing/local_flip_rate/layer_{layer}": rate for layer, rate in report.local_flips_by_layer.items()},
        **({} if report.indexer is None else position_metrics(report.indexer)),
    }


def position_metrics(report: IndexerReport) -> dict[str, float]:
    """`routing/positions/*`: what was replayed of sparse attention, where any token had a choice."""
    flips, lost = report.flip_rate, report.lost_share
    counted = {"routing/positions/replayed": float(report.replayed)}
    if flips is None or lost is None:
        return counted
    return {
        **counted,
        "routing/positions/flip_rate": flips,
        "routing/positions/lost_share": lost,
        **{f"routing/positions/lost_share/layer_{layer}": share for layer, share in report.lost_by_layer.items()},
    }


def emit(sinks: Sequence[Sink], step: int, metrics: Mapping[str, float | str]) -> None:
    for sink in sinks:
        sink.write(step, metrics)
