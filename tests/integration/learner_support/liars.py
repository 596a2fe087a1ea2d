"""Wrong routes among right ones, on real learners: each is stopped and named, and a router that has moved is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_trm.learner.protocol import Learner
from moe_trm.types import TokenBatch
from routing import ReplayProofError, RouteRecord, expert_dtype, token_digest
from routing.indexer.record import IndexerRecord
from routing.record.sources import Record, Recorded, ReplayRecords
from tests.integration.learner_support.tiny import EXPERTS, INDEX_TOP_K, TOP_K, make_batch, random_positions
from tests.integration.learner_support.work import NUM_BATCHES, objective

PER_BATCH, LENGTH = 8, 48
WRONG = 19
"""A sample in the middle of the third micro-batch."""
Change = Callable[[int, np.ndarray, np.random.Generator], np.ndarray]


def unlike(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return np.argsort(rng.random((*shape, EXPERTS)), axis=-1)[..., :TOP_K]


def exchange(experts: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Another expert in place of the last one, in a share of the sets: what a router that has moved would choose."""
    other = np.array([rng.permutation(np.delete(np.arange(EXPERTS), row))[0] for row in experts.reshape(-1, TOP_K)])
    changed = experts.copy()
    hit = rng.random(experts.shape[:2]) < share
    changed[..., -1] = np.where(hit, other.reshape(experts.shape[:2]), experts[..., -1])
    return changed


CHANGES: dict[str, tuple[Change, str]] = {
    "random": (
        lambda s, e, rng: unlike(e.shape[:2], rng) if s == WRONG else e,
        rf"sample {WRONG}, layer \d+: .*unrelated",
    ),
    "shifted": (
        lambda s, e, rng: np.roll(e, 1, axis=0) if s == WRONG else e,
        rf"sample {WRONG}, layer \d+: .*of the row before",
    ),
    "a_quarter_shifted": (
        lambda s, e, rng: np.roll(e, -1, axis=0) if s % 4 == 3 else e,
        rf"sample {WRONG}, layer \d+: .*of the row after",
    ),
    "one_layer": (
        lambda s, e, rng: np.concatenate([e[:, :-1], unlike((len(e), 1), rng)], axis=1) if s == WRONG else e,
        rf"sample {WRONG}, layer \d+: .*unrelated",
    ),
    "second_half": (
        lambda s, e, rng: (
            np.concatenate([e[: len(e) // 2], unlike((len(e) - len(e) // 2, e.shape[1]), rng)]) if s == WRONG else e
        ),
        rf"sample {WRONG}, layer \d+: ",
    ),
}


def work(learner: Learner) -> list[TokenBatch]:
    """This rank's micro-batches of samples with ids."""
    batches = []
    for number in range(learner.data_rank, NUM_BATCHES, learner.data_size):
        ids = (*range(number * PER_BATCH, (number + 1) * PER_BATCH), -1)
        batches.append(replace(make_batch(500 + number, rows=PER_BATCH + 1, length=LENGTH), sample_ids=ids))
    return batches


def indexer_layers(learner: Learner) -> tuple[int, ...]:
    """Layers with an indexer of sparse attention; none on Megatron-Core."""
    return getattr(getattr(learner, "_replayer", None), "indexer_layer_ids", ())


def wrong_sets(share: float) -> Change:
    """Unrelated positions in a share of the tokens of one sample, the same tokens in every layer."""

    def change(sample: int, sets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if sample != WRONG:
            return sets
        hit = np.random.default_rng(1).permutation(len(sets))[: round(share * len(sets))]
        changed = sets.copy()
        changed[hit] = random_positions(INDEX_TOP_K + len(sets), rng)[hit]
        return changed

    return change


def natural(
    learner: Learner,
    batch: TokenBatch,
    recorded: Recorded,
    change: Change | None = None,
    change_sets: Change | None = None,
) -> ReplayRecords:
    """The routes that this learner's own routers choose, of its own layers."""
    rows, length = batch.input_ids.shape
    layers = tuple(sorted(recorded.experts))
    records: list[RouteRecord | None] = []
    mine = torch.empty(rows, length, 0, TOP_K)
    if layers:
        mine = torch.stack([recorded.by_row(layer, rows, length) for layer in layers], dim=2)
    # -1 stands where another rank has the token.
    whole = (learner.sum_over_slices((mine + 1).double()) - 1).long().cpu().numpy()
    for row, sample in enumerate(batch.sample_ids):
        tokens = int(batch.valid[row].sum())
        if not tokens:
            records.append(None)
            continue
        rng = np.random.default_rng(sample)
        # A pipeline rank may have no MoE layer, and nothing to change.
        experts = whole[row, :tokens] if change is None or not layers else change(sample, whole[row, :tokens], rng)
        digest = token_digest(np.append(batch.input_ids[row, :tokens], batch.target_ids[row, tokens - 1]))
        sets = {layer: chosen[row, INDEX_TOP_K:tokens].cpu().numpy() for layer, chosen in recorded.positions.items()}
        if change_sets is not None:
            sets = {layer: change_sets(sample, chosen, rng) for layer, chosen in sets.items()}
        indexer = IndexerRecord.of(tokens, INDEX_TOP_K, sets) if sets else None
        records.append(RouteRecord(experts.astype(expert_dtype(EXPERTS)), layers, EXPERTS, digest, indexer=indexer))
    return ReplayRecords(tuple(records))


def liars(learner: Learner) -> dict[str, bool | float]:
    """By kind of fault: the update is stopped, the sample and the fault are named. The weights stay."""
    batches, facts = work(learner), dict[str, bool | float]()
    own = [score.recorded for score in learner.score(batches, [Record()] * len(batches))]

    def sources(change: Change | None, sets: Change | None = None) -> list[ReplayRecords]:
        return [
            natural(learner, batch, r, change, sets) for batch, r in zip(batches, own, strict=True) if r is not None
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner._replayer, "max_local_flip_rate", 0.3)  # type: ignore[attr-defined]
        learner.replay_report()
        for kind, (change, words) in CHANGES.items():
            if kind == "second_half" and len(learner.model_moe_layer_ids) * TOP_K < 16:
                continue
            told = []
            wrong = sources(change)
            for call in (
                lambda wrong=wrong: learner.score(batches, wrong),
                lambda wrong=wrong: learner.update(batches, wrong, objective(batches, [])),
            ):
                try:
                    call()
                    told.append("nothing")
                except ReplayProofError as error:
                    told.append(str(error))
            facts[f"liar_{kind}"] = all(re.search(words, one) is not None for one in told)
            if not facts[f"liar_{kind}"]:
                print(kind, *told, sep="\n", flush=True)
        for share in (1.0, 0.25) if indexer_layers(learner) else ():
            words = ""
            try:
                learner.score(batches, sources(None, wrong_sets(share)))
            except ReplayProofError as error:
                words = str(error)
            named = rf"of 1 samples.*(sample {WRONG}: \d+ of \d+ tokens are apart|on other ranks)"
            facts[f"liar_positions_{share}"] = re.search(named, words, re.DOTALL) is not None
        learner.score(batches, sources(None))
        facts["honest_flips"] = learner.replay_report().local_flip_rate or 0.0
        learner.score(batches, sources(lambda s, e, rng: exchange(e, 0.45, rng)))
        moved = learner.replay_report()
        facts |= {"moved_samples": float(moved.moved), "moved_flips": moved.local_flip_rate or 0.0}
    return facts
