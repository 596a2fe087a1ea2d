"""Masks and log-probs of a real server, equal to an independent Hugging Face computation on the same tokens.

Shape letters: S sampled tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.errors import EngineError
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sglang.checks import ServerCheck
from moe_trm.sampling_mask.dense import full_logprobs
from moe_trm.sampling_mask.logprobs import masked_logprobs_and_kl
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.integration.served import VOCAB, load, make_push, prompts, sample, with_engine

NEAR = 5e-6
"""Margin of a cumulative or relative probability to a bound, below which float32 may keep or drop the id."""
TIE = 2e-5
"""Log-ratio of two neighbours at a cut by rank, below which float32 may order them either way (log-probs: 1.7e-5)."""

GRID: dict[str, dict[str, Any]] = {
    "nothing is cut": {},
    "top_p": {"top_p": 0.8},
    "narrow top_p": {"top_p": 0.3},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "top_p and top_k": {"top_p": 0.9, "top_k": 12},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.05},
    "top_k and min_p": {"top_k": 30, "min_p": 0.02},
    "all, cold": {"top_p": 0.7, "top_k": 20, "min_p": 0.03, "temperature": 0.6},
    "all, hot": {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "temperature": 1.4},
}


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> Any:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32).eval()


@pytest.fixture(scope="module", autouse=True)
def own_weights(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Other tests push other weights into the shared server."""
    load(served_config, rollout_server, make_push(tmp_path_factory.mktemp("push"), tiny_moe, 7))


@dataclass(frozen=True)
class Expected:
    """The result of Hugging Face's logits at one sampled position."""

    kept: set[int]
    undecided: bool
    logprobs: torch.Tensor


def params(**changed: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "top_k": VOCAB, "max_new_tokens": 12, **changed})


def expected_support(logits_V: torch.Tensor, chosen: SamplingParams) -> Expected:
    """Rank below top_k, mass before the id at most top_p, and at least min_p of the likeliest: on one sorted list."""
    logprobs_V = torch.log_softmax(logits_V.double() / chosen.temperature, -1)
    ordered, ids = logprobs_V.exp().sort(descending=True)
    before = ordered.cumsum(0) - ordered
    floor = chosen.min_p * ordered[0]
    keep = (torch.arange(len(ordered)) < chosen.top_k) & (before <= chosen.top_p) & (ordered >= floor)
    edges = [(before - chosen.top_p).abs().min() if chosen.top_p < 1 else torch.tensor(1.0)]
    edges.append((ordered / floor).log().abs().min() if chosen.min_p else torch.tensor(1.0))
    num_kept = int(keep.sum())
    tied = num_kept < len(ordered) and bool((ordered[num_kept - 1] / ordered[num_kept]).log() < TIE)
    return Expected(set(ids[keep].tolist()), tied or bool(torch.stack(edges).min() < NEAR), logprobs_V)


@pytest.mark.parametrize("cut", [params(top_p=0.75), params(top_k=4)], ids=["top_p", "top_k"])
def test_a_tie_at_the_cut_is_undecided(cut: SamplingParams) -> None:
    probs_V = torch.tensor([0.3, 0.25, 0.15, 0.12, 0.12, 0.06])
    assert expected_support(probs_V.log(), cut).undecided
    probs_V[4] = 0.11
    assert not expected_support(probs_V.log(), cut).undecided


@torch.no_grad()
def check(record: RolloutRecord, model: Any, chosen: SamplingParams) -> tuple[int, int]:
    """Compare every position; returns how many sets were compared and how many were too close to a bound."""
    logits_TV = model(torch.from_numpy(record.tokens.astype(np.int64))[None]).logits[0]
    mask = record.sampling_mask
    assert mask is not None
    assert mask.logprobs is not None
    undecided = 0
    for place, position in enumerate(np.flatnonzero(record.sampled)):
        expected = expected_support(logits_TV[position - 1], chosen)
        row = slice(mask.offsets[place], mask.offsets[place + 1])
        kept = torch.from_numpy(mask.ids[row].astype(np.int64))
        undecided += expected.undecided
        assert expected.undecided or set(kept.tolist()) == expected.kept
        token = int(record.tokens[position])
        support = torch.log_softmax(expected.logprobs[kept], 0)
        np.testing.assert_allclose(mask.logprobs[row], support.numpy(), atol=1e-4)
        np.testing.assert_allclose(record.rollout_logprobs[place], support[kept == token].item(), atol=1e-4)
        np.testing.assert_allclose(record.full_logprobs[place], expected.logprobs[token].item(), atol=1e-4)
    return mask.num_rows, undecided


def check_all(records: list[RolloutRecord], model: Any, chosen: SamplingParams) -> None:
    compared, undecided = np.sum([check(record, model, chosen) for record in records], axis=0)
    assert compared - undecided > 30


