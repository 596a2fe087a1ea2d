"""SGLang, Megatron-Core, DeepSpeed and Hugging Face in float32 on the same tokens: equal scores, equal learning."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_trm.cli import main as moe_trm
from moe_trm.models.tiny.checkpoint import PAD
from moe_trm.recording.bundle import BundleReader
from moe_trm.rollout.servers import process as supervisor
from tests.integration.jobs import metrics_of, run_job, write_config

pytestmark = pytest.mark.long  # test_end_to_end.py and test_sglang_kernels.py hold its rules

REWARD = f"{Path(__file__).parent / 'objective_support' / 'reward.py'}:reward"
# One optimizer step close to the gradient itself, so that its scale shows. The entropy bonus gives one whatever the
# rewards are.
PLAIN_STEP = [
    "train.steps=1",
    "train.export=true",
    "learner.minibatches=1",
    "loss.entropy_coef=0.1",
    "optimizer.lr=1.0",
    "optimizer.eps=1.0",
    "optimizer.warmup_steps=0",
    "optimizer.max_grad_norm=1000000",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, brief_checkpoint: Path, attached: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("three")
    config = write_config(folder, brief_checkpoint)
    overrides = [*attached, *PLAIN_STEP, f"record.bundle={folder / 'bundle'}"]
    assert run_job(config, overrides) == 0
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


@pytest.fixture(scope="module")
def deepspeed(run: Path) -> Path:
    """The same step on the recorded rollouts, by DeepSpeed."""
    overrides = [*PLAIN_STEP, "name=deepspeed", "learner.backend=deepspeed", "learner.parallel.expert=1"]
    overrides += ["learner.deepspeed.zero_stage=3", "rollout.engine=bundle", f"rollout.bundle={run / 'bundle'}"]
    assert run_job(str(run / "config.yaml"), overrides, 2) == 0
    return run / "runs" / "deepspeed"


@pytest.mark.usefixtures("deepspeed")
def test_both_learners_agree_on_the_recorded_rollouts(run: Path, brief_checkpoint: Path) -> None:
    """Where the text has the padding id too: no learner trains its embedding."""
    start = load_file(brief_checkpoint / "model.safetensors")
    probes, steps, norms = [], [], []
    for name in ("live", "deepspeed"):
        folder = run / "runs" / name
        probes.append([load_file(path) for path in sorted((folder / "probe").glob("*.safetensors"))])
        shards = sorted((folder / "checkpoints" / "final").glob("*.safetensors"))
        final = {key: value for shard in shards for key, value in load_file(shard).items()}
        steps.append({key: final[key] - value for key, value in start.items()})
        norms.append(metrics_of(folder)[1]["optimizer/grad_norm"])
    for megatron, deepspeed in zip(*probes, strict=True):
        assert len(megatron["native"]) > 10
        for kind in ("native", "replayed"):
            torch.testing.assert_close(deepspeed[kind], megatron[kind], atol=1e-4, rtol=0)
    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for step in steps:
        assert not step["model.embed_tokens.weight"][PAD].any()
    error, size = (
        torch.cat([value.flatten() for value in values]).norm()
        for values in ([steps[1][key] - steps[0][key] for key in start], steps[0].values())
    )
    assert float(error / size) < 1e-4


def test_sglang_and_hugging_face_agree(run: Path, brief_checkpoint: Path) -> None:
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
            own = log_support[(kept == int(record.tokens[token])).nonzero().flatten()[0]]
            full = torch.log_softmax(logits_TV[token - 1], dim=0)[int(record.tokens[token])]
            worst = max(worst, abs(float(own) - record.rollout_logprobs[place]))
            worst = max(worst, abs(float(full) - record.full_logprobs[place]))
    assert worst < 1e-4


def test_what_both_learners_left_is_evaluated_by_server_and_learner(
    run: Path, deepspeed: Path, attached: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All in float32, so the greedy answers are the same.

    Megatron's by its checkpoint for training, DeepSpeed's by its final weights. The server proves what it serves.
    """
    megatron = run / "runs" / "live"
    evaluations = {
        "server": ["eval", str(megatron), "--step", "1", "--samples", "2", *attached],
        "learner": ["eval", str(megatron / "checkpoints" / "step-000001"), "--by", "learner", "--samples", "2"],
        "deepspeed": ["eval", str(deepspeed), *attached],
    }
    found = {}
    for name, arguments in evaluations.items():
        assert moe_trm([*arguments, "--json", str(run / f"{name}.json")]) == 0
        found[name] = json.loads((run / f"{name}.json").read_text())
        assert "eval/accuracy" in capsys.readouterr().out
    texts = {name: [each["greedy"]["text"] for each in one["answers"][""]] for name, one in found.items()}
    assert len(texts["server"]) == 16
    assert texts["server"] == texts["learner"] == texts["deepspeed"]
    server, learner = found["server"]["metrics"], found["learner"]["metrics"]
    assert server["eval/accuracy"] == learner["eval/accuracy"]
    assert 0 <= learner["eval/avg_at_2"] <= learner["eval/pass_at_2"] <= 1
    last = metrics_of(megatron)[-1]
    assert server["eval/accuracy"] == last["eval/accuracy"]
    assert server["eval/length_mean"] == last["eval/length_mean"]


def test_an_own_file_of_prompts_and_an_own_reward_make_no_accuracy(
    run: Path, brief_checkpoint: Path, attached: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Hugging Face folder that belongs to no run: the command line says what to ask."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{one}+1=", "answer": str(one + 1)}) + "\n" for one in range(9)))
    asked = ["eval", str(brief_checkpoint), "--prompts", str(prompts), "--json", str(tmp_path / "out.json")]
    assert moe_trm([*asked, f"task.reward={REWARD}", "rollout.max_new_tokens=4", *attached]) == 0
    told = capsys.readouterr().out
    assert "eval/reward" in told
    assert "accuracy" not in told.lower()
    metrics = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert metrics["eval/prompts"] == 9
    assert "eval/accuracy" not in metrics


@pytest.mark.slow
def test_an_evaluation_starts_and_ends_a_server_of_its_own(
    brief_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the configuration names the servers of a run: those are left alone."""
    started: list[supervisor.Server] = []
    start = supervisor.start_server

    def remembered(*args: Any, **options: Any) -> supervisor.Server:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(supervisor, "start_server", remembered)
    config = write_config(tmp_path, brief_checkpoint)
    config.write_text(config.read_text().replace("rollout:", "rollout:\n  url: http://127.0.0.1:1", 1))
    asked = ["eval", str(brief_checkpoint), "--config", str(config), "--json", str(tmp_path / "out.json")]
    assert moe_trm([*asked, "task.eval_size=4"]) == 0
    assert "eval/accuracy" in capsys.readouterr().out
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["by"], document["dtype"]) == ("sglang", "bfloat16")
    assert document["metrics"]["eval/prompts"] == 4
    assert (tmp_path / "out.log").read_text()
    [server] = started
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.url}/health", timeout=5)
