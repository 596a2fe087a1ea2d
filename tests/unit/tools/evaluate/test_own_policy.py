"""Answers of the learner's own policy against forwards without a cache, and against the definition of the support."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.methods.load import load_function
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from moe_trm.sync.manifest import WeightPush
from moe_trm.tools.evaluate.own_policy import OwnPolicy
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams

FUSION = Path(__file__).parents[4] / "examples" / "logit_fusion" / "engine.py"
PROMPT = (1, 20, 33, 7)
ALL = SamplingParams(top_k=128, max_new_tokens=8)
SHAPE = TinyShape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, expert_ffn=32, max_positions=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    make_checkpoint(folder, seed=3, shape=SHAPE)
    return folder


def answer(checkpoint: Path, params: SamplingParams, *, positions: int | None = None, seed: int = 0) -> RolloutRecord:
    async def go() -> RolloutRecord:
        engine = OwnPolicy("float32", seed, positions)
        await engine.load_weights(WeightPush(5, str(checkpoint), ()))
        try:
            return await engine.generate(Prompt("one", PROMPT), params, sample_id=0, group_id=0)
        finally:
            await engine.close()

    return asyncio.run(go())


def support(logprobs_V: list[float], params: SamplingParams) -> set[int]:
    """The ids of top-k, top-p and min-p, one after the other, by definition."""
    order = sorted(range(len(logprobs_V)), key=lambda token: -logprobs_V[token])
    kept, mass = set[int](), 0.0
    for place, token in enumerate(order):
        likely = math.exp(logprobs_V[token]) >= params.min_p * math.exp(logprobs_V[order[0]])
        if place and (place >= params.top_k or mass >= params.top_p or not likely):
            break
        kept.add(token)
        mass += math.exp(logprobs_V[token])
    return kept


@pytest.mark.parametrize(
    "chosen",
    [
        {"temperature": 0.7},
        {"top_p": 0.3, "temperature": 1.3},
        {"min_p": 0.9, "temperature": 0.8},
        {"top_k": 3},
        {"top_k": 1, "temperature": 0.5},
    ],
)
def test_log_probs_are_those_of_whole_forwards_over_what_is_kept(checkpoint: Path, chosen: dict[str, Any]) -> None:
    params = replace(ALL, **chosen)
    record = answer(checkpoint, params)
    model = load_policy(HfCheckpoint(checkpoint), "float32", recompute=False).causal.eval()
    assert record.num_sampled == 8
    sizes = set()
    for place, token in enumerate(record.tokens[len(PROMPT) :].tolist()):
        context = torch.from_numpy(record.tokens[: len(PROMPT) + place].astype(np.int64))[None]
        with torch.no_grad():
            logprobs_V = (model(input_ids=context).logits[0, -1].double() / params.temperature).log_softmax(-1).tolist()
        kept = support(logprobs_V, params)
        sizes.add(len(kept))
        assert token in kept
        assert params.top_k > 1 or token == int(np.argmax(logprobs_V))
        drawn = logprobs_V[token] - math.log(sum(math.exp(logprobs_V[one]) for one in kept))
        assert record.rollout_logprobs[place] == pytest.approx(drawn, abs=1e-5)
        assert record.full_logprobs[place] == pytest.approx(logprobs_V[token], abs=1e-5)
    assert (sizes == {ALL.top_k}) == (set(chosen) == {"temperature"})


def test_requests_in_order_have_the_answers_of_the_seed(checkpoint: Path) -> None:
    one, two, other = (answer(checkpoint, ALL, seed=seed).tokens.tolist() for seed in (0, 0, 1))
    assert one == two != other


def test_an_answer_ends_where_it_is_told_to(checkpoint: Path) -> None:
    whole = answer(checkpoint, replace(ALL, top_k=1)).tokens[len(PROMPT) :].tolist()
    stop = whole[3]
    stopped = answer(checkpoint, replace(ALL, top_k=1, stop_token_ids=(stop,)))
    assert stopped.tokens[len(PROMPT) :].tolist() == whole[: whole.index(stop) + 1]
    assert (stopped.finish_reason, set(stopped.versions.tolist())) == ("stop", {5})
    cut = answer(checkpoint, replace(ALL, top_k=1), positions=len(PROMPT) + 2)
    assert (cut.num_tokens, cut.finish_reason) == (len(PROMPT) + 2, "length")
    with pytest.raises(RecordRejected, match="no room"):
        answer(checkpoint, ALL, positions=len(PROMPT))


@pytest.mark.parametrize(("version", "share"), [(0, 0.5), (15, 0.25), (45, 0.0)])
def test_an_engine_of_fused_logits_reports_the_mixture_that_it_sampled_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, share: float
) -> None:
    """examples/logit_fusion; evaluations are of the policy alone."""
    make_checkpoint(tmp_path, seed=4, shape=SHAPE)
    monkeypatch.setenv("LOGIT_FUSION_TEACHER", str(tmp_path))
    config = Config.model_validate({"model": {"checkpoint": str(checkpoint)}, "learner": {"dtype": "float32"}})

    async def go() -> tuple[RolloutRecord, SampledTurn]:
        engine = load_function(f"{FUSION}:Engine", key="test")(config, None)
        await engine.load_weights(WeightPush(version, str(checkpoint), ()))
        fused = await engine.generate(Prompt("one", PROMPT), ALL, sample_id=0, group_id=0)
        bare = await engine.turn(PROMPT, ALL, bare=True)
        await engine.close()
        return fused, bare

    fused, bare = asyncio.run(go())
    policy, teacher = (
        load_policy(HfCheckpoint(folder), "float32", recompute=False).causal.eval() for folder in (checkpoint, tmp_path)
    )
    for tokens, logprobs, weight in (
        (fused.tokens[4:], fused.rollout_logprobs, share),
        (bare.tokens, bare.rollout_logprobs, 0.0),
    ):
        whole = torch.tensor([[*PROMPT, *tokens.tolist()]])
        with torch.no_grad():
            logits = weight * teacher(input_ids=whole).logits + (1 - weight) * policy(input_ids=whole).logits
        expected = logits[0, 3:-1].log_softmax(-1).gather(1, whole[0, 4:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)
    assert set(fused.versions.tolist()) == {version}
