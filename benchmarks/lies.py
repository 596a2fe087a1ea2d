"""Records that are not what they claim to be, planted into one recorded step, and the outcome of each.

`python -m benchmarks.planted_faults --lies [--checkpoint DIR]` records the step with the real engines, edits it, and
has each copy checked, replayed, judged and trained as a run does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from benchmarks.short_run import record_run
from benchmarks.table import Row
from moe_trm.batch.plan import plan_step
from moe_trm.config import load
from moe_trm.config.flat import flatten
from moe_trm.config.schema import Config
from moe_trm.errors import FalseRecords, RecordRejected
from moe_trm.learner.protocol import Learner
from moe_trm.observe.advice.verdict import verdict
from moe_trm.recording.bundle import BundleReader
from moe_trm.rollout.build import sampling_params
from moe_trm.rollout.kept_sets import check_kept_sets, sampler_bounds
from moe_trm.rollout.sample_metrics import sample_metrics
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.step.anchors import Anchors
from moe_trm.step.mask_judge import MaskJudge, check_refused
from moe_trm.step.objective import Objective
from moe_trm.types import RolloutRecord, TokenBatch, TrainBatch, TrainRow
from routing import ReplayProofError, token_digest

Records = list[RolloutRecord]
Lie = Callable[[Records, np.random.Generator], Records]


def with_sets(
    record: RolloutRecord, change: Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]
) -> RolloutRecord:
    """The record with other kept ids and their log-probs, renormalised; `change` also takes the sampled id."""
    mask, sampled = record.sampling_mask, record.tokens[record.sampled]
    assert mask is not None
    assert mask.logprobs is not None
    ids, logprobs, rollout = [], [], []
    for place, token in enumerate(sampled.tolist()):
        row = slice(mask.offsets[place], mask.offsets[place + 1])
        kept, values = change(mask.ids[row], mask.logprobs[row].astype(np.float64), token)
        order, values = np.argsort(kept), values - np.logaddexp.reduce(values)
        ids.append(kept[order])
        logprobs.append(values[order])
        rollout.append(values[kept == token][0])
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    changed = SamplingMask(np.concatenate(ids).astype(np.int32), offsets, np.concatenate(logprobs).astype(np.float32))
    return replace(record, sampling_mask=changed, rollout_logprobs=np.array(rollout, np.float32))


def rerouted(record: RolloutRecord, experts: np.ndarray) -> RolloutRecord:
    """The record with other experts, bound to it."""
    assert record.routes is not None
    routes = replace(record.routes, experts=experts, token_digest=token_digest(record.tokens))
    return replace(record, routes=routes).bound()


def clean(records: Records, rng: np.random.Generator) -> Records:
    return records


def lacking_ids(records: Records, rng: np.random.Generator) -> Records:
    """The sampled token and the likeliest one alone."""

    def change(ids: np.ndarray, values: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        kept = np.unique([int(np.flatnonzero(ids == token)[0]), int(values.argmax())])
        return ids[kept], values[kept]

    return [with_sets(record, change) for record in records]


def sampled_alone(records: Records, rng: np.random.Generator) -> Records:
    return [
        with_sets(record, lambda ids, values, token: (ids[ids == token], values[ids == token])) for record in records
    ]


def foreign_ids(records: Records, rng: np.random.Generator) -> Records:
    """Twenty ids more at each token."""

    def change(ids: np.ndarray, values: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        absent_ids = np.setdiff1d(np.arange(3, 99), ids)
        added = rng.choice(absent_ids, min(20, len(absent_ids)), replace=False)
        return np.concatenate([ids, added]), np.concatenate([values, np.full(len(added), -16.0)])

    return [with_sets(record, change) for record in records]


def claimed_mass(records: Records, rng: np.random.Generator) -> Records:
    """Kept sets that claim 18 times the probability of everything."""
    full = np.float32(np.log(18.0))
    return [replace(record, full_logprobs=record.rollout_logprobs + full) for record in records]


def other_temperature(records: Records, rng: np.random.Generator) -> Records:
    """Log-probs of a temperature of 1 / 0.7 times the run's."""
    changed = [with_sets(record, lambda ids, values, token: (ids, 0.7 * values)) for record in records]
    return [
        replace(new, full_logprobs=new.rollout_logprobs + old.full_logprobs - old.rollout_logprobs)
        for new, old in zip(changed, records, strict=True)
    ]


