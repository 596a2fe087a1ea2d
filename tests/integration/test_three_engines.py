"""SGLang, Megatron-Core and Hugging Face on the same tokens, all in float32: the three must say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launch.job import run_job
from moe_trm.rollout.bundle import BundleReader
from tests.integration.jobs import metrics_of, write_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, brief_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("three")
    config = write_config(folder, brief_checkpoint)
    overrides = ["rollout.server.dtype=float32", "train.steps=1", f"record.bundle={folder / 'bundle'}"]
    assert run_job(str(config), overrides) == 0
    return folder


def test_sglang_and_megatron_agree(run: Path) -> None:
    parts = [load_file(path) for path in (run / "runs" / "live" / "probe").glob("*.safetensors")]
    native, replayed = (torch.cat([part[name] for part in parts]) for name in ("native", "replayed"))
    assert len(native) > 50
    assert native.abs().max() < 1e-4
    assert replayed.abs().max() < 1e-4
    step = metrics_of(run / "runs" / "live")[1]
    assert step["routing/native_flip_rate"] == 0.0
    assert step["engine/k3_kl"] < 1e-9


def test_sglang_and_hugging_face_agree(run: Path, brief_checkpoint: Path, hf_models: None) -> None:
    model = AutoModelForCausalLM.from_pretrained(brief_checkpoint, dtype=torch.float32).eval()
    worst = 0.0
    for record in BundleReader(str(run / "bundle")).read(1):
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(record.tokens.astype(np.int64))[None]).logits[0]
        sampled = np.flatnonzero(record.sampled)
        mask = record.sampling_mask
        assert mask is not None
        for place, token in enumerate(sampled):
            kept = torch.from_numpy(mask.ids[mask.offsets[place] : mask.offsets[place + 1]].astype(np.int64))
            log_support = torch.log_softmax(logits_TV[token - 1, kept], dim=0)
            own = log_support[(kept == int(record.tokens[token])).nonzero().item()]
            full = torch.log_softmax(logits_TV[token - 1], dim=0)[int(record.tokens[token])]
            worst = max(worst, abs(float(own) - record.rollout_logprobs[place]))
            worst = max(worst, abs(float(full) - record.full_logprobs[place]))
    assert worst < 1e-4
