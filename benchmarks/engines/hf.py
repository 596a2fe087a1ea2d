"""An unpatched Hugging Face model as scorer, and as sampler where no rollout engine takes part.

Shape letters: B sequences, R columns, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.engines.scored import Scored, Setting, Text
from moe_trm.types import Prompt
from routing import RouteRecord, token_digest
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.judge.flips import router_margin
from routing.record.record import expert_dtype
from routing.record.sources import Record, ReplayRecords, RouteSource


class HFScorer:
    """See `Scorer`."""

    def __init__(self, setting: Setting) -> None:
        self._together = setting.together
        self.model = load_model(setting)
        self._replayer = HFReplayer(self.model, max_local_flip_rate=1.0)
        self.local_flips: float | None = None

    @torch.no_grad()
    def score(self, texts: Sequence[Text], routes: Sequence[RouteRecord] | None = None) -> list[Scored]:
        """See `Scorer.score`."""
        results: list[Scored] = []
        for start in range(0, len(texts), self._together):
            part = texts[start : start + self._together]
            part_routes = None if routes is None else tuple(routes[start : start + self._together])
            results += self._score(part, Record() if part_routes is None else ReplayRecords(part_routes))
        self.local_flips = self._replayer.report().local_flip_rate if routes is not None else None
        return results

    def _score(self, texts: Sequence[Text], source: RouteSource) -> list[Scored]:
        length = max(len(text.tokens) for text in texts) - 1
        tokens_BT = torch.zeros(len(texts), length + 1, dtype=torch.int64)
        valid_BR = torch.zeros(len(texts), length, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens_BT[row, : len(text.tokens)] = torch.from_numpy(text.tokens.astype(np.int64))
            valid_BR[row, : len(text.tokens) - 1] = True
        inputs_BR, targets_BR = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
        with gate_outputs(self.model) as seen, self._replayer.use(source, inputs_BR, targets_BR, valid_BR):
            logits = self.model(input_ids=inputs_BR, use_cache=False).logits
        logprobs_BR = logits.float().log_softmax(-1).gather(-1, targets_BR[..., None])[..., 0]
        return [self._scored(row, text, logprobs_BR, seen) for row, text in enumerate(texts)]

    def _scored(
        self, row: int, text: Text, logprobs_BR: Tensor, seen: dict[int, tuple[Tensor, Tensor, Tensor]]
    ) -> Scored:
        rows, (batch, length) = len(text.tokens) - 1, logprobs_BR.shape

        def stacked(of: int) -> Tensor:
            layers = [output[of].view(batch, length, -1)[row, :rows] for output in seen.values()]
            return torch.stack(layers, 1)

        ids, experts = stacked(2), self._replayer.num_experts
        record = RouteRecord(
            ids.numpy().astype(expert_dtype(experts)), self._replayer.layer_ids, experts, token_digest(text.tokens)
        )
        margins = router_margin(stacked(0).float().softmax(-1), self._replayer.top_k)
        return Scored(logprobs_BR[row, :rows].numpy(), record, margins.numpy(), stacked(1).float().numpy())


@contextmanager
def gate_outputs(model: nn.Module) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor]]]:
    """Outputs of each gate of one forward: layer -> (logits `[N, E]`, weights `[N, K]`, ids `[N, K]`), N = B * R."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def note(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            seen[layer] = output

        return hook

    hooks = [gate_of(block).register_forward_hook(note(layer)) for layer, block in moe_blocks(model).items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def sample(setting: Setting, prompts: Sequence[Prompt], group_size: int, max_new_tokens: int) -> list[Text]:
    """Answers to each prompt at temperature 1, ended by the end token or the limit."""
    model, texts = load_model(setting), []
    torch.manual_seed(0)
    end = model.config.eos_token_id
    for number, prompt in enumerate(prompts):
        prompt_ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            answers = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new_tokens,
                num_return_sequences=group_size,
                pad_token_id=end,
            )
        for answer in answers[:, len(prompt.token_ids) :].tolist():
            stop = answer.index(end) + 1 if end in answer else len(answer)
            tokens = np.array([*prompt.token_ids, *answer[:stop]], np.int32)
            texts.append(Text(tokens, np.arange(len(tokens)) >= len(prompt.token_ids), number))
    return texts


def load_model(setting: Setting) -> Any:
    """The causal model in evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(setting.checkpoint, dtype=getattr(torch, setting.dtype)).eval()