def swapped_answers(records: Records, rng: np.random.Generator) -> Records:
    """Four samples have each other's answers, with everything that belongs to these."""
    groups = {record.group_id: place for place, record in enumerate(records)}
    places = list(groups.values())[:4]
    sources = dict(zip(places, np.roll(places, 1).tolist(), strict=True))
    swapped = {place: _answered(records[place], records[source]) for place, source in sources.items()}
    return [swapped.get(place, record) for place, record in enumerate(records)]


def _answered(question: RolloutRecord, answer: RolloutRecord) -> RolloutRecord:
    assert question.routes is not None
    assert answer.routes is not None
    prompt, start = int(question.sampled.argmax()), int(answer.sampled.argmax())
    tokens = np.concatenate([question.tokens[:prompt], answer.tokens[start:]])
    experts = np.concatenate([question.routes.experts[:prompt], answer.routes.experts[start:]])
    made = replace(
        answer,
        sample_id=question.sample_id,
        group_id=question.group_id,
        prompt_id=question.prompt_id,
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= prompt,
        turn_ids=np.zeros(len(tokens), np.int16),
    )
    return rerouted(made, experts)


def tokenized_again(records: Records, rng: np.random.Generator) -> Records:
    """In each of four samples one token is another kept one; its log-prob stays what it was."""
    changed = list(records)
    for place in rng.permutation(len(records))[:4].tolist():
        record = records[place]
        mask = record.sampling_mask
        assert mask is not None
        assert mask.logprobs is not None
        at = int(np.diff(mask.offsets).argmax())
        row = slice(mask.offsets[at], mask.offsets[at + 1])
        least = mask.ids[row][mask.logprobs[row].argmin()]
        tokens, rollout = record.tokens.copy(), record.rollout_logprobs.copy()
        tokens[np.flatnonzero(record.sampled)[at]] = least
        rollout[at] = mask.logprobs[row].max()
        assert record.routes is not None
        changed[place] = rerouted(replace(record, tokens=tokens, rollout_logprobs=rollout), record.routes.experts)
    return changed


