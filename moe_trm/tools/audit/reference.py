"""Scores of a dump's rows under the plain Hugging Face model in float32: with its own routes, and with recorded ones.

Shape letters: T tokens of a row, S sampled tokens, L MoE layers, K experts per token, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_trm.errors import CheckpointError, RecordRejected
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.tools.audit.dump import Array, AuditRow
from routing import ReplayRefusedError, RouteRecord, expert_dtype, token_digest
from routing.hf import HFReplayer
from routing.record.sources import Record, ReplayRecords, RouteSource

CHUNK = 256
"""Sampled tokens whose logits are there at once."""
SHIFTS = (-1, 0, 1)


@dataclass(frozen=True)
class PolicyScores:
    """Log-probs of the S sampled tokens under one choice of routes, float64 nats.

    Attributes:
        full: over the vocabulary.
        entropy: of the policy over the vocabulary.
        mass: log of the probability of the kept ids: the recorded ones, else those that the stated top-p keeps; None
            where neither is known. `full - mass` is the log-prob over them.
        kept_entropy: of the policy over the kept ids.
        gaps: `[3, S]` probability that the recorded mask lacks against the best ids of its size, with the mask of the
            token before, its own, and the next; None without masks.
    """

    full: Array
    entropy: Array
    mass: Array | None = None
    kept_entropy: Array | None = None
    gaps: Array | None = None


@dataclass(frozen=True)
class RowScores:
    """A row, the experts `[T-1, L, K]` that the model chooses and that were recorded, and its scores.

    `recorded` is None where the dump has no routes, `replayed` where they cannot be replayed or there is no temperature
    to score at.
    """

    row: AuditRow
    live: Array
    recorded: Array | None
    native: PolicyScores | None
    replayed: PolicyScores | None


class ReferenceModel:
    """The model of a checkpoint folder.

    Raises:
        CheckpointError: a checkpoint that is damaged, or a model whose routes cannot be read and replayed.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self._causal = load_policy(HfCheckpoint(folder), "float32", recompute=False).causal.eval().to(device)
        self._device = device
        self.num_layers = int(self._causal.config.num_hidden_layers)
        self.vocab_size = int(self._causal.get_output_embeddings().weight.shape[0])
        try:
            self._replayer = HFReplayer(self._causal, max_local_flip_rate=1.0)
        except ReplayRefusedError as error:
            raise CheckpointError(
                "this model has no routes that an audit reads", where=str(folder), got=error
            ) from error
        self.layer_ids, self.num_experts = self._replayer.layer_ids, self._replayer.num_experts
        self.top_k = self._replayer.top_k

    def score(self, row: AuditRow, temperature: float | None, top_p: float | None = None) -> RowScores:
        """The row under both choices of routes; without a temperature, the routes alone.

        Raises:
            RecordRejected: ids outside the vocabulary, or routes of another model.
        """
        self._check(row)
        ids = torch.from_numpy(row.tokens)[None]
        hidden_TH, live = self._forward(ids, Record())
        assert live is not None
        recorded, replayed = self._recorded(row), None
        native = None if temperature is None else self._scores(hidden_TH, row, temperature, top_p)
        if recorded is not None and temperature is not None and not illegal(recorded, self.num_experts).any():
            experts = recorded.astype(expert_dtype(self.num_experts))
            digest = token_digest(row.tokens.astype(np.int32))
            record = RouteRecord(experts, self.layer_ids, self.num_experts, digest)
            hidden_TH, _ = self._forward(ids, ReplayRecords((record,)))
            replayed = self._scores(hidden_TH, row, temperature, top_p)
        return RowScores(row, live, recorded, native, replayed)

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> Array:
        """`[T - 1]` float64 log-probs of the tokens after the first at temperature 1, with the model's own routes.

        Raises `RecordRejected` for ids outside the vocabulary.
        """
        row = AuditRow("text", np.array(token_ids, np.int64), np.arange(len(token_ids)) > 0)
        self._check(row)
        hidden_TH, _ = self._forward(torch.from_numpy(row.tokens)[None], Record())
        return self._scores(hidden_TH, row, 1.0, None).full

    def _check(self, row: AuditRow) -> None:
        largest = max([int(row.tokens.max()), *([] if row.mask is None else row.mask.ids[:].tolist())])
        if largest >= self.vocab_size or row.tokens.min() < 0:
            raise RecordRejected("vocabulary", "token ids outside the vocabulary", where=row.name, got=largest)
        if row.routes is not None and row.routes.shape[1:] not in {
            (layers, self.top_k) for layers in (self.num_layers, len(self.layer_ids))
        }:
            raise RecordRejected(
                "route_shape",
                "routes are of another model",
                where=row.name,
                got=row.routes.shape,
                expected=f"{self.num_layers} or {len(self.layer_ids)} layers, {self.top_k} experts",
            )

    def _recorded(self, row: AuditRow) -> Array | None:
        if row.routes is None:
            return None
        has_dense = row.routes.shape[1] == self.num_layers
        return (row.routes[:, list(self.layer_ids)] if has_dense else row.routes).astype(np.int64)

    @torch.no_grad()
    def _forward(self, ids: Tensor, source: RouteSource) -> tuple[Tensor, Array | None]:
        """`[T-1, H]` hidden states, and `[T-1, L, K]` experts where the source records."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        with self._replayer.use(source, inputs, targets, torch.ones_like(inputs, dtype=torch.bool)) as opened:
            output = self._causal.base_model(input_ids=inputs.to(self._device), use_cache=False)
        hidden_TH: Tensor = output.last_hidden_state[0]
        if not isinstance(source, Record):
            self._replayer.report()
            return hidden_TH, None
        experts = opened.recorded().experts
        return hidden_TH, torch.stack([experts[layer] for layer in self.layer_ids], dim=1).cpu().numpy()

    @torch.no_grad()
    def _scores(self, hidden_TH: Tensor, row: AuditRow, temperature: float, top_p: float | None) -> PolicyScores:
        weight_VH, targets = self._causal.get_output_embeddings().weight, torch.from_numpy(row.tokens[row.sampled])
        parts: list[list[Tensor]] = []
        for start in range(0, row.num_sampled, CHUNK):
            chunk = slice(start, min(start + CHUNK, row.num_sampled))
            places = torch.from_numpy(row.places[chunk]).to(hidden_TH.device)
            logprobs_SV = ((hidden_TH[places] @ weight_VH.T) / temperature).log_softmax(-1)
            of_targets = logprobs_SV.gather(1, targets[chunk, None].to(logprobs_SV.device))[:, 0]
            entropy = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
            parts.append([of_targets, entropy, *_support(logprobs_SV, row.mask, chunk, top_p)])
        full, entropy, *support = (torch.cat(column).cpu().double().numpy() for column in zip(*parts, strict=True))
        if not support:
            return PolicyScores(full, entropy)
        gaps = np.stack(support[2:]) if row.mask is not None else None
        return PolicyScores(full, entropy, support[0], support[1], gaps)


def illegal(experts_TLK: Array, num_experts: int) -> Array:
    """`[T, L]` bool: ids out of range, or an expert twice in a row, as of rows that nothing filled."""
    ascending = np.sort(experts_TLK, axis=-1)
    outside = (ascending[..., 0] < 0) | (ascending[..., -1] >= num_experts)
    result: Array = outside | (ascending[..., 1:] == ascending[..., :-1]).any(-1)
    return result


def _support(logprobs_SV: Tensor, mask: SamplingMask | None, chunk: slice, top_p: float | None) -> list[Tensor]:
    """`[S]` log-mass and entropy of the kept ids, and with masks three gaps; nothing where no support is known."""
    if mask is not None:
        offsets = torch.from_numpy(mask.offsets)
        kept = [_kept(logprobs_SV, mask, offsets, chunk, shift) for shift in SHIFTS]
        mass, entropy = _mass(logprobs_SV, kept[1])
        return [mass, entropy, *(_gap(logprobs_SV, is_kept) for is_kept in kept)]
    if top_p is None or top_p >= 1:
        return []
    probs, order = logprobs_SV.exp().sort(dim=-1, descending=True)
    inside = probs.cumsum(-1) - probs < top_p
    return list(_mass(logprobs_SV, torch.zeros_like(inside).scatter(1, order, inside)))


def _kept(logprobs_SV: Tensor, mask: SamplingMask, offsets: Tensor, chunk: slice, shift: int) -> Tensor:
    """`[S, V]` bool: the mask that lies `shift` tokens later, of the first and last token its own."""
    rows = (torch.arange(chunk.start, chunk.stop) + shift).clamp(0, len(offsets) - 2)
    kept = torch.zeros(logprobs_SV.shape, dtype=torch.bool)
    sizes = offsets[rows + 1] - offsets[rows]
    token = torch.repeat_interleave(torch.arange(len(rows)), sizes)
    within = torch.arange(int(sizes.sum())) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    ids = torch.from_numpy(mask.ids).long()[offsets[rows][token] + within]
    kept[token, ids] = True
    return kept.to(logprobs_SV.device)


def _mass(logprobs_SV: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    inside = logprobs_SV.masked_fill(~kept, -torch.inf)
    mass = inside.logsumexp(-1)
    within = (inside - mass[:, None]).masked_fill(~kept, 0.0)
    return mass, -(within.exp() * within * kept).sum(-1)


def _gap(logprobs_SV: Tensor, kept: Tensor) -> Tensor:
    """`[S]` probability of the best ids, as many as are kept, less that of the kept ones."""
    sizes = kept.sum(-1)
    best = logprobs_SV.exp().topk(max(int(sizes.max()), 1), dim=-1)[0].cumsum(-1)
    at_size = best.gather(1, (sizes - 1).clamp(min=0)[:, None])[:, 0]
    return at_size - (logprobs_SV.exp() * kept).sum(-1)
