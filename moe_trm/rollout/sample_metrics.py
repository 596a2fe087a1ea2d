"""Metrics of the samples that a step trains, and of the time in which they were made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from moe_trm.advantages.by_name import explained_variance
from moe_trm.batch.train_rows import num_sampled
from moe_trm.sampling_mask.codec import encoded_lengths
from moe_trm.sampling_mask.record import join
from moe_trm.types import RolloutRecord, SamplingParams


def sample_metrics(records: Sequence[RolloutRecord], params: SamplingParams) -> dict[str, float]:
    """Rewards, lengths, turns and sampling masks of these samples, at least one."""
    rewards = np.array([record.reward for record in records])
    lengths = np.array([num_sampled(record) for record in records])
    groups = np.array([record.group_id for record in records])
    spread = [np.ptp(rewards[groups == group]) for group in np.unique(groups)]
    # Without rewards above 1, 1 is the highest there is; else the step's own highest is all that is known.
    highest = max(1.0, float(rewards.max()))
    solved = [rewards[groups == group].min() == highest for group in np.unique(groups)]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/zero_variance_groups": float(np.mean(np.array(spread) == 0)),
        "reward/solved_groups": float(np.mean(solved)),
        **explained_variance(rewards, groups),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/finished_fraction": float(np.mean([record.finish_reason == "stop" for record in records])),
        **copy_metrics(records),
        **turn_metrics(records),
        **mask_metrics([row for record in records for row in record.rows], params),
    }


UNLIKELY = math.log(1e-6)
"""Log of the chance of a step's copies below which they are none of chance."""


def copy_metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """`response/copies`: answers that repeat another of their group, beyond what the policy makes likely.

    Of n samples of a group, k have the same tokens, of probability P by the rollout's own log-probs. Given one of them,
    k - 1 others are the same with a chance of at most C(n - 1, k - 1) P^(k - 1). `response/copies_log_p` is the log of
    the least such chance, times the number of groups; it is there where answers are equal at all.
    """
    groups: dict[int, Counter[bytes]] = {}
    log_probs: dict[bytes, float] = {}
    for record in records:
        answer = b"/".join(row.tokens.tobytes() + row.sampled.tobytes() for row in record.rows)
        groups.setdefault(record.group_id, Counter())[answer] += 1
        log_probs[answer] = sum(float(row.rollout_logprobs.sum(dtype=np.float64)) for row in record.rows)
    chances = [
        (count - 1, math.log(math.comb(counts.total() - 1, count - 1) * len(groups)) + (count - 1) * log_probs[answer])
        for counts in groups.values()
        for answer, count in counts.items()
        if count > 1
    ]
    metrics = {"response/copies": float(sum(copies for copies, log_p in chances if log_p < UNLIKELY))}
    return metrics | ({"response/copies_log_p": min(log_p for _, log_p in chances)} if chances else {})


def time_metrics(records: Sequence[RolloutRecord], busy_s: float, idle_s: float, push_s: float) -> dict[str, float]:
    """Seconds that sampling took and waited, those of the last push, and the rate of these samples' tokens."""
    tokens = sum(map(num_sampled, records))
    return {
        **({"rollout/tokens_per_s": tokens / busy_s} if busy_s else {}),
        "time/rollout_s": busy_s,
        "time/rollout_idle_s": idle_s,
        "time/rollout_idle_share": idle_s / (busy_s + idle_s),
        "time/push_s": push_s,
    }


MEASURED_IDS = 1 << 20
"""Kept ids of a step whose encoded bytes are counted, at most by one answer more: deflating all takes long."""