@pytest.mark.parametrize("name", GRID)
def test_sets_and_log_probs_over_the_grid(served_config: Config, rollout_server: Server, model: Any, name: str) -> None:
    chosen = params(**GRID[name])
    records = sample(served_config, rollout_server, prompts(6), chosen)
    check_all(records, model, chosen)
    sizes = np.concatenate([np.diff(record.sampling_mask.offsets) for record in records if record.sampling_mask])
    assert sizes.max() <= chosen.top_k
    assert (sizes.max() == VOCAB) == (name == "nothing is cut")


def test_radix_cache_hits(served_config: Config, rollout_server: Server, model: Any) -> None:
    """The same prompt again: the second time its rows come from the prefix cache."""
    chosen = params(top_p=0.9)
    (prompt,) = prompts(1, length=200)
    first = sample(served_config, rollout_server, [prompt] * 4, chosen)
    check_all([*first, *sample(served_config, rollout_server, [prompt] * 4, chosen)], model, chosen)


def test_chunked_prefill_under_concurrency(served_config: Config, rollout_server: Server, model: Any) -> None:
    """Six prompts of 700 tokens: the engine prefills at most 2,048 tokens at once, so some are cut."""
    assert served_config.rollout.server.chunked_prefill_size == 2048
    chosen = params(top_p=0.85)
    check_all(sample(served_config, rollout_server, prompts(6, length=700), chosen), model, chosen)


def test_a_second_turn_on_top_of_the_first(served_config: Config, rollout_server: Server, model: Any) -> None:
    chosen = params(top_p=0.9, top_k=50)
    first = sample(served_config, rollout_server, prompts(4), chosen)
    later = [Prompt(f"t{i}", (*record.tokens.tolist(), 10, 11, 12)) for i, record in enumerate(first)]
    check_all([*first, *sample(served_config, rollout_server, later, chosen)], model, chosen)


@torch.no_grad()
def test_masked_ratios_are_one_and_full_ones_are_the_kept_mass(
    served_config: Config, rollout_server: Server, model: Any
) -> None:
    """Equal weights, float32: over the kept support every ratio is 1; over the vocabulary its bias is the kept mass."""
    chosen = params(top_p=0.8)
    ratios, masses = [], []
    for record in sample(served_config, rollout_server, prompts(6), chosen):
        hidden_TH = model.model(torch.from_numpy(record.tokens.astype(np.int64))[None]).last_hidden_state[0]
        hidden_SH = hidden_TH[np.flatnonzero(record.sampled) - 1]
        target_S = torch.from_numpy(record.tokens[record.sampled].astype(np.int64))
        mask, rollout_S = record.sampling_mask, torch.from_numpy(record.rollout_logprobs)
        assert mask is not None
        assert mask.logprobs is not None
        ids, offsets = torch.from_numpy(mask.ids.astype(np.int64)), torch.from_numpy(mask.offsets)
        mu = torch.from_numpy(mask.logprobs)
        masked_S, kl_S = masked_logprobs_and_kl(hidden_SH, model.lm_head.weight, target_S, ids, offsets, mu)
        torch.testing.assert_close((masked_S - rollout_S).exp(), torch.ones(len(target_S)), atol=1e-4, rtol=0)
        assert kl_S.max() < 1e-6
        full_S = full_logprobs(hidden_SH, model.lm_head.weight, target_S)
        ratios.append((full_S - rollout_S).exp())
        masses.append(np.exp(record.full_logprobs - record.rollout_logprobs))
    bias = torch.cat(ratios).mean().item()
    assert bias == pytest.approx(np.concatenate(masses).mean(), abs=1e-4)
    assert bias < 0.95


def test_union_asks_for_what_it_needs(served_config: Config, rollout_server: Server, model: Any) -> None:
    union = served_config.model_copy(
        update={"sampling_mask": served_config.sampling_mask.model_copy(update={"violation": "union"})}
    )
    chosen = params(top_p=0.9)
    records = sample(union, rollout_server, prompts(4), chosen)
    check_all(records, model, chosen)
    assert all(record.sampling_mask is not None and record.sampling_mask.violations == 0 for record in records)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_log_probs_at_another_temperature_are_refused(
    served_config: Config, rollout_server: Server, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = served_config.rollout.model_copy(update={"temperature": temperature})
    config = served_config.model_copy(update={"rollout": rollout})
    with_engine(config, rollout_server, lambda engine: engine.start())

    # As a server answers that reports every log-prob at temperature 1.
    measured = ServerCheck._spread
    monkeypatch.setattr(ServerCheck, "_spread", lambda check, http, temperature: measured(check, http, 1.0))
    with pytest.raises(EngineError, match="temperature 1"):
        with_engine(config, rollout_server, lambda engine: engine.start())
