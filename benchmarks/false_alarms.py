"""Clean runs of small learners in every arithmetic: what judges mismatch and records may raise nothing.

`python -m benchmarks.false_alarms [--seeds 6] [--first-seed 0] [--steps 100]` trains one small MoE policy for each
arithmetic and seed. A rollout samples by decoding, one token after the other, with rounded weights and activations. The
learner computes in float32 over whole rows: with the rollout's experts, and with its own, which may differ. Policies
learn by REINFORCE and get surer, answers get longer from step to step, and the samples of stale runs are up to eight
versions old. All figures are of these log-probs, experts and samples, through the code that judges a run.

Printed for each arithmetic: runs, steps, mean k3 between the engines, steps with an alarm (a jump, records, labels,
routes or lone tokens), and rows whose masks were refused; then the share of runs with an alarm, with its upper 95%
bound. Exit status 1 with any.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm import diagnostics
from moe_trm.corrections import Evidence
from moe_trm.methods import summable
from moe_trm.observe.judge import Judge
from moe_trm.ratios import LogRatios, k3
from moe_trm.rollout.sample_metrics import copy_metrics
from moe_trm.sampling_mask.bounds import SamplerBounds
from moe_trm.sampling_mask.logprobs import TIED
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.types import RolloutRecord

VOCAB, WIDTH, LAYERS, EXPERTS, TOP_K = 48, 32, 2, 8, 2
PROMPT, PROMPTS, GROUP, TOP_P = 4, 2, 4, 0.95
FIRST_LENGTH, LAST_LENGTH = 8, 20
ALARMS = ("jump", "records", "labels", "routes", "outlier")
Weights = dict[str, Tensor]


def _float(values: Tensor) -> Tensor:
    return values


def _integers(bits: int) -> Callable[[Tensor], Tensor]:
    def rounded(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(-2, keepdim=True) / (2 ** (bits - 1) - 1)
        on_grid: Tensor = torch.round(weight / scale) * scale
        return on_grid

    return rounded


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(-2, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def _bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def _float16(values: Tensor) -> Tensor:
    return values.half().float()


@dataclass(frozen=True)
class Arithmetic:
    """Of the rollout: rounding of weights and activations, age of the oldest samples, whether experts are replayed."""

    weights: Callable[[Tensor], Tensor]
    activations: Callable[[Tensor], Tensor]
    age: int = 0
    replays: bool = True


ARITHMETICS: Mapping[str, Arithmetic] = {
    "float32": Arithmetic(_float, _float),
    "float32, stale": Arithmetic(_float, _float, age=8),
    "float16": Arithmetic(_float16, _float16),
    "bfloat16": Arithmetic(_bfloat16, _bfloat16),
    "bfloat16, stale": Arithmetic(_bfloat16, _bfloat16, age=8),
    "bfloat16, own experts": Arithmetic(_bfloat16, _bfloat16, replays=False),
    "fp8_e4m3 weights": Arithmetic(_fp8, _bfloat16),
    "int8 weights": Arithmetic(_integers(8), _bfloat16),
    "int4 weights, stale": Arithmetic(_integers(4), _bfloat16, age=2),
}


def made_weights(seed: int) -> Weights:
    """A random policy; matrices are `[inputs, outputs]`."""
    made = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, scale: float = 1.0) -> Tensor:
        drawn: Tensor = scale * torch.randn(*shape, generator=made) / shape[-2] ** 0.5
        return drawn.requires_grad_()

    weights = {"embed": matrix(VOCAB, WIDTH, scale=VOCAB**0.5), "head": matrix(WIDTH, VOCAB, scale=1.5)}
    for layer in range(LAYERS):
        weights |= {f"{layer}.{name}": matrix(WIDTH, WIDTH) for name in "qkvo"}
        weights[f"{layer}.router"] = matrix(WIDTH, EXPERTS)
        weights |= {f"{layer}.{name}": matrix(EXPERTS, WIDTH, WIDTH) for name in ("up", "down")}
    return weights


def rounded(weights: Weights, arithmetic: Arithmetic) -> Weights:
    """As the rollout gets them: embedding, head and routers keep their width, as in published quantised checkpoints."""
    exact = {"embed", "head", *(f"{layer}.router" for layer in range(LAYERS))}
    return {
        name: (arithmetic.activations if name in exact else arithmetic.weights)(weight.detach())
        for name, weight in weights.items()
    }


def forward(
    weights: Weights,
    tokens_BT: Tensor,
    cast: Callable[[Tensor], Tensor],
    experts: Sequence[Tensor] | None = None,
    cache: list[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Log-probs `[B, T, V]` of the next tokens, and each layer's experts `[B, T, K]`; `experts` are used instead.

    `cache` has keys and values of all tokens before `tokens_BT`, and gets those of these.
    """
    x, chosen = weights["embed"][tokens_BT], list[Tensor]()
    for layer in range(LAYERS):
        h = cast(norm(x))
        q, k, v = (h @ weights[f"{layer}.{name}"] for name in "qkv")
        if cache is not None:
            if len(cache) <= layer:
                cache.append(torch.stack([k, v]))
            else:
                cache[layer] = torch.cat([cache[layer], torch.stack([k, v])], 2)
            k, v = cache[layer]
        scores = cast(q @ k.mT / WIDTH**0.5)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        x = cast(x + cast(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v) @ weights[f"{layer}.o"])
        h = cast(norm(x))
        logits = h @ weights[f"{layer}.router"]
        chosen.append(logits.topk(TOP_K).indices if experts is None else experts[layer])
        gates = logits.gather(-1, chosen[-1]).softmax(-1)
        dense = torch.zeros_like(logits).scatter(-1, chosen[-1], gates)
        up = cast(torch.einsum("btd,edf->btef", h, weights[f"{layer}.up"]).relu())
        x = cast(x + torch.einsum("btef,efd,bte->btd", up, weights[f"{layer}.down"], dense))
    return (cast(norm(x)) @ weights["head"]).log_softmax(-1), chosen


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@dataclass(frozen=True)
class Samples:
    """Answers to B prompts: ids `[B, T]`; of S sampled tokens kept ids `[B, S, V]`, log-probs `[B, S]` and experts."""

    tokens: Tensor
    kept: Tensor
    logprobs: Tensor
    experts: list[Tensor]


