"""Python launchers are read by their syntax tree, and nothing of them is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.errors import ConfigError
from moe_trm.tools.translate import from_miles
from moe_trm.tools.translate.foreign_setting import ForeignSetting
from moe_trm.tools.translate.sources import flag_settings

_LAUNCHER = """
import os
import helper as U

raise SystemExit("nobody runs this")

@dataclass
class ScriptArgs(U.Base):
    mode: str = "normal"
    model: str = "m"
    gpus: int = 8
    fast: bool = False
    extra_args: str = ""
    taken: int = 1

    def __post_init__(self):
        self.taken = self.taken or 2

def execute(args):
    hf = f"{args.model}-FP8" if args.fast else args.model
    ckpt_args = f"--hf-checkpoint /models/{hf}/ " f"--save {args.unknown}/ckpt "
    rollout_args = (
        "--rollout-batch-size 32 "
        # "--not-set 1 "
        f"--rollout-max-response-len {100 if args.mode == 'debug' else 8192} "
        f"--micro-batch-size {args.taken} "
        "--global-batch-size " + "256 "
    )
    match args.gpus:
        case 4 | 8:
            rollout_args += "--tensor-model-parallel-size 4 "
        case _:
            rollout_args += "--tensor-model-parallel-size 1 "
    if args.fast:
        rollout_args += "--use-tis "
    if os.environ.get("X"):
        rollout_args += "--colocate "
    train_args = f"{ckpt_args} {rollout_args} {U.tracking(__file__)} {args.extra_args} --rm-type math"
    U.execute_train(train_args=train_args, config=args)
"""


def read(tmp_path: Path, text: str = _LAUNCHER) -> dict[str, ForeignSetting]:
    file = tmp_path / "run.py"
    file.write_text(text)
    return flag_settings(file)


def test_literals_options_and_decided_branches_are_read(tmp_path: Path) -> None:
    settings = read(tmp_path)
    values = {key: setting.value for key, setting in settings.items() if not setting.unread}
    assert values == {
        "train.py": ("train.py",),
        "hf-checkpoint": ("/models/m/",),
        "rollout-batch-size": ("32",),
        "rollout-max-response-len": ("8192",),
        "global-batch-size": ("256",),
        "tensor-model-parallel-size": ("4",),
        "rm-type": ("math",),
    }
    assert settings["tensor-model-parallel-size"].place == "line 31, unless gpus is set outside"


def test_what_running_it_would_decide_is_a_to_do(tmp_path: Path) -> None:
    settings = read(tmp_path)
    unread = {key: setting.unread for key, setting in settings.items() if setting.unread}
    assert unread == {
        "save": "the script computes it",
        "micro-batch-size": "the script computes it",
        "colocate": "the launcher decides if this is set",
        "${tracking[@]}": "its settings are not in this file",
    }
    assert "use-tis" not in settings


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ('("normal", 8)', True),
        ('("normal", 4)', False),
        ('("debug", 8)', False),
        ('("normal",)', False),
        ('("normal", 8, 1)', False),
        ('("debug" | "normal", _)', True),
    ],
)
def test_options_are_matched_by_place_and_number(tmp_path: Path, pattern: str, fits: bool) -> None:
    text = _LAUNCHER.replace("match args.gpus", "match (args.mode, args.gpus)").replace("case 4 | 8", f"case {pattern}")
    assert read(tmp_path, text)["tensor-model-parallel-size"].value == ("4" if fits else "1",)


def test_a_launcher_is_translated_whole(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(_LAUNCHER)
    draft = from_miles(file)
    assert (draft.values["model.checkpoint"], draft.values["learner.micro_batch_rows"]) == ("/models/m/", "???")
    assert [key for key in draft.settings if not draft.accounted(key)] == []


@pytest.mark.parametrize("text", ["def (", "args = '--hf-checkpoint m'\n"])
def test_another_python_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="computes its arguments"):
        read(tmp_path, text)


def test_a_flag_that_follows_the_result_of_a_function_is_read(tmp_path: Path) -> None:
    helpers = """
def execute(args):
    rollout, loss = U.rollout(args), U.loss()
    first = U.first(args)
    second = U.second()
    perf = "--tensor-model-parallel-size 4 "
    U.execute_train(train_args=f"--save-interval 100 {first}" f"{second}" f"{perf}", config=args)
"""
    settings = read(tmp_path, helpers)
    assert settings["tensor-model-parallel-size"].value == ("4",)
    assert settings["save-interval"].value == ("100",)
    assert {"${first[@]}", "${second[@]}"} <= settings.keys()
