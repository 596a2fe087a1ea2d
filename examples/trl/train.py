"""GRPO of TRL on a tiny mixture of experts, on a CPU: our rules, replayed routes, and their metrics in TRL's own logs.

`python train.py FOLDER` with trl 1.16 installed; FOLDER gets TRL's output. The engine that samples is a copy of the
model with rounded weights, so its log-probs and routes differ a little, as a server's do.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pyarrow
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from moe_trm.adapters.trl import Corrected
from routing import RouteRecord, Rows, token_digest
from routing.hf import HFReplayer
from routing.replay import Record

WORDS, EXPERTS, LENGTH, TEMPERATURE = 32, 8, 10, 1.0
CONFIG = Qwen3MoeConfig(
    vocab_size=WORDS, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=2,
    pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.3,
)  # fmt: skip
SHOWN = (
    "loss", "reward", "merged/k3_kl", "correction/kept_fraction", "acceptance/length_1_16", "routing/applied_fraction",
    "routing/local_flip_rate",
)  # fmt: skip
PROMPTS = ["w4 w5 w6", "w7 w8", "w9 w10 w11 w12", "w13"]
ROUTES: dict[bytes, RouteRecord] = {}
OURS: dict[str, Any] = {
    "rules": [("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"}), ("trm_max", {"max_kl": 0.5})],
    "routes": ROUTES,
}


class Trainer(Corrected, GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with our rules and routes."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each id."""
    inner = Tokenizer(models.WordLevel({f"w{place}": place for place in range(WORDS)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1", bos_token="w2")


class Engine:
    """A copy of the model that samples, and records routes and log-probs."""

    def __init__(self) -> None:
        self.model = Qwen3MoeForCausalLM(CONFIG).eval()
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """As TRL calls its `rollout_func`: tokens of prompts and completions, and log-probs."""
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        self.model.load_state_dict({name: value.bfloat16().float() for name, value in weights.items()})
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        sampled = [self.sample(ids) for ids in prompt_ids]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [tokens[len(ids) :] for (tokens, _), ids in zip(sampled, prompt_ids, strict=True)],
            "logprobs": [logprobs[len(ids) - 1 :] for (_, logprobs), ids in zip(sampled, prompt_ids, strict=True)],
        }

    def sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Tokens of the whole sequence and the log-prob of each but the first; its routes go to `ROUTES`."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + LENGTH and tokens[-1] != CONFIG.eos_token_id:
            scores = self.model(torch.tensor([tokens])).logits[0, -1] / TEMPERATURE
            tokens.append(int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator)))
        ids, rows = torch.tensor([tokens]), Rows.packed(torch.tensor([0, len(tokens)]))
        replayer = HFReplayer(self.model)
        with replayer.use_rows(Record(), rows, ids) as recording:
            logprobs = (self.model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        replayer.detach()
        experts = torch.stack([recording.recorded().experts[layer] for layer in replayer.layer_ids], dim=1)
        record = RouteRecord(
            experts[:-1].numpy().astype(np.uint8), replayer.layer_ids, EXPERTS, token_digest(np.asarray(tokens))
        )
        assert record.token_digest is not None
        ROUTES[record.token_digest] = record
        return tokens, logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()


def reward(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """The share of even ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def build(folder: str, kind: Any = Trainer, ours: dict[str, Any] | None = None, **options: Any) -> Any:
    """The trainer with its engine; `ours` are the arguments that TRL's own does not have."""
    torch.manual_seed(0)
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4, max_steps=4,
        max_completion_length=LENGTH, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
        temperature=TEMPERATURE, beta=0.0, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    ROUTES.clear()
    return kind(
        **(OURS if ours is None else ours),
        model=Qwen3MoeForCausalLM(CONFIG),
        processing_class=tokenizer(),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset(pyarrow.table({"prompt": PROMPTS * 4}), fingerprint="prompts"),
        rollout_func=Engine(),
    )


if __name__ == "__main__":
    trainer = build(sys.argv[1])
    trainer.train()
    for line in trainer.state.log_history[:-1]:
        print(json.dumps({name: line[name] for name in SHOWN if name in line}))
