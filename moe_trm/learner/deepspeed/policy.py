"""The policy: an unmodified causal language model of transformers that returns log-probs of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_trm.errors import CheckpointError
from moe_trm.learner.deepspeed.hf_model import empty_model, load_model, load_with_vision
from moe_trm.learner.deepspeed.packed import keep_states_apart, register
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.scoring import Scoring, score_hidden
from moe_trm.models.hf_config import expert_width, num_experts, read_hf_config
from moe_trm.models.registry import indexer_layers
from routing.indexer import attention as sparse_attention
from routing.layout.packed import AnyLayout, PackedLayout


class ScoringHead(nn.Module):
    """Final hidden states to scores.

    A separate module, so that ZeRO-3 gathers the output weight for it, forward and backward.
    """

    def __init__(self, weight_VH: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VH

    def forward(self, hidden_BRH: Tensor, scoring: Scoring) -> Tensor:
        """`[P, B, R]` float32; see `learner.scoring.score_hidden`."""
        return score_hidden(hidden_BRH, self.weight, scoring)


class HfPolicy(nn.Module):
    """`causal` and, sharing its output weight, the head that scores."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal
        self.head = ScoringHead(causal.get_output_embeddings().weight)

    def forward(
        self, input_ids: Tensor, scoring: Scoring, layout: AnyLayout, pictures: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """`[B, R]` right-padded tokens -> `[P, B, R]` scores. Causal attention alone keeps the padding out.

        A pack of `[1, T]` tokens gives `[P, 1, T]`; its sequences are kept apart by `packed.attention`. `pictures`:
        the keywords of the model for them (`pictures.PictureInputs`).
        """
        pack: dict[str, Any] = {**(pictures or {})}
        if isinstance(layout, PackedLayout):
            pack = {
                "position_ids": layout.position_ids().to(input_ids.device),
                "sequence_lengths": layout.sequences,
            }
        hidden_BRH = self.causal.base_model(input_ids=input_ids, use_cache=False, **pack).last_hidden_state
        return self.head(hidden_BRH, scoring)  # type: ignore[no-any-return]


def load_policy(
    checkpoint: HfCheckpoint,
    dtype: str,
    *,
    recompute: bool,
    packed: bool = False,
    empty: bool = False,
    vision: bool = False,
) -> HfPolicy:
    """The model of `checkpoint` on the CPU, every tensor of it used; with `packed` it is forwarded on packs only.

    With `empty` its parameters have no values yet: `partitioned.partition` reads them. With `vision` it is the whole
    model of a release that reads images, else its text.

    Raises:
        CheckpointError: tensors that are lacking, left over or of another shape, an output layer with a bias.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    hf = read_hf_config(checkpoint.folder)
    options = {"dtype": getattr(torch, dtype), **_attention(hf, packed=packed)}
    options |= _experts(hf, options["dtype"])
    load = load_with_vision if vision else load_model
    causal = empty_model(checkpoint, **options) if empty else _whole_model(load, checkpoint, options)
    if getattr(causal.get_output_embeddings(), "bias", None) is not None:
        raise CheckpointError(
            "output layer with a bias",
            where=str(checkpoint.folder),
            got=type(causal).__name__,
            expected="logits that are hidden states times output weight",
            fix="Use another model: log-probs would be wrong.",
        )
    if packed:
        keep_states_apart(causal)
    if recompute:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    return HfPolicy(causal)


def _whole_model(
    load: Callable[..., tuple[Any, dict[str, Any]]], checkpoint: HfCheckpoint, options: Mapping[str, Any]
) -> Any:
    """transformers' model with every tensor of the checkpoint; see `load_policy`."""
    causal, loaded = load(checkpoint, **options)
    for problem in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if loaded[problem]:
            raise CheckpointError(
                f"the checkpoint does not fit its config.json: {problem.replace('_keys', ' tensors')}",
                where=str(checkpoint.folder),
                got=", ".join(sorted(map(str, loaded[problem]))[:5]),
                expected="exactly the tensors of the model that config.json describes",
                fix="Copy or download the checkpoint again, completely.",
            )
    return causal


def _attention(hf_config: Mapping[str, Any], *, packed: bool) -> dict[str, str]:
    """The implementation of attention: over chosen tokens, or of packs; transformers' own otherwise."""
    if indexer_layers(hf_config):
        return {"attn_implementation": sparse_attention.register()}
    return {"attn_implementation": register()} if packed else {}


def _experts(hf_config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """The slower product, expert by expert, where torch's grouped one refuses the widths.

    It takes rows of whole 16 bytes.
    """
    if not num_experts(hf_config):
        return {}
    widths = (int(hf_config["hidden_size"]), expert_width(hf_config))
    return {"experts_implementation": "eager"} if any(width * dtype.itemsize % 16 for width in widths) else {}
