"""The policy: Megatron's GPT model, ending in log-probs of given tokens instead of logits."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from moe_trm.learner.megatron.convert import Names
from moe_trm.learner.megatron.cpu_attention import PlainPack
from moe_trm.learner.scoring import Scoring, score_hidden
from moe_trm.sampling_mask.vocabulary import WHOLE, Vocabulary


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPT model whose last stage returns scores instead of logits.

    The scores are those of `learner.scoring.score_hidden`, `[P, B, R]` float32, when the model's `labels` are a
    `Scoring`. `vocab_size` may be padded; the vocabulary has `real_vocab_size` ids.
    """

    def __init__(self, *, real_vocab_size: int, names: Names, **options: Any) -> None:
        super().__init__(**options)
        self.names = names
        self._vocabulary = _own_vocabulary(real_vocab_size, options["vocab_size"])

    # Megatron cuts the angles of a pack out sequence by sequence, in every layer, for queries and keys.
    def _preprocess(self, *, position_ids: Tensor, packed_seq_params: Any = None, **options: Any) -> tuple[Any, ...]:
        preprocessed: tuple[Any, ...] = super()._preprocess(
            position_ids=position_ids, packed_seq_params=packed_seq_params, **options
        )
        hidden, angles_S11D, *rest = preprocessed
        if not isinstance(packed_seq_params, PlainPack) or angles_S11D is None:
            return preprocessed
        return hidden, angles_S11D[position_ids[0]].squeeze(1), *rest

    # Megatron hands `labels` through to `_postprocess` unread, so it carries the scoring through every model wrapper.
    def _postprocess(self, hidden_states: Tensor, *_args: Any, labels: Scoring, **_kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        weight_VH = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        if self.config.sequence_parallel:
            # Every rank gets the whole gradient of the hidden states and keeps its slice.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        full_vocabulary = self.config.batch_invariant_mode
        return score_hidden(hidden_states.transpose(0, 1), weight_VH, labels, self._vocabulary, whole=full_vocabulary)


def _own_vocabulary(real_size: int, padded_size: int) -> Vocabulary:
    """The ids whose rows of the output weight this rank holds."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return WHOLE
    rows = padded_size // group.size()
    first = rows * group.rank()
    return Vocabulary(first, max(0, min(rows, real_size - first)), group)
