"""Pushes to a real SGLang server, samples of it, and Hugging Face on the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file

from moe_trm.config.schema import Config
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server
from moe_trm.step.fixed_texts import FixedTexts
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.manifest import ScoredText, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.integration.kept_bounds import kept_bounds
from tests.unit.doubles import StandInLearner

VOCAB = 250
T = TypeVar("T")
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, top_k=VOCAB, max_new_tokens=24)
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
ROUNDING = 1e-5
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 0.2, 0.1)
"""Delays tried in turn until a push comes in the middle of a sample: a busy machine is slower to its first token."""
EXPERT_FUSED = "model.layers.2.mlp.experts.w13_weight"


def with_engine(config: Config, server: Server, work: Callable[[ServerEngine], Awaitable[T]]) -> T:
    async def run() -> T:
        engine = ServerEngine(config, server.api_key)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def make_push(root: Path, checkpoint: Path, version: int, dtype: str = "float32") -> WeightPush:
    """A push of `checkpoint`'s weights in two shards, experts apart, as two ranks would write it."""
    tensors = load_file(checkpoint / "model.safetensors")
    folder = root / f"v{version:06d}"
    shards = [
        write_shard(
            folder / f"model-{number}.safetensors",
            ((name, t) for name, t in tensors.items() if (".experts." in name) == expert),
            Rounding(dtype),
        )
        for number, expert in enumerate((False, True))
    ]
    return finish_push(str(folder), shards[0] + shards[1], version, str(checkpoint))


def load(config: Config, server: Server, push: WeightPush) -> None:
    with_engine(config, server, lambda engine: engine.load_weights(push))


def prompts(count: int, length: int = 20) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(f"p{i}", tuple(rng.integers(4, 99, length + i % 7).tolist())) for i in range(count)]


def sample(
    config: Config, server: Server, chosen: list[Prompt], params: SamplingParams = PARAMS
) -> list[RolloutRecord]:
    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        return list(
            await asyncio.gather(
                *(engine.generate(prompt, params, sample_id=i, group_id=i) for i, prompt in enumerate(chosen))
            )
        )

    return with_engine(config, server, work)


def texts_of(checkpoint: Path) -> tuple[ScoredText, ...]:
    """The fixed texts as Hugging Face scores them."""
    from transformers import Qwen3MoeForCausalLM

    texts = FixedTexts(VOCAB, 1, scored=False).take(StandInLearner())
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([text.token_ids for text in texts])
    with torch.no_grad():
        logprobs = model(ids).logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return tuple(
        ScoredText(text.token_ids, tuple(own)) for text, own in zip(texts, logprobs.double().tolist(), strict=True)
    )


def check_against_hf(record: RolloutRecord, checkpoint: Path) -> None:
    """Log-probs within 1e-4, masks and covered routes of Hugging Face's forward over the same tokens.

    An id whose place is decided by less than `ROUNDING` may be on either side: two engines add in another order.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(torch.tensor(record.tokens[None].astype(np.int64)), output_router_logits=True)
    places = np.flatnonzero(record.sampled)
    logprobs = torch.log_softmax(output.logits[0, places - 1].float() / PARAMS.temperature, -1)
    sampled = torch.tensor(record.tokens[places].astype(np.int64))
    full = logprobs.gather(1, sampled[:, None])[:, 0].numpy()
    told = ~np.isnan(record.full_logprobs)
    np.testing.assert_allclose(record.full_logprobs[told], full[told], atol=1e-4)
    mask = record.sampling_mask
    assert mask is not None
    for row, kept in enumerate(np.split(mask.ids, mask.offsets[1:-1])):
        sure, possible = kept_bounds(logprobs[row], PARAMS.top_p, mass=ROUNDING, each=1e-4)
        assert sure <= set(kept.tolist()) <= possible
        log_mass = logprobs[row][torch.from_numpy(kept.astype(np.int64))].exp().sum().log().item()
        assert abs(record.rollout_logprobs[row] - (full[row] - log_mass)) < 1e-4
    assert record.routes is not None
    record.routes.check_tokens(record.tokens, record.origin)
    scores = np.stack([layer.float().numpy() for layer in output.router_logits], 1)[:-1][-record.routes.num_rows :]
    ranked, best = -np.sort(-scores, -1), np.argsort(-scores, -1)[..., :2]
    same = (np.sort(record.routes.experts, -1) == np.sort(best, -1)).all(-1)
    assert (same | (ranked[..., 1] - ranked[..., 2] < ROUNDING) | ~record.routes.coverage()[:, None]).all()
