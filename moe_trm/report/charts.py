"""Charts of the report, as data: sections of charts, each naming the metrics it shows.

A `*` in a metric's name matches anything, and the matched part is the label. Metrics that a run did not measure are not
drawn, nor is a chart of fewer than `least` metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lines:
    """Curves over steps. `metrics` are pairs of name (or pattern) and label; an empty label takes what `*` matched."""

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    log: bool = False
    floor: bool = False
    least: int = 1


@dataclass(frozen=True)
class Heat:
    """One row for each metric that matches the first pattern that any does, one column for each step.

    `top` is the value of the darkest colour; None: the largest.
    """

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    top: float | None = None
    least: int = 1


@dataclass(frozen=True)
class Stack:
    """Parts of a whole, one column for each step."""

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    least: int = 1


@dataclass(frozen=True)
class Totals:
    """One bar for each metric that matches: its last value; `nothing` is what to say when none does."""

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    nothing: str
    least: int = 0


Chart = Lines | Heat | Stack | Totals


@dataclass(frozen=True)
class ChartSection:
    title: str
    charts: tuple[Chart, ...]


SECTIONS = (
    ChartSection(
        "Learning",
        (
            Lines("Reward and evaluation",
                  "Mean reward of the step's samples; evaluation is greedy, on held-out prompts.",
                  (("reward/mean", "reward"), ("reward/*/mean", ""), ("eval/accuracy", "accuracy"),
                   ("eval/reward", "evaluation"),
                   ("eval/avg_at_*", "evaluation, mean of "), ("eval/pass_at_*", "evaluation, best of "),
                   ("eval/best_at_*", "evaluation, best of "), ("eval/reward/*", "evaluation, "),
                   ("eval/*/accuracy", ""), ("eval/*/reward", "")), floor=True),
            Lines("Answer length", "Tokens sampled for one answer.",
                  (("response/length_mean", "mean"), ("eval/length_mean", "evaluation, mean"),
                   ("response/length_max", "longest")), floor=True),
            Lines("Finished, and without signal",
                  "Share of answers that ended by themselves; share of prompts whose samples all got the same reward.",
                  (("response/finished_fraction", "finished"),
                   ("reward/zero_variance_groups", "same reward")), floor=True),
            Lines("Explained by the baseline",
                  "Share of the rewards' variance that the mean of a prompt's other samples explains; near 1 the "
                  "samples of a prompt hardly differ.", (("reward/explained_variance", "explained"),)),
            Lines("Gradient", "Norm of the gradient before clipping, mean over the step's updates.",
                  (("optimizer/grad_norm", "norm"),), floor=True),
            Lines("Loss", "Its terms, mean over the step's updates; the level means little, a jump means much.",
                  (("loss/policy", "policy"), ("loss/kl", "KL"), ("loss/rollout_kl", "KL to rollout"),
                   ("loss/entropy", "entropy"))),
            Lines("Clipped tokens", "Share of tokens whose ratio the clip holds.",
                  (("loss/pg_clipfrac", "clipped"), ("loss/pg_clipfrac_lower", "dual clip")), floor=True),
            Lines("Variance of the gradient",
                  "Proxies, of which the course counts: power of the rows' gradients, and noise left in their mean.",
                  (("variance/total_power", "power"), ("variance/pure_noise", "noise"),
                   ("variance/signal_strength", "signal")), log=True),
            Lines("Entropy", "The policy's entropy, per token.", (("policy/entropy", "entropy"),), floor=True),
            Lines("Distance from the reference",
                  "KL of the policy from the frozen reference, per token, two estimates.",
                  (("reference/k3_kl", "k3"), ("reference/k1_kl", "k1"))),
            Lines("Turns and tools", "Turns of one conversation, and tokens that tools and templates gave.",
                  (("turns/mean", "turns"), ("turns/max", "most turns"),
                   ("turns/appended_tokens_mean", "given tokens")), floor=True),
        ),
    ),
    ChartSection(
        "Mismatch between rollout and learner",
        (
            Lines("Where the log-ratio comes from",
                  "k3 KL in nats. Engine: same weights, two engines. Staleness: the weights moved since sampling "
                  "(lag) and within the step (update).",
                  (("engine/k3_kl", "engine"), ("lag/k3_kl", "lag"), ("update/k3_kl", "update"),
                   ("merged/k3_kl", "engine and lag"),
                   ("staleness/k3_kl", "staleness"), ("total/k3_kl", "total"), ("total/exact_kl", "total, exact")),
                  log=True),
            Heat("By turn",
                 "k3 KL of the engines on each answer of a conversation, the first being 0. If it rises with the turn, "
                 "look at routes and ids of the context.",
                 (("turns/engine_k3/*", "turn "), ("turns/merged_k3/*", "turn ")), least=2),
            Lines("What makes the engine part",
                  "Probe steps: mean absolute log-ratio by numerics (same routes) and by routing (routes alone). Bands "
                  "are two standard errors, where the probe looked at a sample of the rows.",
                  (("probe/numerics_abs_mean", "numerics"), ("probe/routing_abs_mean", "routing")), log=True),
            Lines("With own and with replayed routes",
                  "Probe steps: k3 KL of the same tokens under the learner's own routes and under the rollout's.",
                  (("probe/native_k3_kl", "own routes"), ("probe/replayed_k3_kl", "replayed routes")), log=True),
            Lines("Share of the routes in it",
                  "Probe steps: share of the k3 KL under own routes that replayed routes remove, and share of the "
                  "step's tokens that the probe looked at.",
                  (("probe/routing_share", "from routes"), ("probe/token_fraction", "tokens looked at"))),
            Lines("What rounding the weights makes of it",
                  "Probe steps: k3 KL, with replayed routes, of the learner's own weights from those that the rollout "
                  "holds (quantization, cast), and of these from the rollout (arithmetic).",
                  (("probe/quantization_k3_kl", "quantization"), ("probe/cast_k3_kl", "cast"),
                   ("probe/arithmetic_k3_kl", "arithmetic")), log=True),
            Lines("Agreement of probabilities",
                  "Pearson correlation of both policies' token probabilities; 1 is perfect.",
                  (("engine/probs_pearson", "engine"), ("merged/probs_pearson", "engine and lag"),
                   ("total/probs_pearson", "total"))),
            Lines("Effective sample size",
                  "Share of tokens that importance weights leave effective; 1: all count alike.",
                  (("engine/rollout_is_eff_sample_size", "engine"), ("total/rollout_is_eff_sample_size", "total"))),
            Lines("Total variation",
                  "Of every part. It bounds the bias of token ratios, as chi2 (weight variance) does the variance of "
                  "weights. Above 0.1 tokens should be weighed.",
                  (("engine/tv", "engine"), ("merged/tv", "engine and lag"), ("lag/tv", "lag"),
                   ("update/tv", "update"), ("total/tv", "total")), log=True),
            Lines("Difference of probabilities",
                  "Difference for one token between both policies.",
                  (("engine/probs_diff_mean", "engine, mean"), ("engine/probs_diff_p95", "engine, 95%"),
                   ("engine/probs_diff_max", "engine, largest"), ("total/probs_diff_mean", "total, mean"),
                   ("total/probs_diff_p95", "total, 95%"), ("total/probs_diff_max", "total, largest")), log=True),
            Lines("Perplexity", "Mean over answers of exp(mean -log p), on what the rollout sampled.",
                  (("total/rollout_ppl", "rollout"), ("engine/training_ppl", "learner, same weights"),
                   ("total/training_ppl", "learner, now"))),
            Lines("Gap of log-perplexity", "Rollout to learner, by answer: the smallest, mean and largest.",
                  (("total/log_ppl_diff_min", "smallest"), ("total/log_ppl_diff", "mean"),
                   ("total/log_ppl_diff_max", "largest"))),
            Lines("Weight variance", "chi2 of the total ratio. Above 1 a few tokens dominate.",
                  (("total/chi2_token", "tokens"), ("total/chi2_token_p95", "rows, 95%"),
                   ("total/chi2_seq", "sequences"))),
        ),
    ),
    ChartSection(
        "Expert routes",
        (
            Lines("Router flips",
                  "Share of token-layers whose expert set differs: between the engines' own routers (probe steps), "
                  "and between the record and the live router.",
                  (("routing/native_flip_rate", "engines"), ("routing/local_flip_rate", "live router"),
                   ("routing/native_token_flip_rate", "engines, any layer")), floor=True),
            Lines("Flips by cause",
                  "Probe steps. Engine: both at the weights that sampled. Staleness: between those weights and "
                  "today's, of tokens an older version sampled.",
                  (("routing/flips/engine", "engine"), ("routing/flips/staleness", "staleness")), floor=True, least=2),
            Heat("Flips by layer: engines",
                 "Cause: numerics. Both engines at the same weights choose other experts (probe steps).",
                 (("routing/flips/engine/layer_*", "layer "),)),
            Heat("Flips by layer: staleness",
                 "Cause: age. The learner's router at the weights that sampled, against today's.",
                 (("routing/flips/staleness/layer_*", "layer "),)),
            Heat("Flips by position", "Engines, by place of the token in its sequence (probe steps).",
                 (("routing/flips/engine/position_*", ""),), least=2),
            Heat("Flips by router margin",
                 "Engines, by the gap between the last chosen and the first rejected score of the learner's router "
                 "(probe steps).",
                 (("routing/flips/engine/margin_*", ""),), least=2),
            Heat("Flips by layer: live router",
                 "Cause: numerics and training. What the learner's router would choose now, against the replayed "
                 "record.",
                 (("routing/local_flip_rate/layer_*", "layer "),)),
            Lines("Replay proof",
                  "Share of token-layers of replayed forwards that used their recorded route, as counted at the "
                  "dispatcher. Anything but 1 stops the run.",
                  (("replay/applied_fraction", "applied"),
                   ("replay/native_fraction", "left to own routers")), floor=True),
            Lines("Expert load",
                  "Entropy of the rollout's routes (1: even) and load of the busiest expert over the mean.",
                  (("routing/load_entropy", "entropy"), ("routing/load_max_over_mean", "busiest / mean")), floor=True),
        ),
    ),
    ChartSection(
        "Correction",
        (
            Lines("Kept tokens", "What the rules let into the gradient; denominators never change.",
                  (("correction/kept_fraction", "all rules, tokens"),
                   ("correction/kept_sequence_fraction", "all rules, sequences"), ("correction/*/kept_fraction", ""),
                   ("acceptance/later_turn_tokens", "later turns"))),
            Heat("Kept sequences by length",
                 "Share of sequences that lost no token, by sampled tokens. Paler rows below darker ones: long "
                 "answers are rejected more.",
                 (("acceptance/length_*", ""),), top=1.0),
            Heat("Rejected sequences by length, rules by length",
                 "Share of sequences that each rule with by_length drops, by sampled tokens: even, if it is neutral.",
                 (("correction/*/rejected_length_*", ""),), top=1.0),
            Lines("Kept sequences by kind", "A rule that prefers right or wrong answers biases what is learned.",
                  (("acceptance/correct", "right"), ("acceptance/wrong", "wrong"),
                   ("acceptance/positive", "positive advantage"), ("acceptance/negative", "negative advantage"))),
            Lines("Importance weights", "Of kept tokens, after caps.",
                  (("correction/weight_mean", "mean"), ("correction/weight_std", "deviation"),
                   ("correction/weight_eff_sample_size", "effective sample size"))),
            Lines("Truncated weights", "Share of tokens (of rows: seq_tis) whose ratio is above the cap, or below the "
                  "floor. Where it is large, the weights no longer correct.",
                  (("correction/*/truncated_fraction", "cap: "), ("correction/*/raised_fraction", "floor: ")),
                  floor=True),
        ),
    ),
    ChartSection(
        "Sampling mask",
        (
            Lines("Kept-set sizes", "Ids that top-k, top-p and min-p left for one token.",
                  (("sampling_mask/size_median", "median"), ("sampling_mask/size_mean", "mean"),
                   ("sampling_mask/size_p99", "99%"), ("sampling_mask/size_max", "largest")), log=True),
            Lines("Kept mass",
                  "Probability of the kept set under each engine: how far off full-vocabulary ratios would be.",
                  (("sampling_mask/kept_mass_mean", "rollout"), ("sampling_mask/learner_kept_mass_mean", "learner"))),
            Lines("Forced tokens", "Share of tokens with a single kept id: nothing was sampled there.",
                  (("sampling_mask/singleton_fraction", "one id"),), floor=True),
        ),
    ),
    ChartSection(
        "Age and books",
        (
            Lines("Age of samples",
                  "Weight versions between the one that sampled a token and the one that trains on it.",
                  (("rollout/age_mean", "mean"), ("rollout/age_max", "oldest")), floor=True),
            Stack("Tokens by age", "Share of a step's tokens.", (("rollout/age_share/*", "age "),), least=2),
            Lines("Groups that wait", "Finished prompts in the queue when the step was asked for.",
                  (("queue/groups", "groups"),), floor=True),
            Lines("Where samples are", "issued = queued + in flight + trained + rejected + dropped, at every step.",
                  (("ledger/issued", "issued"), ("ledger/trained", "trained"), ("ledger/queued", "queued"),
                   ("ledger/rejected", "rejected"), ("ledger/dropped", "dropped")), floor=True),
            Totals("Rejected and dropped, by reason",
                   "Since the start. Rejected: the record violates an invariant. Dropped: valid, but refused by "
                   "policy.",
                   (("records/rejected/*", "rejected: "),
                    ("records/dropped/*", "dropped: ")), "No sample was rejected or dropped."),
        ),
    ),
    ChartSection(
        "Time and schedule",
        (
            Stack("Seconds by phase",
                  "The learner's time: waiting for rollouts, scoring, probing, updating, pushing weights; evaluation "
                  "and checkpoints between steps.",
                  (("time/wait_s", "wait"), ("time/score_s", "score"), ("time/probe_s", "probe"),
                   ("time/update_s", "update"), ("time/sync_s", "sync"), ("time/eval_s", "evaluation"),
                   ("time/checkpoint_s", "checkpoint"))),
            Lines("Seconds of the rollout side", "Sampling, idling because the learner is slower, loading weights.",
                  (("time/rollout_s", "sampling"), ("time/rollout_idle_s", "idle"),
                   ("time/push_s", "loading")), floor=True),
            Lines("Idle shares",
                  "Share of the learner's step without samples; share of the engine's time with nothing to sample.",
                  (("time/learner_idle_share", "learner"), ("time/rollout_idle_share", "rollout")), floor=True),
            Lines("Rollout servers", "In service; since the start: losses, recoveries, samples asked for again, and "
                  "answers whose routes a server short of cache computed again.",
                  (("rollout/servers", "servers"), ("rollout/losses", "losses"), ("rollout/recoveries", "recoveries"),
                   ("rollout/reissued", "asked again"), ("rollout/retracted", "retracted")), floor=True),
            Lines("Intake processes", "Running and answering late; since the start: replaced, and answers asked again.",
                  (("rollout/intakes", "running"), ("rollout/intakes_busy", "busy"),
                   ("rollout/intake_losses", "replaced"), ("rollout/intake_reissued", "asked again")), floor=True),
            Lines("Batches", "Share of padding, and how much longer the fullest rank is than the mean.",
                  (("batch/padding_fraction", "padding"), ("batch/rank_imbalance", "imbalance")), floor=True),
            Lines("Learning rate", "Rate of the step's last update.", (("optimizer/lr", "rate"),), floor=True),
            Lines("Rollout speed", "Sampled tokens per second of rollout.",
                  (("rollout/tokens_per_s", "tokens/s"),), floor=True),
        ),
    ),
)  # fmt: skip


def shown(chart: Chart, known: Iterable[str]) -> list[tuple[str, str]]:
    """The metrics among `known` that `chart` shows, with their labels; none if it needs more."""
    known = list(known)
    if isinstance(chart, Heat):
        found = next((found for pattern in chart.metrics if (found := matching((pattern,), known))), [])
    else:
        found = matching(chart.metrics, known)
    return found if len(found) >= chart.least else []


def matching(metrics: tuple[tuple[str, str], ...], known: Iterable[str]) -> list[tuple[str, str]]:
    """Names among `known` that a chart shows, with their labels, in the chart's order and numbered rows by number."""
    known = sorted(known, key=_by_number)
    found: dict[str, str] = {}
    for pattern, label in metrics:
        if "*" not in pattern:
            found |= {pattern: label} if pattern in known and pattern not in found else {}
            continue
        regex = re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")))
        for name in known:
            match = regex.fullmatch(name)
            if match and name not in found:
                found[name] = label + _readable(pattern, match.groups())
    return list(found.items())


def _readable(pattern: str, parts: Sequence[str]) -> str:
    if pattern in ("acceptance/length_*", "routing/flips/engine/position_*", "routing/flips/engine/margin_*"):
        return parts[0].replace("_up", " and more").replace("_", " to ")
    if pattern == "correction/*/rejected_length_*":
        return f"{parts[0]}, {parts[1].replace('_up', ' and more').replace('_', ' to ')}"
    if pattern.startswith("turns/"):
        return parts[0].replace("_up", " and more")
    return parts[0]


def _by_number(name: str) -> tuple[float | str, ...]:
    # Text and numbers alternate, so that like is compared with like.
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return tuple(float(part) if place % 2 else part for place, part in enumerate(parts))
