"""A run of a model with sparse attention on the DeepSpeed learner, on a recording that transformers made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_trm.config import load
from moe_trm.models.tiny.families import make_family
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.types import RolloutRecord
from routing import RouteRecord, token_digest
from routing.hf import HFReplayer
from routing.indexer.attention import register
from routing.indexer.record import IndexerRecord
from routing.record.sources import Record
from tests.integration.jobs import metrics_of, run_job, write_config
from tests.integration.recordings import make_recording

K, SAMPLES = 4, 16
SETTINGS = [
    "learner.backend=deepspeed", "learner.parallel.expert=1", "learner.minibatches=1", "rollout.engine=bundle",
    "rollout.top_p=1.0", "sampling_mask.mode=off", "correction.rules=[]", "probe.every=0", "train.steps=1",
    "task.eval_size=0", "train.eval_every=0", "checkpoint.every=0", "learner.dtype=float32", "task.max_digits=3",
    "rollout.max_new_tokens=32", "loss.entropy_coef=0.01",
]  # fmt: skip


def longer(record: RolloutRecord) -> RolloutRecord:
    """With further sampled tokens before the last one: what sees few positions says little."""
    more = np.random.default_rng(record.sample_id).integers(4, 90, 14).astype(np.int32)
    tokens = np.concatenate([record.tokens[:-1], more, record.tokens[-1:]])
    return replace(
        record,
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= record.sampled.argmax(),
        turn_ids=np.zeros(len(tokens), np.int16),
        versions=np.zeros(record.num_sampled + len(more), np.int32),
    )


def as_transformers_samples(record: RolloutRecord, model: Any, replayer: HFReplayer) -> RolloutRecord:
    """The same tokens with the log-probs, routes and positions of transformers' own forward."""
    record = longer(record)
    ids = torch.from_numpy(record.tokens.astype(np.int64))[None]
    inputs, targets = ids[:, :-1], ids[:, 1:]
    with torch.no_grad(), replayer.use(Record(), inputs, targets, torch.ones_like(inputs, dtype=torch.bool)) as one:
        logits = model(input_ids=inputs, use_cache=False).logits
    scored = logits.log_softmax(-1).gather(-1, targets[..., None])[0, record.sampled[1:], 0].numpy()
    found, rows = one.recorded(), record.num_tokens - 1
    assert record.routes is not None
    routes = replace(
        record.routes,
        token_digest=token_digest(record.tokens),
        experts=np.stack([found.experts[layer].numpy() for layer in record.routes.layer_ids], 1).astype(np.uint8),
        indexer=IndexerRecord.of(rows, K, {layer: sets[0, K:].numpy() for layer, sets in found.positions.items()}),
    )
    return replace(record, routes=routes, rollout_logprobs=scored, full_logprobs=scored, sampling_mask=None)


@pytest.fixture(scope="module", params=["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def recorded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("sparse")
    checkpoint = make_family(request.param, folder / "model", index_topk=K)
    config = write_config(folder, checkpoint)
    made_up = make_recording(load(config, [*SETTINGS, f"rollout.bundle={folder}"]), folder / "made-up", 1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation=register())
    replayer = HFReplayer(model.eval())
    records = [as_transformers_samples(one, model, replayer) for one in BundleReader(str(made_up)).read(1)]
    replayer.detach()
    return config, records


def run(recorded: tuple[Path, list[Any]], name: str, change: Callable[[RouteRecord], RouteRecord]) -> tuple[int, Path]:
    """Train one step; `change` makes other routes of sample 5."""
    config, records = recorded
    bundle = config.parent / f"bundle-{name}"
    changed = [
        replace(one, routes=change(one.routes)).bound() if one.sample_id == 5 else one.bound() for one in records
    ]
    BundleWriter(str(bundle)).write(1, changed)
    status = run_job(config, [*SETTINGS, f"rollout.bundle={bundle}", f"name={name}"], 2)
    return status, config.parent / "runs" / name


def test_positions_go_from_the_recording_into_attention(recorded: tuple[Path, list[Any]]) -> None:
    status, folder = run(recorded, "right", lambda routes: routes)
    assert status == 0
    row = metrics_of(folder)[1]
    assert row["replay/applied_fraction"] == 1.0
    assert row["routing/positions/replayed"] > 0
    # Of two positions with nearly the same score, one batch may choose the one and another batch the other.
    assert row["routing/positions/flip_rate"] < 0.01
    assert row["routing/positions/lost_share"] < 0.01
    assert row["routing/positions/lost_share/layer_0"] < 0.01
    # The learner's log-probs are those that transformers recorded.
    assert row["engine/k3_kl"] < 1e-9
    assert row["ledger/trained"] == SAMPLES
    assert row["optimizer/grad_norm"] > 0


@pytest.mark.long
def test_a_sample_without_positions_is_rejected(recorded: tuple[Path, list[Any]]) -> None:
    status, folder = run(recorded, "lacking", lambda routes: replace(routes, indexer=None))
    assert status == 0
    row = metrics_of(folder)[1]
    assert row["records/rejected/route_positions"] == 1
    assert row["ledger/trained"] < SAMPLES


def unrelated(routes: RouteRecord) -> RouteRecord:
    rng, own = np.random.default_rng(0), routes.indexer
    assert own is not None
    sets = {
        layer: np.array([rng.permutation(row + 1)[:K] for row in range(K, own.num_rows)]) for layer in own.layer_ids
    }
    return replace(routes, indexer=IndexerRecord.of(own.num_rows, K, sets))


@pytest.mark.long
def test_positions_of_no_indexer_stop_the_run(
    recorded: tuple[Path, list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    status, folder = run(recorded, "wrong", unrelated)
    assert status != 0
    assert len(metrics_of(folder)) <= 1
    assert "recorded positions of 1 samples have little to do" in capfd.readouterr().err
