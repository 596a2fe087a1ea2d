"""Proof by use on real SGLang servers: decoding, prefill and learner agree, and what differs is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.planted_faults import Clinic
from benchmarks.stale_decoder import planted
from moe_trm.config.schema import Config
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.servers.use_proof import BOUNDS, ServerUnfit
from moe_trm.sync.manifest import ScoredText, WeightPush
from tests.integration.jobs import metrics_of, run_job, write_config
from tests.integration.served import make_push, texts_of, with_engine


def proved(config: Config, server: Server, push: WeightPush) -> dict[str, float]:
    async def work(engine: ServerEngine) -> dict[str, float]:
        await engine.load_weights(push)
        return engine.metrics()

    return with_engine(config, server, work)


def test_decoding_prefill_and_learner_agree_on_a_clean_server(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    push = msgspec.structs.replace(make_push(tmp_path, tiny_moe, 1), texts=texts_of(tiny_moe))
    found = proved(served_config, rollout_server, push)
    bounds = BOUNDS["float32"]
    assert 0 <= found["weights/decode_gap"] <= bounds.decode / 4
    assert 0 <= found["weights/learner_gap"] <= bounds.learner / 4
    assert found["weights/proof_s"] > 0


def test_a_learner_with_other_weights_is_told_after_a_second_push(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tuple(ScoredText(text.token_ids, tuple(x - 0.5 for x in text.logprobs)) for text in texts_of(tiny_moe))
    push = msgspec.structs.replace(make_push(tmp_path, tiny_moe, 1), texts=other)
    with pytest.raises(ServerUnfit, match=r"differs from the learner by 0.5 .* wrong weights or another configuration"):
        proved(served_config, rollout_server, push)
    assert "is given the weights again" in caplog.text


def test_a_prefix_cache_that_survives_a_push_is_told(
    served_config: Config,
    rollout_server: Server,
    tiny_moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = texts_of(tiny_moe)

    def push_of(version: int) -> WeightPush:
        return msgspec.structs.replace(make_push(tmp_path, tiny_moe, version), texts=texts)

    async def work(engine: ServerEngine) -> None:
        for version in (1, 2):
            await engine.load_weights(push_of(version))
        post = EngineHttp.post

        async def forgetful(self: EngineHttp, path: str, body: Mapping[str, object]) -> Any:
            return await post(self, path, {**body, "flush_cache": False} if "flush_cache" in body else body)

        monkeypatch.setattr(EngineHttp, "post", forgetful)
        with pytest.raises(ServerUnfit, match="came from a prefix cache that survived the push"):
            await engine.load_weights(push_of(3))
        monkeypatch.undo()

    with_engine(served_config, rollout_server, work)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "from_random"), [("float32", False), ("bfloat16", True)])
def test_a_run_stops_at_the_first_push_that_changes_what_a_decoder_keeps(
    brief_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    dtype: str,
    from_random: bool,
) -> None:
    """Every checksum agrees: the parameters are right, and decoding does not read them.

    In bfloat16 one step may change less than the bound. A server that begins with random weights shows it anyway, at
    the push before the first step.
    """
    for name, value in planted(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    settings = ["rollout.server.port=0", f"rollout.server.dtype={dtype}", "train.steps=4", "optimizer.lr=1e-3"]
    settings += [f"rollout.server.random_weights={from_random}", "sync.prove_every=1"]
    settings += ["rollout.server.startup_timeout_s=1200"]
    assert run_job(write_config(tmp_path, brief_checkpoint), settings) != 0
    told = capfd.readouterr()
    assert "decoding reads stale or damaged weights" in told.out + told.err
    assert "also after a second push" in told.out + told.err
    log = tmp_path / "runs" / "live" / "metrics.jsonl"
    rows = metrics_of(log.parent) if log.exists() else []
    assert {row["step"] for row in rows} <= {0}, "no step after the push was trained"


@pytest.mark.slow
def test_the_doctor_finds_it_before_the_run(
    brief_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in planted(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    cause, _, _ = Clinic(tmp_path, brief_checkpoint).visit(
        "rollout.server.port=0", "sync.prove_every=1", "rollout.server.startup_timeout_s=1200"
    )
    assert cause == "decoding"
