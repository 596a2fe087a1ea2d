"""Log-probs of given tokens from final hidden states, the same in every learner.

Shape letters: B rows, R padded row length, C columns that the model is fed, N scored positions, H hidden size, V
vocabulary, P channels of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trm.learner.protocol import Scores
from moe_trm.sampling_mask.dense import full_scores
from moe_trm.sampling_mask.logprobs import log_kept_masses, masked_logprobs, masked_logprobs_and_kl
from moe_trm.sampling_mask.vocabulary import WHOLE, Vocabulary
from moe_trm.types import TokenBatch
from routing.layout.packed import AnyLayout


@dataclass(frozen=True)
class Scoring:
    """Positions and values to score in one forward pass.

    Attributes:
        target_ids: `[B, R]` int64.
        mask: `[B, R]` bool, the N positions that are scored.
        kept_ids, kept_offsets: kept support of the N positions as CSR, or None to score over the whole vocabulary.
        kept_logprobs: the rollout's log-probs of the kept ids, to score the exact KL as well, or None.
        temperature: divides the logits.
        kept_mass: also return the log of the model's probability of the kept support, and of its least likely ids.
        entropy: also return the entropy over the vocabulary.
    """

    target_ids: Tensor
    mask: Tensor
    kept_ids: Tensor | None
    kept_offsets: Tensor | None
    kept_logprobs: Tensor | None
    temperature: float
    kept_mass: bool = False
    entropy: bool = False

    @classmethod
    def of(cls, batch: TokenBatch, temperature: float, *, kept_mass: bool = False, entropy: bool = False) -> Scoring:
        """The scoring that `batch` asks for."""
        return cls(
            batch.target_ids,
            batch.mask,
            batch.kept_ids,
            batch.kept_offsets,
            batch.kept_logprobs,
            temperature,
            kept_mass and batch.kept_ids is not None,
            entropy,
        )

    @property
    def channels(self) -> tuple[str, ...]:
        """Fields of `learner.protocol.Scores` that the P channels of the output are, in order."""
        present = {
            "logprobs": True,
            "log_kept_mass": self.kept_mass,
            "log_kept_least": self.kept_mass,
            "exact_kl": self.kept_logprobs is not None,
            "entropy": self.entropy,
        }
        return tuple(name for name, here in present.items() if here)

    def scores(self, channels_PBR: Tensor) -> Scores:
        """The channels under their names."""
        channels = dict(zip(self.channels, channels_PBR.unbind(), strict=True))
        return Scores(
            channels["logprobs"],
            log_kept_mass=channels.get("log_kept_mass"),
            log_kept_least=channels.get("log_kept_least"),
            exact_kl=channels.get("exact_kl"),
            entropy=channels.get("entropy"),
        )


def score_hidden(
    hidden_BRH: Tensor, weight_VH: Tensor, scoring: Scoring, vocabulary: Vocabulary = WHOLE, *, whole: bool = False
) -> Tensor:
    """Final hidden states -> `[P, B, R]` float32 scores, 0 where the mask is False.

    The channels are `Scoring.channels`; log-probs and entropy carry a gradient. Logits of unscored positions are never
    computed. Those of scored positions are computed over the kept support only, or in chunks of tokens over the
    vocabulary. `vocabulary`: the ids of the weight's rows, where ranks share them. `whole`: log-probs over the
    vocabulary are one log-softmax of all logits, as engines have it, which rounds in another way than chunks.
    """
    hidden_NH, target_N = hidden_BRH[scoring.mask], scoring.target_ids[scoring.mask]
    kept_ids, kept_offsets, temperature = scoring.kept_ids, scoring.kept_offsets, scoring.temperature
    channels: dict[str, Tensor] = {}
    if kept_ids is None or scoring.entropy:
        full = full_scores(hidden_NH, weight_VH, target_N, temperature, vocabulary=vocabulary, entropy=scoring.entropy)
        channels = {"logprobs": full.logprobs} | ({} if full.entropy is None else {"entropy": full.entropy})
    if kept_ids is None and whole:
        logits_NV = F.linear(hidden_NH, weight_VH).float() / temperature
        channels["logprobs"] = logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    if kept_ids is not None and kept_offsets is not None:
        support = (hidden_NH, weight_VH, target_N, kept_ids, kept_offsets)
        if scoring.kept_logprobs is None:
            channels["logprobs"] = masked_logprobs(*support, temperature, vocabulary=vocabulary)
        else:
            channels["logprobs"], channels["exact_kl"] = masked_logprobs_and_kl(
                *support, scoring.kept_logprobs, temperature, vocabulary=vocabulary
            )
        if scoring.kept_mass:
            channels["log_kept_mass"], channels["log_kept_least"] = log_kept_masses(
                hidden_NH, weight_VH, kept_ids, kept_offsets, temperature, vocabulary=vocabulary
            )
    return _spread([channels[name] for name in scoring.channels], scoring.mask)


def cut_scoring(scoring: Scoring, layout: AnyLayout) -> Scoring:
    """Scoring of the columns `[B, C]` that the model is fed (`[1, C]` of a pack): their positions and kept ids."""
    if not layout.cuts:
        return scoring
    mask = layout.cut_tokens(scoring.mask)
    local = replace(scoring, target_ids=layout.cut_tokens(scoring.target_ids), mask=mask)
    if scoring.kept_ids is None or scoring.kept_offsets is None or layout.cp_size == 1:
        # A whole pack has its tokens in the order of the rows, and so their kept ids.
        return local
    number = torch.zeros(scoring.mask.shape, dtype=torch.int64, device=mask.device)
    number[scoring.mask] = torch.arange(len(scoring.kept_offsets) - 1, device=mask.device)
    tokens = layout.cut_tokens(number)[mask]
    sizes, starts = scoring.kept_offsets.diff()[tokens], scoring.kept_offsets[tokens]
    offsets = F.pad(sizes.cumsum(0), (1, 0))
    kept = torch.arange(int(offsets[-1]), device=mask.device) + torch.repeat_interleave(starts - offsets[:-1], sizes)
    logprobs = scoring.kept_logprobs
    return replace(
        local,
        kept_ids=scoring.kept_ids[kept],
        kept_offsets=offsets,
        kept_logprobs=None if logprobs is None else logprobs[kept],
    )


def whole_channels(channels_PBC: Tensor, layout: AnyLayout) -> Tensor:
    """Inverse of `cut_scoring` for scores: `[P, B, C]` (`[P, 1, C]` of a pack) to `[P, B, R]`, 0 elsewhere."""
    return layout.uncut_tokens(channels_PBC.movedim(0, -1)).movedim(-1, 0) if layout.cuts else channels_PBC


FED = ("input_ids", "target_ids", "valid", "kept_ids", "kept_offsets", "kept_logprobs")
"""Fields that only forward passes read: the host checks routes by their tokens, and each pass moves its own copy."""


def on_device(batch: TokenBatch, device: torch.device, *, stay: Sequence[str] = ()) -> TokenBatch:
    """`batch` with its tensors on `device`, but for those of the fields `stay`."""
    moved: dict[str, Any] = {
        field.name: value.to(device)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and field.name not in stay
    }
    return replace(batch, **moved)


def _spread(channels_N: Sequence[Tensor], mask: Tensor) -> Tensor:
    zeros = torch.zeros(mask.shape, dtype=channels_N[0].dtype, device=mask.device)
    return torch.stack([zeros.masked_scatter(mask, values_N) for values_N in channels_N])
