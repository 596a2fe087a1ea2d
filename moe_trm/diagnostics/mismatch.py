"""Mismatch of two policies on the sampled tokens, ratio by ratio.

Shape letters: B sequences, T tokens, N sampled tokens, packed: padding is dropped before any computation on single
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_trm import summable
from moe_trm.corrections.evidence import Evidence
from moe_trm.packing import Packing
from moe_trm.ratios import LOG_RATIO_LIMIT, LogRatios, clamp_log_ratio

HIGH_RATIO = 2.0
PARTS = ("lag", "update")
"""Parts of staleness: where it is known, they are measured by tokens alone."""
PROBABILITY_TOP, CHI2_TOP = 0, 20
"""Powers of two that end the histograms: differences of probabilities are at most 1."""
BLOCK = 1 << 15
"""Log-ratios worked on together: what they need stays in a core's cache."""


def metrics(evidence: Evidence, names: Sequence[str] | None = None) -> summable.Sums:
    """Mismatch metrics of each part of the log-ratio, summable; `finalize` turns them into numbers.

    Prefixes: `engine/`, `lag/`, `update/`, `staleness/`, `total/`; `merged/`, `update/`, `total/` when the weights that
    sampled are gone; `total/` alone when the learner made no pass of its own at the step's start. What is not known has
    no number. `names` asks for fewer. x is a log-ratio between a later and an earlier policy. Means are over sampled
    tokens, or over rows that have any:

    | name | definition |
    |---|---|
    | `kl` | mean(-x): unbiased under the earlier policy, noisy, may be negative |
    | `k3_kl` | mean(e^x - 1 - x): unbiased too, never negative |
    | `abs_log_ratio` | mean abs(x) |
    | `chi2_token`, `chi2_seq` | mean(e^{2x}) - 1 of tokens; of row sums |
    | `log_ppl_diff`, `log_ppl_abs_diff`, `ppl_ratio` | mean over rows of d, abs(d), e^d with d = mean_t(-x) |
    | `log_ppl_diff_{max,min}` | the largest and the smallest d |
    | `rollout_is_{mean,std,eff_sample_size,max,min}` | of e^x over tokens |
    | `rollout_is_seq_{mean,std,eff_sample_size,max,min}` | of e^{sum x} over rows |
    | `rollout_is_high_fraction`, `rollout_is_low_fraction` | share of tokens with e^x above 2, below 1/2 |

    The parts of staleness, `lag/` and `update/` beside it, have those of single tokens alone. `engine/` (or `merged/`)
    and `total/` also have, each of the rollout's log-probs against the other policy's:

    | name | definition |
    |---|---|
    | `rollout_ppl`, `training_ppl` | mean over rows of e^s, with s = mean_t(-log p) |
    | `rollout_log_ppl`, `training_log_ppl` | mean over rows of s |
    | `probs_pearson` | correlation of p and q |
    | `probs_diff_{mean,std,max}` | of abs(p - q): the field's proxy of total variation |
    | `probs_diff_p95` | its 95th percentile over tokens |
    | `chi2_token_p95` | 95th percentile over rows of mean_t(e^{2x}) - 1 |

    Percentiles are of histograms (`moe_trm.summable`). When the rollout's distribution on its kept support is recorded,
    `total/exact_kl` is the exact mean KL(rollout || current) on it. Rows without sampled tokens are not counted.
    Log-ratios are clamped to +-20 nats before any exponential.
    Source: verl's rollout correction, whose names are kept.
    """
    ratios = evidence.ratios
    known, parts = ratios.known, PARTS if ratios.split else ()
    chosen = [name for name in known if names is None or name in names]
    whole = [name for name in chosen if name not in parts]
    compared = [name for name in whole if name in (known[0], "total")]
    if not chosen:
        return summable.Sums.of({})
    sample, found = _Sample.of(ratios, chosen), summable.Vectors()
    _measure_tokens(sample, compared, found)
    if whole:
        _measure_rows(sample, whole, compared, found)
    if compared:
        _measure_policies(sample, compared, found)
    if evidence.exact_kl is not None and (names is None or "total" in names):
        return summable.Sums.joined([found.sums(), summable.mean("total/exact_kl", evidence.exact_kl, ratios.mask)])
    return found.sums()


