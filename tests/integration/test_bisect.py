"""The bisector on a real SGLang server, with Megatron-Core, and with Hugging Face whose weights were changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from launch.start.bisect import BOUNDS, differences, learner_states, served_states, verdict
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Scores
from moe_trm.rollout.servers.backend import Served
from moe_trm.step.fixed_texts import fixed_ids
from moe_trm.types import TokenBatch
from tests.integration.jobs import write_config
from tests.integration.served import VOCAB
from tests.unit.doubles import StandInLearner

LAYERS = 4


class HuggingFace(StandInLearner):
    """Hugging Face's own model as the learner."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.model.named_modules()

    def score(self, batches: Sequence[TokenBatch], sources: Any, **options: Any) -> list[Scores]:
        self.model(batches[0].input_ids)
        return []


@pytest.mark.slow
def test_a_change_in_one_layer_is_found_there(tiny_moe: Path, rollout_config: Config, tmp_path: Path) -> None:
    ids = fixed_ids(VOCAB)[:1]
    served = served_states(Served.of(rollout_config), tmp_path, ids[0].tolist(), LAYERS)

    def said(change: Callable[[Any], Any]) -> str:
        learner = HuggingFace(tiny_moe)
        with torch.no_grad():
            change(learner.model.model.layers)
            return verdict(differences(served, learner_states(learner, ids, LAYERS)), BOUNDS["float32"]).says

    assert said(lambda layers: None).startswith("all hidden states agree")
    assert said(lambda layers: layers[2].self_attn.o_proj.weight.mul_(1.01)).startswith("layer 2: attention differs")
    assert said(lambda layers: layers[1].mlp.gate.weight.mul_(1.05)).startswith("layer 1: MLP differs first")
    assert said(lambda layers: layers[3].input_layernorm.weight.mul_(1.01)).startswith("layer 3: input norm differs")


@pytest.mark.slow
def test_the_command_says_that_clean_engines_agree(brief_checkpoint: Path, tmp_path: Path) -> None:
    words = ["rollout.server.port=0", "rollout.server.dtype=float32", "rollout.server.startup_timeout_s=1200"]
    config = str(write_config(tmp_path, brief_checkpoint))
    done = subprocess.run(
        [sys.executable, "-m", "moe_trm", "doctor", config, *words, "--bisect"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "bisect: all hidden states agree" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