@torch.no_grad()
def sampled(
    weights: Weights, prompts_BP: Tensor, length: int, arithmetic: Arithmetic, made: torch.Generator
) -> Samples:
    """Decode `length` tokens with top-p."""
    tokens, cache, kept, logprobs = prompts_BP, list[Tensor](), list[Tensor](), list[Tensor]()
    experts: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    fresh = prompts_BP
    for _ in range(length):
        full, chosen = forward(weights, fresh, arithmetic.activations, cache=cache)
        for of_layer, these in zip(experts, chosen, strict=True):
            of_layer.append(these)
        likely = full[:, -1].exp().sort(-1, descending=True)
        fits = likely.values.cumsum(-1) - likely.values <= TOP_P
        kept.append(torch.zeros_like(fits).scatter(-1, likely.indices, fits))
        over = full[:, -1].masked_fill(~kept[-1], -torch.inf).log_softmax(-1)
        fresh = torch.multinomial(over.exp(), 1, generator=made)
        logprobs.append(over.gather(-1, fresh))
        tokens = torch.cat([tokens, fresh], 1)
    return Samples(tokens, torch.stack(kept, 1), torch.cat(logprobs, 1), [torch.cat(parts, 1) for parts in experts])


class Run:
    """One policy, its learner and its judges.

    Attributes:
        arithmetic: of the rollout.
        versions: weights of the last steps, the newest last.
        k3, cases, sentences: of each step, the mismatch of the engines, and case and words of the verdict.
        refused: rows whose masks were refused.
    """

    def __init__(self, arithmetic: Arithmetic, seed: int, steps: int) -> None:
        self.arithmetic, self._steps = arithmetic, steps
        self._weights = made_weights(seed)
        self._made, self._draw = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        self._optimizer = torch.optim.Adam([*self._weights.values()], lr=3e-3)
        self.versions = [self._copy()]
        self._judge, self._bounds = Judge(), SamplerBounds(TOP_P, VOCAB)
        self._refused_now = 0
        self.k3, self.cases, self.sentences, self.refused = list[float](), list[str](), list[str](), 0

    def _copy(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self._weights.items()}

    def sample(self, behavior: Weights, prompts_BP: Tensor, length: int) -> Samples:
        """The rollout's answers with the weights `behavior`, which are their label."""
        return sampled(rounded(behavior, self.arithmetic), prompts_BP, length, self.arithmetic, self._made)

    def step(self, step: int) -> None:
        """Sample, judge and learn once."""
        arithmetic = self.arithmetic
        age = min(int(self._draw.integers(0, arithmetic.age + 1)), len(self.versions) - 1)
        behavior = self.versions[-1 - age]
        length = FIRST_LENGTH + (LAST_LENGTH - FIRST_LENGTH) * step // self._steps
        prompts = torch.from_numpy(self._draw.integers(0, VOCAB, (PROMPTS, PROMPT))).repeat_interleave(GROUP, 0)
        samples = self.sample(behavior, prompts, length)
        inputs, targets = samples.tokens[:, :-1], samples.tokens[:, PROMPT:, None]
        replayed = samples.experts if arithmetic.replays else None

        def answered(weights: Weights, experts: Sequence[Tensor] | None) -> tuple[Tensor, Tensor, list[Tensor]]:
            full, chosen = forward(weights, inputs, _float, experts)
            full = full[:, PROMPT - 1 :]
            over = full.masked_fill(~samples.kept, -torch.inf).logsumexp(-1)
            return full, full.gather(-1, targets)[..., 0] - over, chosen

        with torch.no_grad():
            full, old, _ = answered(behavior, replayed)
            _, unreplayed, native = answered(behavior, None)
        _, current, _ = answered(self._weights, replayed)
        mask = torch.ones_like(old, dtype=torch.bool)
        ratios = LogRatios(samples.logprobs, old, current, mask, None if age == 0 else current.detach())
        versions = torch.full_like(mask, step - 1 - age, dtype=torch.int32)
        evidence = Evidence(ratios, torch.zeros_like(old), versions=versions)
        flips = [(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in zip(native, samples.experts, strict=True)]
        self._judge_masks(full, samples, old)
        rewards = (samples.tokens[:, PROMPT:] % 3 == 0).float().mean(1)
        grad_norm = self._learn(current, rewards)
        metrics = {
            **summable.finalize(
                {
                    **diagnostics.metrics(evidence),
                    **diagnostics.by_place(evidence),
                    **diagnostics.by_age(evidence, step - 1),
                }
            ),
            **copy_metrics(records(samples)),
            "routing/native_flip_rate": float(torch.stack(flips).float().mean()),
            "probe/native_k3_kl": float(k3(unreplayed - samples.logprobs).mean()),
            "probe/replayed_k3_kl": float(k3(old - samples.logprobs).mean()),
            "rollout/age_max": float(age),
            "weights/version": float(step),
            "optimizer/grad_norm": grad_norm,
            "sampling_mask/refused_fraction": self._refused_now / len(prompts),
        }
        self.k3.append(metrics["engine/k3_kl"])
        entries = self._judge.say(metrics)
        self.cases.append(entries["verdict/case"])
        self.sentences.append(entries["verdict"])

    def _judge_masks(self, full_BSV: Tensor, samples: Samples, old_BS: Tensor) -> None:
        kept = full_BSV.masked_fill(~samples.kept, torch.inf)
        tied = samples.kept & (full_BSV <= kept.amin(-1, keepdim=True) + TIED)
        log_mass, log_least = (full_BSV.masked_fill(~these, -torch.inf).logsumexp(-1) for these in (samples.kept, tied))
        rows = zip(samples.kept.sum(-1), log_mass, log_least, old_BS, samples.logprobs, strict=True)
        self._refused_now = sum(bool(self._bounds.judge(*row).wrong.any()) for row in rows)
        self.refused += self._refused_now

    def _learn(self, current_BS: Tensor, rewards_B: Tensor) -> float:
        """One step of REINFORCE with the mean of each group as baseline; the norm of its gradient."""
        groups = rewards_B.view(PROMPTS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        self._optimizer.zero_grad()
        torch.autograd.backward(-(advantages[:, None] * current_BS).mean())
        size = torch.nn.utils.clip_grad_norm_([*self._weights.values()], 1.0)
        self._optimizer.step()
        self.versions = [*self.versions[-8:], self._copy()]
        return float(size)


def records(samples: Samples) -> list[RolloutRecord]:
    """The answers as records."""
    rows, length = samples.logprobs.shape
    total, none = samples.tokens.shape[1], np.zeros(0, np.float32)
    empty = SamplingMask(np.zeros(0, np.int32), np.zeros(length + 1, np.int64), none)
    return [
        RolloutRecord(
            sample_id=row,
            group_id=row // GROUP,
            prompt_id="",
            tokens=samples.tokens[row].numpy().astype(np.int32),
            sampled=np.arange(total) >= PROMPT,
            turn_ids=np.zeros(total, np.int16),
            rollout_logprobs=samples.logprobs[row].numpy(),
            full_logprobs=none,
            versions=np.zeros(length, np.int32),
            routes=None,
            sampling_mask=empty,
            finish_reason="length",
        )
        for row in range(rows)
    ]


def upper_bound(alarms: int, runs: int) -> float:
    """Upper 95% bound of a share, one-sided, exact (Clopper-Pearson)."""
    if alarms == runs:
        return 1.0
    low, high = alarms / runs, 1.0
    for _ in range(60):
        share = (low + high) / 2
        terms = [1.0]
        for k in range(alarms):
            terms.append(terms[-1] * (runs - k) / (k + 1) * share / (1 - share))
        low, high = (share, high) if sum(terms) * (1 - share) ** runs > 0.05 else (low, share)
    return high


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=6, help="runs of each arithmetic (default: 6)")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it (default: 0)")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run (default: 100)")
    parser.add_argument("--only", default="", metavar="TEXT", help="the arithmetics with TEXT in their names")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, alarmed, began = list[Row](), 0, time.perf_counter()
    for name, arithmetic in ARITHMETICS.items():
        if args.only not in name:
            continue
        runs = [Run(arithmetic, args.first_seed + place, args.steps) for place in range(args.seeds)]
        for run in runs:
            for step in range(1, args.steps + 1):
                run.step(step)
        alarms = [[case for case in run.cases if case in ALARMS] for run in runs]
        alarmed += sum(bool(cases) or run.refused > 0 for cases, run in zip(alarms, runs, strict=True))
        rows.append(
            {
                "rollout": name,
                "runs": len(runs),
                "steps": sum(len(run.cases) for run in runs),
                "engine k3": float(np.mean([run.k3 for run in runs])),
                "steps with an alarm": sum(map(len, alarms)),
                "alarms": ", ".join(sorted({case for cases in alarms for case in cases})) or "none",
                "rows refused": sum(run.refused for run in runs),
            }
        )
        print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    total = sum(int(row["runs"]) for row in rows)
    report("Clean runs, and what was raised in them", rows, args.json)
    print(f"runs with an alarm: {alarmed} of {total}, at most {upper_bound(alarmed, total):.1%} (95%)")
    return int(alarmed > 0)


if __name__ == "__main__":
    sys.exit(main())