@dataclass(frozen=True)
class _Sample:
    """What is measured: several log-ratios of the same tokens, so that an operation is called once for all of them.

    Attributes:
        log_ratio: by name, `[B, T]`, 0 off the mask.
        packed: `[R, N]`, the same at the sampled tokens alone, in the same order.
        rollout: `[N]`, log-probs of the policy that sampled.
        packing: of the sampled tokens.
    """

    log_ratio: Mapping[str, Tensor]
    packed: Tensor
    rollout: Tensor
    packing: Packing

    @classmethod
    def of(cls, ratios: LogRatios, names: Sequence[str]) -> _Sample:
        packing = ratios.packing
        log_ratio = {name: ratios.get(name).detach() for name in names}
        packed = torch.stack([packing.pack(values) for values in log_ratio.values()])
        return cls(log_ratio, packed, ratios.packed_rollout_logprobs(), packing)

    @cached_property
    def far(self) -> bool:
        """True when a clamp would change one of the log-ratios, or one is NaN."""
        return self.beyond(LOG_RATIO_LIMIT)

    def beyond(self, limit: float) -> bool:
        """True when one is farther than `limit` from 0, NaN included."""
        return not self._farthest <= limit

    @cached_property
    def _farthest(self) -> float:
        return float(self.span.abs().amax()) if len(self.rollout) else 0.0

    @cached_property
    def span(self) -> Tensor:
        """`[2, R]` float64: smallest and largest of each log-ratio."""
        return _span(self.packed)

    def row_sums(self, names: Sequence[str], *, clamped: bool) -> Tensor:
        """`[M, B]`: each log-ratio of these names summed over a row. Off the mask they are 0."""
        given = [self.log_ratio[name] for name in names]
        return torch.stack([(clamp_log_ratio(values) if clamped else values).sum(dim=1) for values in given])


def _measure_tokens(sample: _Sample, compared: Sequence[str], found: summable.Vectors) -> None:
    """Figures of single tokens; of those `compared` that of a row's excess of squares too."""
    names, limit = list(sample.log_ratio), math.log(HIGH_RATIO)
    wide = sample.beyond(limit)
    sums_6R = torch.zeros(6, len(names), dtype=torch.float64, device=sample.rollout.device)
    excess_RN = torch.empty_like(sample.packed)
    for block, excess in _blocks(sample.packed, excess_RN):
        x = clamp_log_ratio(block) if sample.far else block
        less = x.expm1()
        torch.mul(less, less + 2, out=excess)  # e^{2x} - 1
        sums_6R[:4] += torch.stack([_sums(x), _sums(x.abs()), _sums(less), _sums(excess)])
        if wide:
            sums_6R[4:] += torch.stack([(x > limit).count_nonzero(dim=1), (x < -limit).count_nonzero(dim=1)])
    sum_x, _, sum_expm1, *_ = sums_6R
    tokens = float(len(sample.rollout))
    keys = ("abs_log_ratio", "chi2_token", "rollout_is_high_fraction", "rollout_is_low_fraction")
    found.put(names, [f"{key}:sum" for key in keys], sums_6R[[1, 3, 4, 5]])
    found.put(names, ["kl:sum", "k3_kl:sum"], torch.stack([-sum_x, (sum_expm1 - sum_x).clamp(min=0.0)]))
    found.put(names, ["rollout_is:sum", "rollout_is:square"], sums_6R[2:4] + tokens)
    found.fill(names, [f"{key}:count" for key in (*keys, "kl", "k3_kl", "rollout_is")], tokens)
    found.put(names, ["rollout_is_min:min", "rollout_is_max:max"], _as_ratios(sample.span))
    lengths = sample.packing.lengths
    some = lengths > 0
    for name, excess in zip(compared, _part(excess_RN, names, compared), strict=True):
        of_rows = sample.packing.row_sums(excess)[some] / lengths[some]
        found.histogram(f"{name}/chi2_token", summable.bins(of_rows, CHI2_TOP))


