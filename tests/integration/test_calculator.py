"""The calculator example on the real engines: several answers per sample, a tool between them, a few training steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.recording.bundle import BundleReader
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.rollout.sessions.function_sampler import ADAPTER, FunctionSampler
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.tasks.build import build_task
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.integration.jobs import metrics_of, run_job, timeless
from tests.integration.served import load, make_push

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "calculator"
TALK = """
async def rollout(session):
    for tool in ("[12]", "", "(a longer answer)"):
        await session.sample(max_new_tokens=7)
        await session.append(tool)
    await session.sample(max_new_tokens=5)
"""


def test_routes_and_log_probs_of_every_turn_are_those_of_one_forward_over_the_whole(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """Deltas joined at the seams, with siblings that share cached prefixes, against Hugging Face in float32."""
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    (tmp_path / "talk.py").write_text(TALK)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=250, max_new_tokens=7, stop_token_ids=(2,))

    async def work() -> list[RolloutRecord]:
        engine = ServerEngine(served_config, rollout_server.api_key)
        task = build_task(served_config.task.model_copy(update={"eval_size": 0}), str(tiny_moe), 0)
        host = FunctionHost(f"{tmp_path / 'talk.py'}:rollout", adapter=ADAPTER, key="rollout.function", limit_s=60.0)
        sampler = FunctionSampler(host, engine, task, params, Limits(9, 200), keep_changed=False)
        try:
            await engine.start()
            prompt = Prompt("p", tuple(range(40, 60)))
            return await asyncio.gather(*(sampler.sample(prompt, sample_id=i, group_id=0) for i in range(8)))
        finally:
            await sampler.close()
            await engine.close()

    for record in asyncio.run(work()):
        assert record.turn_ids.max() == 3
        check_against_hf(record, tiny_moe, params)


def check_against_hf(record: RolloutRecord, checkpoint: Path, params: SamplingParams) -> None:
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = torch.tensor(record.tokens[None].astype(np.int64))
    with torch.no_grad():
        output = model(tokens, output_router_logits=True)
    places = np.flatnonzero(record.sampled)
    logprobs = torch.log_softmax(output.logits[0, places - 1].float() / params.temperature, -1)
    expected = logprobs.gather(1, tokens[0, places][:, None])[:, 0].numpy()
    np.testing.assert_allclose(record.full_logprobs, expected, atol=1e-4)
    assert record.routes is not None
    record.routes.check_tokens(record.tokens, record.origin)
    chosen = np.stack([layer.topk(2, -1).indices.numpy() for layer in output.router_logits], 1)[:-1]
    assert np.array_equal(np.sort(record.routes.experts, -1), np.sort(chosen, -1))


REWARD = """
import time
from moe_trm.tasks import RewardInput

calls = 0

def reward(sample: RewardInput) -> dict[str, float]:
    global calls
    calls += 1
    match calls % 8:
        case 1: raise KeyError("no such field")
        case 3: return {"right": float("nan")}
        case 5: return [1.0, 2.0]
        case 7: time.sleep(1000)
    right = sample.finished and sample.completion.rpartition("#")[2] == sample.answer
    return {"right": float(right), "asked": sample.num_turns > 1}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, brief_checkpoint: Path, attached: list[str]) -> Path:
    """Two recorded steps of the example on a briefly warmed model, with a reward that fails on every other sample."""
    folder = tmp_path_factory.mktemp("calculator")
    (folder / "reward.py").write_text(REWARD)
    own = [f"task.reward={folder / 'reward.py'}:reward", "task.reward_timeout_s=1", "task.reward_processes=1"]
    own += ["task.reward_weights={right: 1, asked: 0.1}", f"record.bundle={folder / 'bundle'}"]
    assert train(folder, brief_checkpoint, "calculator", *attached, *own) == 0
    return folder


def train(folder: Path, checkpoint: Path, name: str, *overrides: str) -> int:
    small = [
        *(f"name={name}", f"run_dir={folder}", f"model.checkpoint={checkpoint}", "task.max_digits=1"),
        *("task.eval_size=8", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.server.port=0"),
        *("rollout.server.max_total_tokens=8192", "learner.micro_batch_rows=4", "probe.every=1"),
        *("train.steps=2", "train.export=false"),
        f"rollout.function={EXAMPLE / 'rollout.py'}:rollout",
    ]
    return run_job(str(EXAMPLE / "config.yaml"), [*small, *overrides])


@pytest.mark.long
def test_the_tool_is_used_replayed_and_never_scored(run: Path) -> None:
    rows = metrics_of(run / "calculator")
    records = [record for step in (1, 2) for record in BundleReader(str(run / "bundle")).read(step)]
    assert any(record.turn_ids.max() > 0 for record in records)
    for record in records:
        between = ~record.sampled & (record.turn_ids > 0)
        # What the tool says follows the `=` that asked for it, and is no part of what is scored.
        assert record.num_sampled == record.sampled.sum()
        if record.turn_ids.max() > 0:
            assert between.any()
        assert record.routes is not None
        record.routes.validate(record.num_tokens)
    for step, row in enumerate(rows[1:], 1):
        assert row["replay/applied_fraction"] == 1.0
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["routing/local_flip_rate"] < 0.2
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in places) >= 16 * step
        assert row["turns/mean"] > 1
        assert row["turns/later_token_fraction"] > 0
        assert row["turns/appended_tokens_mean"] > 0
        assert 0 <= row["acceptance/later_turn_tokens"] <= 1
    assert rows[0]["eval/prompts"] == 8
    assert rows[0]["eval/rejected/reward_error"] > 0


@pytest.mark.long
def test_a_reward_that_raises_hangs_or_returns_nonsense_costs_only_its_samples(run: Path) -> None:
    last = metrics_of(run / "calculator")[-1]
    reasons = ("reward_error", "reward_timeout", "reward_nan", "reward_type")
    assert all(last[f"records/rejected/{reason}"] > 0 for reason in reasons)
    assert last["ledger/rejected"] == sum(last[f"records/rejected/{reason}"] for reason in reasons)
    assert last["ledger/trained"] > 0
    assert last["reward/mean"] == pytest.approx(last["reward/right/mean"] + 0.1 * last["reward/asked/mean"])


@pytest.mark.slow
def test_the_recorded_run_repeats_without_server_or_tool(run: Path, brief_checkpoint: Path) -> None:
    again = ["rollout.engine=bundle", f"rollout.bundle={run / 'bundle'}"]
    assert train(run, brief_checkpoint, "again", *again) == 0
    for one, two in zip(
        timeless(metrics_of(run / "calculator"))[1:], timeless(metrics_of(run / "again"))[1:], strict=True
    ):
        for key in (
            "reward/mean",
            "engine/k3_kl",
            "loss/policy",
            "optimizer/grad_norm",
            "turns/mean",
            "reward/right/mean",
        ):
            # A step whose groups have equal rewards updates nothing, so it has no gradient in either run.
            assert one.get(key) == two.get(key), key
