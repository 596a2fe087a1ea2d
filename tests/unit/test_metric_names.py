"""The list of metrics that pages and readers are held to: it knows what is written, and refuses what is not."""

from __future__ import annotations

from tests.unit import metric_names

INVENTED = [
    "engine/k9_kl", "engine/k3", "engine/kl_*", "engine/first_nonzero_fraction", "merged/exact_kl", "staleness/foo",
    "total/native_k3_kl", "replay/applied", "replay/fraction", "routing/flips", "routing/flips/nothing",
    "routing/flips/engine/layer_x", "routing/flip_rate", "correction/x/unknown", "correction/<rule>/unknown",
    "correction/opsm/pg_clipfrac", "correction/k3_kl", "correction/threshold_cap", "loss/sigma", "loss/kept_fraction",
    "ledger/lost", "records/rejected/nothing", "records/dropped/aborted", "queue/age/old", "eval/pass_at",
    "eval/pass_at_x", "eval/rejected/nothing", "eval/k3_kl", "acceptance/length_1_17", "trm/tv_from_",
    "trm/bound_none", "probe/whatever", "probe/k3_kl", "time/none_s", "kl/k3", "reference/k2_kl", "verdict/x",
    "turns/min", "reward/accuracy", "optimizer/entropy", "sampling_mask/size", "policy/kl", "weights/lr",
    "update/nonzero_fraction", "batch/age_max",
]  # fmt: skip

REAL = [
    "engine/k3_kl", "engine/*", "merged/probs_pearson", "staleness/kl", "total/exact_kl",
    "update/first_nonzero_fraction", "replay/applied_fraction", "routing/flips/engine",
    "routing/flips/engine/layer_12", "routing/local_flip_rate/layer_i", "routing/flips/engine/margin_0.01_0.03",
    "correction/<rule>/kept_fraction", "correction/opsm/score", "correction/weight_mean",
    "correction/ln_trm/threshold_max_score", "loss/pg_clipfrac_lower", "loss/policy", "ledger/in_flight",
    "records/rejected/route_rows", "records/rejected/rollout_*", "records/dropped/overlong", "queue/age/<age>",
    "eval/pass_at_8", "eval/avg_at_K", "eval/math/accuracy", "eval/rejected/<reason>", "acceptance/length_17_64",
    "trm/tv_from_P", "trm/bound_tightest", "probe/native_k3_kl", "time/<phase>_s", "time/checkpoint_s", "kl/coef",
    "reference/k1_kl", "verdict/case", "turns/max", "reward/<name>/mean", "optimizer/lr_scale",
]  # fmt: skip


def test_invented_names_are_refused_and_real_ones_are_known() -> None:
    assert not [name for name in INVENTED if metric_names.exists(name)]
    assert not [name for name in REAL if not metric_names.exists(name)]


def test_what_charts_lines_and_verdicts_read_is_written() -> None:
    read = metric_names.read()
    assert len(read) > 100
    assert not {name: path for name, path in read.items() if not metric_names.exists(name)}
