"""Dumps of a tiny model that samples with rounding, and faults planted into their rows.

Shape letters: B rows, T tokens of a row, P of its prompt, S sampled ones, L layers, K experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.tiny.families import make_family
from moe_trm.tools.audit.dump import Array, AuditDump, AuditRow
from moe_trm.tools.audit.plain import mask_of
from moe_trm.tools.audit.reference import ReferenceModel
from routing.hf import HFReplayer
from routing.record.sources import Record

PROMPTS, GROUP, P, S = 6, 3, 8, 40
T = P + S


@dataclass(frozen=True)
class Scored:
    """`[B, T-1, V]` log-probs and `[B, T-1, L, K]` experts of an engine."""

    logprobs: Tensor
    experts: Array


class Engine:
    """A checkpoint with its own routes. bfloat16 rounds, and a little `noise` on float32 weights stands for it."""

    def __init__(self, folder: Path, *, noise: float = 0.0, router_noise: float = 0.0, dtype: str = "bfloat16") -> None:
        self._causal = load_policy(HfCheckpoint(folder), dtype, recompute=False).causal.eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, weight in self._causal.named_parameters():
                size = router_noise if name.endswith(("gate.weight", "router.weight")) else noise
                if size:
                    weight.add_(size * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype))

    @torch.no_grad()
    def logprobs(self, ids: Tensor, temperature: float = 1.0) -> Tensor:
        return (self._causal(ids).logits.float() / temperature).log_softmax(-1)

    def decoder(self, temperature: float) -> Callable[[Tensor], Tensor]:
        """`[B, V]` log-probs of the next token; each call has longer ids, and computes what is new of them."""
        cache, seen = None, 0

        @torch.no_grad()
        def step(ids: Tensor) -> Tensor:
            nonlocal cache, seen
            output = self._causal(ids[:, seen:], past_key_values=cache, use_cache=True)
            cache, seen = output.past_key_values, ids.shape[1]
            return (output.logits[:, -1].float() / temperature).log_softmax(-1)

        return step

    @torch.no_grad()
    def score(self, ids: Tensor, temperature: float = 1.0) -> Scored:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        replayer = HFReplayer(self._causal, max_local_flip_rate=1.0)
        with replayer.use(Record(), inputs, targets, torch.ones_like(inputs, dtype=torch.bool)) as opened:
            logprobs = self.logprobs(inputs, temperature)
        replayer.detach()
        recorded, layers = opened.recorded(), replayer.layer_ids
        experts = torch.stack([recorded.by_row(layer, *inputs.shape) for layer in layers], dim=2)
        return Scored(logprobs, experts.numpy())


def sample(engine: Engine, *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 1) -> Tensor:
    """`[B, T]` ids."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(4, 120, (PROMPTS, P), generator=generator).repeat_interleave(GROUP, dim=0)
    ids, decoder = prompts, engine.decoder(temperature)
    for _ in range(S):
        probs = decoder(ids).exp()
        ids = torch.cat([ids, torch.multinomial(probs * kept(probs, top_p), 1, generator=generator)], dim=1)
    return ids


def kept(probs: Tensor, top_p: float) -> Tensor:
    """`[..., V]` bool: the nucleus."""
    ordered, order = probs.sort(dim=-1, descending=True)
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered < top_p)


def rows_of(
    ids: Tensor, scored: Scored, *, top_p: float = 1.0, temperature: float = 1.0, **fields: Any
) -> list[AuditRow]:
    """The rows that an engine would have recorded; with `top_p` below 1, masks and log-probs over them."""
    rows = []
    for number, tokens in enumerate(ids):
        logprobs_SV = scored.logprobs[number, P - 1 :]
        rollout = logprobs_SV.gather(1, tokens[P:, None])[:, 0].double()
        mask = None
        if top_p < 1:
            inside = kept(logprobs_SV.exp(), top_p)
            rollout = rollout - (logprobs_SV.double().exp() * inside).sum(-1).log()
            mask = mask_of([np.flatnonzero(keep).astype(np.int32) for keep in inside.numpy()])
        rows.append(
            AuditRow(
                f"row {number}",
                tokens.numpy(),
                np.arange(T) >= P,
                rollout=rollout.numpy(),
                routes=scored.experts[number],
                mask=mask,
                versions=np.array(["7"] * S),
                temperature=temperature,
                **fields,
            )
        )
    return rows


def trained(rows: Sequence[AuditRow], scored: Scored) -> list[AuditRow]:
    """The rows with the log-probs of `scored` as the trainer's, over the whole vocabulary."""
    values = [
        scored.logprobs[n, P - 1 :].gather(1, torch.from_numpy(row.tokens[P:, None]))[:, 0].double().numpy()
        for n, row in enumerate(rows)
    ]
    return [replace(row, trainer=value) for row, value in zip(rows, values, strict=True)]


@dataclass(frozen=True)
class Bench:
    """A family's checkpoint, its reference, its engine, and clean rows with and without masks."""

    folder: Path
    reference: ReferenceModel
    engine: Engine
    ids: Tensor
    scored: Scored

    @classmethod
    def of(cls, family: str, folder: Path, *, dtype: str = "bfloat16", noise: float = 0.0) -> Bench:
        make_family(family, folder)
        engine = Engine(folder, dtype=dtype, noise=noise)
        ids = sample(engine)
        return cls(folder, ReferenceModel(folder, "cpu"), engine, ids, engine.score(ids))

    @property
    def rows(self) -> list[AuditRow]:
        return rows_of(self.ids, self.scored)


def dump_of(rows: Sequence[AuditRow]) -> AuditDump:
    return AuditDump("plain", tuple(rows))
