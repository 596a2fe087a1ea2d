"""A real server's answers to clients that read no text: those of SGLang, record by record."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from moe_trm.config.schema import Config
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.http import HEADERS
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sglang.request import generate_request
from moe_trm.types import SamplingParams
from tests.integration.served import VOCAB, prompts

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

GREEDY = SamplingParams(temperature=0.0, top_k=1, max_new_tokens=12)
RECORDS = (
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "num_retractions",
    "weight_versions",
    "weight_version",
    "output_token_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "routed_experts",
)
WITH_TEXT = {name: value for name, value in HEADERS.items() if name != "X-MoE-TRM-Answer"}


def answers(server: Server, requests: list[tuple[dict[str, str], dict[str, Any]]]) -> list[tuple[int, Any]]:
    """Status and JSON of requests to `/generate`, one after the other."""

    async def run() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.api_key}"}) as session:
            found = []
            for headers, body in requests:
                async with session.post(f"{server.url}/generate", data=orjson.dumps(body), headers=headers) as response:
                    found.append((response.status, await response.json()))
            return found

    return asyncio.run(run())


def body(config: Config, server: Server, length: int, params: SamplingParams = GREEDY, **other: Any) -> dict[str, Any]:
    (prompt,) = prompts(1, length)
    request = generate_request(ServerEngine(config, server.api_key).question(prompt.token_ids, params))
    return request | other


@pytest.mark.parametrize("length", [5, 90])
def test_an_answer_without_a_text_has_the_same_records(
    served_config: Config, rollout_server: Server, length: int
) -> None:
    """Also of more tokens than after which SGLang sends a part of an answer."""
    params = SamplingParams(temperature=0.0, top_k=1, max_new_tokens=120)
    request = body(served_config, rollout_server, length, params)
    (_, first), (_, whole), (_, bare) = answers(
        rollout_server, [(WITH_TEXT, request), (WITH_TEXT, request), (HEADERS, request)]
    )
    assert first["output_ids"] == whole["output_ids"] == bare["output_ids"]
    assert len(bare["output_ids"]) == 120
    assert "text" in whole
    assert bare.keys() == {"output_ids", "meta_info"}
    assert all(whole["meta_info"][name] == bare["meta_info"][name] for name in RECORDS)


def test_what_was_not_asked_for_is_missing_from_both(served_config: Config, rollout_server: Server) -> None:
    request = body(served_config, rollout_server, 9)
    for name in ("return_logprob", "return_routed_experts", "return_sampling_mask", "sampling_logprobs_mode"):
        del request[name]
    (_, whole), (_, bare) = answers(rollout_server, [(WITH_TEXT, request), (HEADERS, request)])
    assert whole["output_ids"] == bare["output_ids"]
    unwanted = {"output_token_logprobs", "routed_experts", "output_token_sampling_mask"}
    assert not unwanted & (whole["meta_info"].keys() | bare["meta_info"].keys())


def test_other_requests_of_such_a_client_are_answered_by_sglang(served_config: Config, rollout_server: Server) -> None:
    """More log-probs, a text, an id that looks like one of ours, and a stream that is none."""
    more = body(served_config, rollout_server, 9, top_logprobs_num=1)
    given = {"text": "abc", "sampling_params": {"max_new_tokens": 2}}
    named = body(served_config, rollout_server, 9, rid="moe-trm-ids-x")
    found = answers(rollout_server, [(HEADERS, more), (HEADERS, given), (WITH_TEXT, named), (HEADERS, named)])
    assert [status for status, _ in found] == [200] * 4
    assert all("text" in answer for _, answer in found[:2])
    assert len(found[0][1]["meta_info"]["output_top_logprobs"]) == 12
    assert all(len(answer["output_ids"]) == 12 for _, answer in found[2:])


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": [1] * 5000},
        {"sampling_params": {"temperature": -1.0, "top_k": 1}},
        {"sampling_params": {"top_k": VOCAB * 1000}},
    ],
    ids=", ".join,
)
def test_a_refusal_is_that_of_sglang(served_config: Config, rollout_server: Server, wrong: dict[str, Any]) -> None:
    request = body(served_config, rollout_server, 9) | wrong
    whole, bare = answers(rollout_server, [(WITH_TEXT, request), (HEADERS, request)])
    assert whole[0] == bare[0] >= 400
    assert whole[1].keys() == bare[1].keys()
    # The server goes on.
    [(status, answer)] = answers(rollout_server, [(HEADERS, body(served_config, rollout_server, 9))])
    assert (status, len(answer["output_ids"])) == (200, 12)