def _measure_rows(sample: _Sample, names: Sequence[str], compared: Sequence[str], found: summable.Vectors) -> None:
    """Figures of rows with sampled tokens, b of them; of those `compared` the perplexities of both policies too."""
    some = sample.packing.lengths > 0
    length_b, moved_Mb = sample.packing.lengths[some], sample.row_sums(names, clamped=False)[:, some]
    # A second pass over all tokens only where a clamp would change one of them.
    drop_Mb = -(sample.row_sums(names, clamped=True)[:, some] if sample.far else moved_Mb) / length_b
    total_Mb = clamp_log_ratio(moved_Mb)
    ratio_Mb, rows = total_Mb.exp(), float(len(length_b))
    values = [(2 * total_Mb).expm1(), drop_Mb, drop_Mb.abs(), drop_Mb.exp(), ratio_Mb, ratio_Mb.square()]
    keys = ("chi2_seq", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "rollout_is_seq")
    found.put(names, [*(f"{key}:sum" for key in keys), "rollout_is_seq:square"], _sums(torch.stack(values)))
    found.fill(names, [f"{key}:count" for key in keys], rows)
    found.put(names, ["log_ppl_diff_min:min", "log_ppl_diff_max:max"], _span(drop_Mb))
    found.put(names, ["rollout_is_seq_min:min", "rollout_is_seq_max:max"], _as_ratios(_span(total_Mb)))
    if compared:
        surprise_b = -sample.packing.row_sums(sample.rollout)[some] / length_b
        moved_Cb = _part(moved_Mb, names, compared) / length_b
        log_ppl_2Cb = torch.stack([surprise_b.expand_as(moved_Cb), surprise_b - moved_Cb])
        both = ("rollout_log_ppl", "training_log_ppl", "rollout_ppl", "training_ppl")
        found.put(compared, [f"{key}:sum" for key in both], _sums(torch.cat([log_ppl_2Cb, log_ppl_2Cb.exp()])))
        found.fill(compared, [f"{key}:count" for key in both], rows)


def _measure_policies(sample: _Sample, names: Sequence[str], found: summable.Vectors) -> None:
    """Probabilities of the policy that sampled, p, beside those of the others, q."""
    sums_7C = torch.zeros(7, len(names), dtype=torch.float64, device=sample.rollout.device)
    widest_C = torch.full_like(sums_7C[0], -math.inf)
    counts = [summable.bins(sample.rollout[:0], PROBABILITY_TOP) for _ in names]
    others_CN = _part(sample.packed, list(sample.log_ratio), names)
    for rollout, log_ratio in _blocks(sample.rollout, others_CN):
        p = rollout.exp()
        q = (rollout + log_ratio).exp()
        gap = (p - q).abs_()
        widest_C = torch.maximum(widest_C, _span(gap)[1])
        for total, own in zip(counts, gap, strict=True):
            total += summable.bins(own, PROBABILITY_TOP)
        # Variances are differences of sums: products need the full 53 bits.
        p, q, gap = p.double(), q.double(), gap.double()
        of_p = [value.expand(len(names)) for value in (p.sum(), p @ p)]
        sums_7C += torch.stack([*of_p, q.sum(1), _squares(q), q @ p, gap.sum(1), _squares(gap)])
    roles = [f"probs_pearson:{role}" for role in ("x", "xx", "y", "yy", "xy")]
    found.put(names, [*roles, "probs_diff:sum", "probs_diff:squared"], sums_7C)
    found.put(names, ["probs_diff_max:max"], widest_C[None])
    found.fill(names, ["probs_pearson:count", "probs_diff:count"], float(len(sample.rollout)))
    for name, own in zip(names, counts, strict=True):
        found.histogram(f"{name}/probs_diff", own)


def _blocks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of two tensors `[..., N]` that are worked on together."""
    width = max(1, BLOCK * second.shape[-1] // max(1, second.numel()))
    return zip(torch.split(first, width, dim=-1), torch.split(second, width, dim=-1), strict=True)


def _part(values: Tensor, names: Sequence[str], chosen: Sequence[str]) -> Tensor:
    """The rows of `values`, which are of `names`, that are of the `chosen` ones."""
    return values[[names.index(name) for name in chosen]]


def _span(values: Tensor) -> Tensor:
    """`[2, rows]` float64: smallest and largest of each row, infinity and minus infinity where there is none."""
    if not values.shape[1]:
        return torch.tensor([[math.inf], [-math.inf]], dtype=torch.float64, device=values.device).expand(2, len(values))
    return torch.stack([values.amin(dim=1), values.amax(dim=1)]).double()


def _as_ratios(span: Tensor) -> Tensor:
    """Ratios of a span of log-ratios; infinities of no values at all stay what they are."""
    none = span.new_tensor([[math.inf], [-math.inf]])
    return torch.where(span == none, span, clamp_log_ratio(span).exp())


def _sums(values: Tensor) -> Tensor:
    """Sums over the last dimension, float64."""
    return values.double().sum(-1)  # twice as fast as a sum that converts as it goes


def _squares(values: Tensor) -> Tensor:
    """Sum of the squares of each row."""
    return torch.stack([row @ row for row in values])  # several times faster than a product that is kept
