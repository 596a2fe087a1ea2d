"""The policy: Megatron's GPT model, ending in log-probs of given tokens instead of logits."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from moe_trm.learner.scoring import Scoring, score_hidden


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPT model whose last stage returns the `[P, B, R]` float32 scores of `learner.scoring.score_hidden` when its `labels` are a `Scoring`."""

    # Megatron hands `labels` through to `_postprocess` unread, so it carries the scoring through every model wrapper.
    def _postprocess(self, hidden_states: Tensor, *_args: Any, labels: Scoring, **_kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        weight_VH = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return score_hidden(hidden_states.transpose(0, 1), weight_VH, labels)
