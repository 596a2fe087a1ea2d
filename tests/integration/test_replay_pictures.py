"""Routes of picture tokens on an unpatched Qwen3-VL-MoE: recorded, replayed and proved as routes of text are.

The records of R3 are those of a real SGLang server that was sent the picture.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_trm.config.schema import Config
from moe_trm.learner.deepspeed.conformance import own_choice
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from routing import RouteError, RouteRecord, token_digest
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.hf_context import replay
from routing.judge.flip_bound import FlipBoundError
from routing.record.sources import Record, ReplayRecorded, ReplayRecords
from routing.sglang import decode_payload
from tests.integration.picture_model import (
    EXPERTS,
    IMAGE,
    IMAGE_TOKEN,
    LAYERS,
    TOP_K,
    encoded,
    make_picture_model,
    picture,
)

ALL_LAYERS = tuple(range(LAYERS))
QUESTION = f"Which colour is this? {IMAGE}"
TEXTS = (f"{QUESTION} red.", f"{IMAGE}? ok")
PICTURES = (("red", 64, 96), ("blue", 32, 32))
PICTURE_TOKENS = 2 * 3 + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"))


class Batch:
    """Two rows with a picture each, padded on the right."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor
        from transformers.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

        made = AutoProcessor.from_pretrained(folder)(
            text=[*TEXTS],
            images=[picture(*drawn) for drawn in PICTURES],
            return_tensors="pt",
            padding=True,
            padding_side="right",
        )
        self.model: Any = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = made["input_ids"]
        self.rows = {
            "input_ids": tokens[:, :-1],
            "target_ids": tokens[:, 1:],
            "valid": made["attention_mask"][:, 1:].bool(),
        }
        self.lengths = self.rows["valid"].sum(1).tolist()
        self.pictures = {
            "pixel_values": made["pixel_values"],
            "image_grid_thw": made["image_grid_thw"],
            "mm_token_type_ids": made["mm_token_type_ids"][:, :-1],
        }

    def scores(self) -> Tensor:
        """Log-prob of each target, one row behind the other."""
        logits = self.model(input_ids=self.rows["input_ids"], **self.pictures, use_cache=False).logits
        scores = logits.log_softmax(-1).gather(-1, self.rows["target_ids"][..., None])[..., 0]
        return scores[self.rows["valid"]]

    def records(self, routes_BRLK: np.ndarray) -> ReplayRecords:
        made = []
        for row, length in enumerate(self.lengths):
            tokens = np.append(self.rows["input_ids"][row, :length], self.rows["target_ids"][row, length - 1])
            routes = routes_BRLK[row, :length].astype(np.uint8)
            made.append(RouteRecord(routes, ALL_LAYERS, EXPERTS, token_digest(tokens)))
        return ReplayRecords(tuple(made))

    def gradients(self, scores: Tensor) -> list[Tensor]:
        """Of the routers, and of the first weight that a picture meets."""
        weights = [gate_of(block).weight for block in moe_blocks(self.model).values()]
        return list(torch.autograd.grad(scores.sum(), [*weights, self.model.model.visual.patch_embed.proj.weight]))


@pytest.fixture
def batch(folder: Path) -> Batch:
    return Batch(folder)