def mask_metrics(records: Sequence[RolloutRecord], params: SamplingParams) -> dict[str, float]:
    """`sampling_mask/*` of the accepted records; empty when no mask was recorded.

    | metric | meaning |
    |---|---|
    | `size_mean`, `size_median`, `size_p99`, `size_max`, `singleton_fraction` | of the sizes of the kept sets |
    | `kept_mass_mean` | the rollout engine's own probability of the kept sets, where it tells that |
    | `violations` | repaired sampled tokens outside their set; rejected ones: `records/rejected/mask_violation` |
    | `top_k` | in force |
    | `id_bytes_per_token`, `bytes_per_token` | encoded, without and with log-probs; of the first answers |
    """
    recorded = [(record, record.sampling_mask) for record in records if record.sampling_mask is not None]
    if not recorded:
        return {}
    mask = join([mask for _, mask in recorded])
    # All records at once: an array operation on one short record takes as long as one on all of them.
    tokens, places, full, rollout = (
        np.concatenate([getattr(record, name) for record, _ in recorded])
        for name in ("tokens", "sampled", "full_logprobs", "rollout_logprobs")
    )
    sizes = np.diff(mask.offsets)
    scored = sizes > 0
    kept_sizes, log_mass = sizes[scored], (full - rollout)[scored]
    median, p99 = np.quantile(kept_sizes, (0.5, 0.99)).tolist()
    vocab_size = 1 + int(max(mask.ids.max(), tokens[places].max()))
    if len(mask.ids) <= MEASURED_IDS:
        measured = mask
    else:
        earlier_ids = np.cumsum([0, *(len(row_mask.ids) for _, row_mask in recorded[:-1])]).tolist()
        measured = join(
            [row_mask for (_, row_mask), ids in zip(recorded, earlier_ids, strict=True) if ids < MEASURED_IDS]
        )
    bare, encoded_bytes = encoded_lengths(measured, vocab_size)
    return {
        "sampling_mask/size_mean": float(kept_sizes.mean()),
        "sampling_mask/size_median": median,
        "sampling_mask/size_p99": p99,
        "sampling_mask/size_max": float(sizes.max()),
        "sampling_mask/singleton_fraction": float((kept_sizes == 1).mean()),
        "sampling_mask/violations": float(mask.violations),
        "sampling_mask/top_k": float(params.top_k),
        "sampling_mask/id_bytes_per_token": bare / measured.num_rows,
        "sampling_mask/bytes_per_token": encoded_bytes / measured.num_rows,
        **({} if np.isnan(log_mass).any() else {"sampling_mask/kept_mass_mean": float(np.exp(log_mass).mean())}),
    }


def turn_metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Metrics of `records` (at least one) with several answers or several parts of the reward.

    | metric | of |
    |---|---|
    | `reward/<name>/mean` | the samples whose reward has a part of that name |
    | `turns/mean`, `turns/max` | trained answers per sample, where any sample has several |
    | `turns/appended_tokens_mean` | tokens that a tool or user said between trained answers, per sample |
    | `turns/later_token_fraction` | share of sampled tokens that come after the first answer, hence after a tool |
    | `turns/rows_mean`, `turns/rows_max` | rows per sample, where any sample has several |
    """
    metrics = {f"reward/{name}/mean": mean for name, mean in part_means(records).items()}
    turns = np.array([sum(_answers(row) for row in record.rows) for record in records])
    if turns.max() > 1:
        rows = [row for record in records for row in record.rows]
        later = [int((row.turn_ids[row.sampled] > 0).sum()) for row in rows]
        metrics |= {
            "turns/mean": float(turns.mean()),
            "turns/max": float(turns.max()),
            "turns/appended_tokens_mean": float(np.mean([_appended(record) for record in records])),
            "turns/later_token_fraction": sum(later) / sum(row.num_sampled for row in rows),
        }
    several = [len(record.rows) for record in records]
    if max(several) > 1:
        metrics |= {"turns/rows_mean": float(np.mean(several)), "turns/rows_max": float(max(several))}
    return metrics


def part_means(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Mean of each named part of the reward, over the samples that have it."""
    return {
        name: float(np.mean([record.reward_parts[name] for record in records if name in record.reward_parts]))
        for name in sorted({name for record in records for name in record.reward_parts})
    }


def _answers(row: RolloutRecord) -> int:
    """Answers that it trains."""
    return len(set(row.turn_ids[row.sampled].tolist()))


def _appended(record: RolloutRecord) -> int:
    """Tokens that were not sampled, between two trained answers of the sample."""
    if record.session:
        return sum(turn.added for turn in record.session if turn.row >= 0 and turn.parent >= 0)
    return int((~record.sampled[int(record.sampled.argmax()) :]).sum())
