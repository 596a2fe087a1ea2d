"""vLLM's own reload leaves the experts of a CPU unpacked: every digest is right, and what is computed is garbage."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import msgspec
import numpy as np
import pytest

from moe_trm.errors import MoeTrmError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.use_proof import ServerUnfit
from moe_trm.types import RolloutRecord
from tests.integration.engine_contract.conftest import skip_without, started
from tests.integration.engine_contract.test_engine_contract import distance
from tests.integration.jobs import metrics_of, run_job, write_config
from tests.integration.served import make_push, prompts, texts_of

WORKER = Path(__file__).parents[3] / "packages" / "vllm_worker" / "moe_trm_vllm_worker"
PACKING = "        _set_up_experts_again(self.model_runner.get_model())\n"
pytestmark = pytest.mark.slow


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that start now have packages/vllm_worker without the line that packs experts."""
    skip_without("vllm")
    own = copytree(WORKER, tmp_path / "stock" / WORKER.name) / "loader.py"
    text = own.read_text()
    assert text.count(PACKING) == 1
    own.write_text(text.replace(PACKING, ""))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stock"))


@pytest.mark.usefixtures("stock")
def test_digests_do_not_see_it_and_the_proof_by_use_does(tiny_moe: Path, other_moe: Path, tmp_path: Path) -> None:
    subject, server = started("vllm", tiny_moe, tmp_path)

    async def sampled(engine: ServerEngine) -> list[RolloutRecord]:
        await engine.load_weights(make_push(tmp_path, other_moe, 1))
        return await subject.sample(engine, prompts(2))

    async def proved(engine: ServerEngine) -> None:
        push = make_push(tmp_path, other_moe, 2)
        await engine.load_weights(msgspec.structs.replace(push, texts=texts_of(other_moe)))

    try:
        records = subject.run(sampled)
        with pytest.raises(ServerUnfit, match="from the learner"):
            subject.run(proved)
    finally:
        server.stop()
    assert max(np.abs(distance(record, other_moe)).max() for record in records) > 0.1


@pytest.mark.usefixtures("stock")
def test_a_run_ends_before_its_first_step(
    brief_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["rollout.engine=vllm", "rollout.server.dtype=float32", "rollout.server.port=0", "train.steps=2"]
    assert run_job(write_config(tmp_path, brief_checkpoint), [*settings, "rollout.server.startup_timeout_s=1200"]) != 0
    told = capfd.readouterr()
    assert "computes with other weights than it holds" in told.out + told.err
    try:
        rows = metrics_of(tmp_path / "runs" / "live")
    except (OSError, MoeTrmError):
        rows = []
    assert {row["step"] for row in rows} <= {0}
