"""`moe-trm audit --engine URL` on a real server: right weights raise no alarm, another checkpoint's are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_trm.cli import main
from moe_trm.config.schema import Config
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.servers.process import Server
from moe_trm.tools.audit.dump import AuditRow
from moe_trm.types import RolloutRecord
from tests.integration.audit_files import slime
from tests.integration.served import load, make_push, prompts, sample


def rows_of(records: list[RolloutRecord]) -> list[AuditRow]:
    return [
        AuditRow(
            f"row {number}",
            record.tokens.astype(np.int64),
            record.sampled,
            rollout=record.full_logprobs.astype(np.float64),
            routes=record.routes.experts if record.routes is not None else None,
        )
        for number, record in enumerate(records)
    ]


@pytest.mark.slow
def test_a_real_server_with_right_weights_and_with_other_ones(
    served_config: Config,
    rollout_server: Server,
    tiny_moe: Path,
    other_moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 1))
    dumps = slime(tmp_path, rows_of(sample(served_config, rollout_server, prompts(6))))
    monkeypatch.setenv(API_KEY_VARIABLE, rollout_server.api_key)

    def audited(checkpoint: Path) -> dict[str, str]:
        given = {"checkpoint": checkpoint, "device": "cpu", "temperature": 0.8, "engine-dtype": "float32"}
        given |= {"engine": rollout_server.url, "page": tmp_path / "a.html", "json": tmp_path / "a.json"}
        main(["audit", *map(str, dumps), *(f"--{name}={value}" for name, value in given.items())])
        answers = json.loads((tmp_path / "a.json").read_text())["answers"]
        return {answer["question"]: answer["cause"] for answer in answers if answer["status"] == "fail"}

    assert audited(tiny_moe) == {}
    assert "engine: Median distances in nats: decoding to prefill" in capsys.readouterr().out
    assert audited(other_moe)["engine"] == "weights"
    monkeypatch.setenv(API_KEY_VARIABLE, "another key")
    (tmp_path / "a.json").write_text('{"answers": []}')
    assert audited(tiny_moe) == {}
    assert "error" in capsys.readouterr().err
