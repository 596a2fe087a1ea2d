"""`moe-trm config from-*`: what it prints, and when it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_trm.cli import main
from moe_trm.config import resolve
from moe_trm.errors import ConfigError
from moe_trm.tools.translate.checks import failing

_SLIME = (
    "python3 train.py --hf-checkpoint models/none --prompt-data math.jsonl --num-rollout 10 --rollout-batch-size 8 "
    "--n-samples-per-prompt 8 --global-batch-size 32 --lr-decay-style constant --rm-type math "
    "--rollout-max-response-len 64\n"
)


def test_the_file_holds_everything_and_what_is_open_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(_SLIME)
    assert main(["config", "from-slime", str(script), "--mystery", "1"]) == 3
    printed = capsys.readouterr()
    assert 'checkpoint: "models/none"  # --hf-checkpoint (line 1)' in printed.out
    assert "reward: ???  # to do: --rm-type" in printed.out
    assert "--mystery = 1 (arguments)" in printed.out
    assert "to do: --rm-type = math (line 1)" in printed.err
    assert "refused by config show: task.reward: not decided yet" in printed.err
    file = tmp_path / "run.yaml"
    file.write_text(printed.out)
    with pytest.raises(ConfigError, match=r"task\.reward"):
        resolve(file)
    decided = resolve(file, ["task.reward=math_verify"]).config
    assert (decided.loss.name, decided.learner.minibatches, decided.task.reward) == ("ppo_clip", 2, "math_verify")


def test_what_is_open_is_one_message() -> None:
    text = "{model: {checkpoint: '???'}, train: {steps: '???', eval_every: 5}, optimizer: {betas: '???'}}\n"
    found = failing(text)
    assert found[0].startswith("config show: not decided yet: model.checkpoint, train.steps, optimizer.betas - got ???")
    assert sum("???" in line for line in found) == 1


def test_miles_has_a_command_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(_SLIME)
    main(["config", "from-miles", str(script)])
    assert "miles's default" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: {checkpoint: m}\nloss: {name: reinforce, dual_clip: 3.0}\n", "launch: .*dual_clip"),
        ("model: {checkpoint: m}\nloss: {name: sapo, clip_low: 0.2}\n", "launch: .*clip_low"),
        ("model: {checkpoint: m}\nrollout: {group_size: 1}\n", "config show: rollout.group_size"),
        ("model:\n  checkpoint: ???\n", "config show: model.checkpoint: not decided yet"),
        ("model: {checkpoint: m}\nloss:\n  name: ???\n", r"config show: loss.name.*\?\?\?"),
        ("model: {checkpoint: m}\nloss: {name: gpg, dual_clip: 3.0}\ntrain:\n  steps: ???\n", "launch: .*dual_clip"),
        ("model: {checkpoint: m}\nloss: {name: gpg}\ntrain:\n  steps: ???\n", "config show: train.steps"),
        ("model: {checkpoint: none-such}\n", "launch: checkpoint folder not found"),
    ],
)
def test_what_a_run_would_refuse_is_told(text: str, line: str) -> None:
    assert any(re.search(line, found.replace("\n", " ")) for found in failing(text)), failing(text)
