"""Qwen3-Next and Qwen3.5 on a real SGLang server: states of the delta rule through prefix cache, pieces and retraction.

Every record is compared with Hugging Face's forward over its tokens in float32.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_trm.config.schema import Config
from moe_trm.models.tiny.families import make_family
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams
from tests.integration.served import PARAMS, check_against_hf, load, make_push, prompts, sample, with_engine

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")
pytestmark = pytest.mark.slow

COUNT = 16
VOCAB = 128
PIECE = 64
"""Tokens that a prefill takes at once."""


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(family, tmp_path_factory.mktemp("hybrid"), seed=0)


@pytest.fixture(scope="module")
def served(
    hybrid: Path, rollout_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Config, Server]]:
    """A server whose cache holds a third of what its requests want, and whose prefills are cut in pieces."""
    update = {
        "max_total_tokens": 512,
        "max_running_requests": COUNT,
        "chunked_prefill_size": PIECE,
        "extra_args": ("--schedule-conservativeness", "0.01"),
    }
    server = rollout_config.rollout.server.model_copy(update=update)
    config = rollout_config.model_copy(
        update={
            "model": rollout_config.model.model_copy(update={"checkpoint": str(hybrid)}),
            "rollout": rollout_config.rollout.model_copy(update={"server": server}),
        }
    )
    running = start_server(Served.of(config), tmp_path_factory.mktemp("served") / "rollout.log", api_key="hybrid")
    rollout = config.rollout.model_copy(update={"url": running.url})
    yield config.model_copy(update={"rollout": rollout}), running
    running.stop()


def cached(server: Server) -> int:
    """Tokens of prompts that this server took from its prefix cache so far."""
    return sum(map(int, re.findall(r"#cached-token: (\d+)", server.log_path.read_text())))


def test_a_push_is_proved_and_records_are_those_of_hugging_face(
    served: tuple[Config, Server], hybrid: Path, family: str, tmp_path: Path
) -> None:
    config, server = served
    other = make_family(family, tmp_path / "other", seed=1)
    load(config, server, make_push(tmp_path / "pushes", other, 1))
    for record in sample(config, server, prompts(3)):
        check_against_hf(record, other)
    load(config, server, make_push(tmp_path / "pushes", hybrid, 2))
    for record in sample(config, server, prompts(3)):
        check_against_hf(record, hybrid)


def test_states_go_on_after_cached_prefixes_and_between_pieces(
    served: tuple[Config, Server], hybrid: Path, tmp_path: Path
) -> None:
    config, server = served
    load(config, server, make_push(tmp_path, hybrid, 3))
    before = cached(server)
    first = sample(config, server, prompts(3, length=PIECE + 20))
    again = [Prompt(f"again-{i}", (*record.tokens.tolist(), 7, 8, 9)) for i, record in enumerate(first)]
    for record in (*first, *sample(config, server, again)):
        check_against_hf(record, hybrid)
    assert cached(server) - before > 2 * PIECE


def test_states_of_retracted_answers_are_computed_again(
    served: tuple[Config, Server], hybrid: Path, tmp_path: Path
) -> None:
    config, server = served
    load(config, server, make_push(tmp_path, hybrid, 4))
    long = SamplingParams(temperature=PARAMS.temperature, top_p=PARAMS.top_p, top_k=VOCAB, max_new_tokens=100)

    async def work(engine: ServerEngine) -> list[SampledTurn]:
        turns = await asyncio.gather(*(engine.turn(prompt.token_ids, long) for prompt in prompts(COUNT)))
        return list(turns)

    turns = with_engine(config, server, work)
    assert any(turn.retracted for turn in turns)
    for prompt, turn in zip(prompts(COUNT), turns, strict=True):
        check_against_hf(record_of(prompt, turn), hybrid)


def record_of(prompt: Prompt, turn: SampledTurn) -> RolloutRecord:
    from moe_trm.rollout.sessions.conversation import Conversation

    conversation = Conversation(prompt)
    conversation.add(turn)
    return conversation.record(sample_id=0, group_id=0, keep_changed=True)
