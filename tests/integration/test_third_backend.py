"""A whole run on an engine with servers that one file brings along, whose server dies in the middle of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.jobs import metrics_of, run_job, write_config
from tests.unit.rollout.test_scripted_servers import SCRIPTED

REWARD = f"{Path(__file__).parent / 'objective_support' / 'reward.py'}:reward"
STEPS, DIES_AT = 3, 30
"""A step takes 16 answers, so the server dies in the second step, unless requests are sent again before."""


def test_a_run_trains_on_the_third_engine_whose_server_is_killed_and_restarted(
    brief_checkpoint: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, brief_checkpoint)
    dies = f"[--die-at, '{DIES_AT}', --died, {tmp_path / 'died'}]"
    settings = [f"rollout.engine={SCRIPTED}", f"rollout.server.extra_args={dies}"]
    settings += ["replay.mode=none", "probe.every=0", "probe.save=false", "sampling_mask.mode=off", "rollout.top_p=1"]
    settings += ["correction.rules=[]", f"task.reward={REWARD}", "task.eval_size=0", "learner.parallel.expert=1"]
    assert run_job(config, [*settings, f"train.steps={STEPS}"]) == 0
    run = tmp_path / "runs" / "live"
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(row["optimizer/grad_norm"] > 0 for row in rows[1:])
    assert [row["rollout/age_max"] for row in rows[1:]] == [0] * STEPS
    assert (rows[-1]["rollout/losses"], rows[-1]["rollout/recoveries"]) == (1, 1)
    assert rows[-1]["ledger/trained"] + rows[-1]["ledger/rejected"] == 16 * STEPS
    lives = (run / "rollout.log").read_text().split("a life begins")[1:]
    first, second = ([int(found) for found in re.findall(r"^loaded (\d+)-", life, re.MULTILINE)] for life in lives)
    # Where the machine is busy, requests are sent again, and the server may die before the second step.
    assert first in ([0], [0, 1])
    assert second in ([*range(STEPS + 1)], [*range(1, STEPS + 1)])