def copied_answers(records: Records, rng: np.random.Generator) -> Records:
    """The longest answer of each prompt stands there four times of eight."""
    changed = []
    for group in dict.fromkeys(record.group_id for record in records):
        samples = [record for record in records if record.group_id == group]
        source = max(samples, key=lambda record: record.num_sampled)
        for place, record in enumerate(samples):
            copied = replace(source, sample_id=record.sample_id)
            assert copied.routes is not None
            changed.append(rerouted(copied, copied.routes.experts) if place < len(samples) // 2 else record)
    return changed


def routes_of_siblings(records: Records, rng: np.random.Generator) -> Records:
    """Each sample has the routes of the next one of its prompt, as far as both go."""
    changed = []
    for group in dict.fromkeys(record.group_id for record in records):
        samples = [record for record in records if record.group_id == group]
        for record, sibling in zip(samples, [*samples[1:], samples[0]], strict=True):
            assert record.routes is not None
            assert sibling.routes is not None
            experts, length = record.routes.experts.copy(), min(record.num_tokens, sibling.num_tokens) - 1
            experts[:length] = sibling.routes.experts[:length]
            changed.append(rerouted(record, experts))
    return changed


LIES: Mapping[str, tuple[Lie, str]] = MappingProxyType(
    {
        "clean": (clean, "nothing"),
        "masks lack kept ids": (lacking_ids, "rejected"),
        "masks of the sampled token alone": (sampled_alone, "rejected"),
        "masks with foreign ids": (foreign_ids, "stopped"),
        "a kept mass of 18": (claimed_mass, "rejected"),
        "log-probs of another temperature": (other_temperature, "told"),
        "answers swapped": (swapped_answers, "told"),
        "one token tokenized again": (tokenized_again, "told"),
        "answers copied": (copied_answers, "told"),
        "routes of another answer": (routes_of_siblings, "stopped"),
    }
)
"""Name -> the edit, and the least that has to come of it."""


OUTCOMES = ("nothing", "told", "rejected", "stopped")
"""From the weakest to the strongest."""


def suffices(row: Row) -> bool:
    """True where as much came of a lie as expected, or more, and nothing of a clean step."""
    weaker = OUTCOMES.index(str(row["outcome"])) < OUTCOMES.index(str(row["expected"]))
    return row["outcome"] == row["expected"] or not (weaker or row["expected"] == "nothing")


def outcome(config: Config, learner: Learner, records: Sequence[RolloutRecord]) -> tuple[str, str]:
    """The fate of a step of fresh samples, `nothing`, `told`, `rejected` or `stopped`, and the words for it."""
    bounds, accepted, reasons = (
        sampler_bounds(config.rollout, config.sampling_mask),
        list[RolloutRecord](),
        Counter[str](),
    )
    for record in records:
        try:
            check_kept_sets(record, bounds)
            accepted.append(record)
        except RecordRejected as rejection:
            reasons[rejection.reason] += 1
    if reasons:
        return "rejected", ", ".join(f"{reason} {number}" for reason, number in reasons.items())
    try:
        metrics = trained(config, learner, accepted, MaskJudge(bounds))
        check_refused(metrics, len(accepted))
    except (ReplayProofError, FalseRecords) as error:
        return "stopped", type(error).__name__
    params = sampling_params(config.rollout, config.keeps_masks, 100, ())
    calm = {"optimizer/grad_norm": 1.0, "reward/zero_variance_groups": 0.0}
    judgement = verdict([{**metrics, **sample_metrics(accepted, params), **calm}], settings=flatten(config.dump()))
    return ("nothing", "ok") if judgement.case == "ok" else ("told", judgement.sentence)


def trained(
    config: Config, learner: Learner, records: Sequence[RolloutRecord], masks: MaskJudge
) -> Mapping[str, float]:
    """The metrics of one step, whose learning rate is 0."""
    rows = [TrainRow(record) for record in records]
    plan = plan_step(rows, seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=config.learner.micro_batch_rows)
    objective = Objective(config, masks=masks)
    anchors = Anchors(config, "R3", reads_minibatch=objective.reads_minibatch, masks=masks)
    [part] = anchors.score(learner, TrainBatch(1, tuple(plan[0]), {}, versions=(0,)))
    part = replace(part, batches=[_valued(batch) for batch in part.batches])
    learner.update(part.batches, part.sources, objective.bind(part, learner, first=True), kept_mass=not part.scores)
    learner.replay_report()
    return objective.take(learner)


def _valued(batch: TokenBatch) -> TokenBatch:
    """Advantages of both signs."""
    signs = 1.0 - 2.0 * (torch.arange(len(batch.mask), device=batch.mask.device)[:, None] % 2)
    return replace(batch, advantages=torch.where(batch.mask, signs, 0.0))


def rows_of_lies(checkpoint: Path, folder: Path, bundle: Path | None, seeds: Sequence[int]) -> list[Row]:
    """One row for each lie and seed, with its outcome."""
    from moe_trm.learner.megatron.build import build_megatron_learner, close_learner

    bundle = bundle or record_run(checkpoint, folder, 1, ["rollout.server.startup_timeout_s=900"])
    path = folder / "lies.yaml"
    path.write_text(f"model: {{checkpoint: {checkpoint}}}\n", encoding="utf-8")
    words = ["rollout.top_p=0.95", "optimizer.lr=0", "learner.micro_batch_rows=32", "sampling_mask.mode=keep"]
    config = load(path, [*words, "replay.mode=R3", "probe.every=0"])
    learner, rows = build_megatron_learner(config), list[Row]()
    try:
        for name, (lie, expected) in LIES.items():
            for seed in seeds:
                records = [record.bound() for record in BundleReader(str(bundle)).read(1)]
                result, words_of_it = outcome(config, learner, lie(records, np.random.default_rng(seed)))
                print(f"{name}, seed {seed}: {result}: {words_of_it}", flush=True)
                rows.append({"lie": name, "seed": seed, "expected": expected, "outcome": result, "by": words_of_it})
    finally:
        close_learner()
    return rows