def test_a_recorded_pass_repeats_bit_for_bit(batch: Batch) -> None:
    assert int((batch.rows["input_ids"] == IMAGE_TOKEN).sum()) == PICTURE_TOKENS
    with torch.no_grad():
        stock = batch.scores()
        replayer = HFReplayer(batch.model)
        with replayer.use(Record(), **batch.rows) as running:
            assert torch.equal(batch.scores(), stock)
        with replayer.use(ReplayRecorded(running.recorded()), **batch.rows):
            assert torch.equal(batch.scores(), stock)
    report = replayer.report()
    assert report.replayed == report.matched == sum(batch.lengths) * LAYERS
    assert report.local_flips == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forced_routes_of_pictures_equal_the_gates_own_code_under_them(batch: Batch, checkpointing: bool) -> None:
    shape = (*batch.rows["input_ids"].shape, LAYERS, EXPERTS)
    routes = np.argsort(np.random.default_rng(0).random(shape), axis=-1)[..., :TOP_K]
    with own_choice(batch.model, routes.reshape(-1, LAYERS, TOP_K)):
        by_gates = batch.scores()
        expected = batch.gradients(by_gates)
    if checkpointing:
        batch.model.train().gradient_checkpointing_enable({"use_reentrant": False})
    replayer = HFReplayer(batch.model, max_local_flip_rate=1.0)
    with replayer.use(batch.records(routes), **batch.rows):
        replayed = batch.scores()
    gradients = batch.gradients(replayed)
    report = replayer.report()
    assert report.replayed == report.matched == (1 + checkpointing) * sum(batch.lengths) * LAYERS
    torch.testing.assert_close(replayed, by_gates, rtol=0, atol=2e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert theirs.abs().sum() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.fixture(scope="module")
def server(folder: Path, rollout_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")
    config = rollout_config.model_copy(
        update={"model": rollout_config.model.model_copy(update={"checkpoint": str(folder)})}
    )
    running = start_server(Served.of(config), tmp_path_factory.mktemp("served") / "rollout.log", api_key="pictures")
    yield running
    running.stop()


def answer_of(server: Server, token_ids: list[int], image: str) -> dict[str, Any]:
    body = {
        "input_ids": token_ids,
        "image_data": [image],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True},
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "return_routed_experts": True,
    }
    request = urllib.request.Request(
        f"{server.url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {server.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.mark.slow
def test_routes_that_sglang_recorded_of_a_picture_are_replayed_with_proof(folder: Path, server: Server) -> None:
    from transformers import AutoProcessor

    batch, processor = Batch(folder), AutoProcessor.from_pretrained(folder)
    red, white = picture("red", 128, 160), picture("white", 128, 160)
    answer = answer_of(server, processor.tokenizer(QUESTION)["input_ids"], encoded(red))
    prompt, meta = answer["prompt_token_ids"], answer["meta_info"]
    # The engine's expansion of the placeholder is the processor's own, which the learner forwards.
    expanded = processor(text=[QUESTION], images=[red], return_tensors="pt")
    assert prompt == expanded["input_ids"][0].tolist()
    assert prompt.count(IMAGE_TOKEN) == meta["image_tokens"] == 4 * 5
    tokens = np.array([*prompt, *answer["output_ids"]], np.int32)
    sizes: dict[str, Any] = {"num_layers": LAYERS, "layer_ids": ALL_LAYERS, "num_experts": EXPERTS, "top_k": TOP_K}
    record = decode_payload(meta["routed_experts"], tokens=tokens, **sizes)
    input_ids = torch.from_numpy(tokens.astype(np.int64))[None]

    def scores(image: Any, ids: Tensor = input_ids) -> tuple[np.ndarray, Any]:
        seen = processor(text=[QUESTION], images=[image], return_tensors="pt")
        with torch.no_grad(), replay(batch.model, [record], ids) as replayed:
            logits = batch.model(
                input_ids=ids,
                pixel_values=seen["pixel_values"],
                image_grid_thw=seen["image_grid_thw"],
                mm_token_type_ids=(ids == IMAGE_TOKEN).int(),
                use_cache=False,
            ).logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[..., 0]
        return logprobs[len(prompt) - 1 :].numpy(), replayed.report

    sampled, report = scores(red)
    np.testing.assert_allclose(sampled, [entry[0] for entry in meta["output_token_logprobs"]], atol=1e-4)
    assert report.replayed == report.matched == record.num_rows * LAYERS
    assert report.local_flips == 0
    with pytest.raises(FlipBoundError):
        scores(white)
    # A processor that makes another number of tokens of the picture: another text, refused before it is computed.
    with pytest.raises(RouteError) as caught:
        scores(red, torch.cat((input_ids[:, :25], input_ids[:, 26:]), dim=1))
    assert caught.value.reason in ("digest", "rows")
