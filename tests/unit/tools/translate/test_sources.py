"""The words read of a script are those it passes; everything else is a to-do that names its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_trm.errors import ConfigError
from moe_trm.tools.translate import from_miles, from_slime, from_verl
from moe_trm.tools.translate.foreign_setting import ForeignSetting
from moe_trm.tools.translate.sources import flag_settings, hydra_settings


def hydra(tmp_path: Path, script: str, *words: str) -> dict[str, ForeignSetting]:
    file = tmp_path / "run.sh"
    file.write_text(script)
    return hydra_settings(file, words)


def flags(tmp_path: Path, script: str, *words: str) -> dict[str, ForeignSetting]:
    file = tmp_path / "run.sh"
    file.write_text(script)
    return flag_settings(file, words)


@pytest.mark.parametrize(
    "value", ["$((1024*M))", "${M:-$(nproc)}", "${M:?set it}", "$M", "`nproc`", "$(nproc)", '"$M"', "{1,2}"]
)
def test_a_computed_value_is_a_to_do_of_its_line(tmp_path: Path, value: str) -> None:
    script = f"N=4\npython3 -m verl.trainer.main_ppo \\\n    data.seed=7 \\\n    actor_rollout_ref.rollout.n={value}\n"
    read = hydra(tmp_path, script)
    assert read["data.seed"].value == 7
    setting = read["actor_rollout_ref.rollout.n"]
    assert (setting.value, setting.unread, setting.place) == (None, "the script computes it", "line 4")


def test_what_a_computed_value_decides_is_open_and_no_default(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_batch_size=$((1024*M)) \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=64\n"
    )
    draft = from_verl(file)
    assert draft.values["rollout.prompts_per_step"] == draft.values["learner.minibatches"] == "???"
    assert draft.to_do["data.train_batch_size"] == "the script computes it"
    assert "data.train_batch_size = $((1024*M)) (line 1)" in draft.yaml("x")


def test_a_text_over_several_lines_keeps_its_quotes_out_of_the_values(tmp_path: Path) -> None:
    script = (
        'FIX="algorithm.rollout_correction.rollout_is=token \\\n'
        '  algorithm.rollout_correction.bypass_mode=False"\n'
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m $FIX\n"
    )
    setting = hydra(tmp_path, script)["algorithm.rollout_correction.bypass_mode"]
    assert (setting.value, setting.unread, setting.place) == (False, "", "line 2")


@pytest.mark.parametrize(
    ("script", "doubt"),
    [
        ("if [ $X ]; then\n  A=(a.b=1)\nfi\npython3 -m verl.main_ppo c.d=2 ${A[@]}\n", "the script decides"),
        ("case $X in\n  1) A=(a.b=1) ;;\nesac\npython3 -m verl.main_ppo c.d=2 ${A[@]}\n", "the script decides"),
        ("[ -f x ] && A=(a.b=1)\npython3 -m verl.main_ppo c.d=2 ${A[@]}\n", "the script decides"),
        ("go() {\n  A=(a.b=1)\n}\npython3 -m verl.main_ppo c.d=2 ${A[@]}\n", "the script decides"),
        ("function go {\n  A=(a.b=1)\n}\npython3 -m verl.main_ppo c.d=2 ${A[@]}\n", "the script decides"),
        ("A=(a.b=1)\nif [ $X ]; then A2=($A); fi\npython3 -m verl.main_ppo c.d=2 $A2\n", "the script decides"),
        ("A=(a.b=1)\npython3 -m verl.main_ppo c.d=2\n", "does not pass it on"),
        ("A=(a.b=1)\necho ${A[@]}\npython3 -m verl.main_ppo c.d=2\n", "does not pass it on"),
        ('A="a.b=1"\nA="e.f=2"\npython3 -m verl.main_ppo c.d=2 $A\n', "more than once"),
        ("python3 -m verl.main_ppo c.d=2\n  a.b=1\n", "does not stand in the command"),
        ("cat <<END\na.b=1\nEND\npython3 -m verl.main_ppo c.d=2\n", "here-document"),
        ("python3 -m verl.main_ppo a.b=1 c.d=2\npython3 -m verl.main_ppo a.b=2 c.d=2\n", "set twice"),
    ],
)
def test_a_literal_that_may_not_count_is_a_to_do(tmp_path: Path, script: str, doubt: str) -> None:
    read = hydra(tmp_path, script)
    assert doubt in read["a.b"].unread
    assert (read["c.d"].value, read["c.d"].unread) == (2, "")


def test_arrays_comments_and_quotes_are_read_as_the_shell_does(tmp_path: Path) -> None:
    script = (
        "A=(  # don't stop here\n"
        "  a.b='1e-3'  # not c.d=3\n"
        "  \"trainer.logger=['console','wandb']\"\n"
        "  #e.f=5\n"
        ")\n"
        'cd x && python3 -m verl.main_ppo "${A[@]}" g.h="two words" 2>&1 | tee log\n'
    )
    read = {key: setting.value for key, setting in hydra(tmp_path, script).items()}
    assert read == {"a.b": 1e-3, "trainer.logger": ["console", "wandb"], "g.h": "two words"}


def test_a_backslash_outside_of_quotes_keeps_one_character_or_joins_lines(tmp_path: Path) -> None:
    read = flags(tmp_path, "python3 train.py --name my\\ run --lr 1e\\\n-6\n")
    assert (read["name"].value, read["lr"].value) == (("my run",), ("1e-6",))


def test_settings_that_come_from_elsewhere_are_named(tmp_path: Path) -> None:
    read = hydra(tmp_path, "source other.sh\npython3 -m verl.main_ppo a.b=1 $MORE ${LIST[@]} $@\n")
    assert {key for key, setting in read.items() if setting.unread} == {"$MORE", "${LIST[@]}", "$@"}
    assert "give them after the file" in read["$@"].unread
    assert read["$MORE"].place == "line 2"


def test_words_given_after_the_file_win(tmp_path: Path) -> None:
    assert hydra(tmp_path, "python3 -m verl.main_ppo a.b=$X\n", "a.b=3")["a.b"].value == 3


def test_arguments_of_a_running_process_are_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "cmdline"
    file.write_bytes(b"python3\0train_async.py\0--rollout-batch-size\x0032\0--rm-type\0a b $c\0")
    read = {key: setting.value for key, setting in flag_settings(file).items()}
    assert read == {"train.py": ("train_async.py",), "rollout-batch-size": ("32",), "rm-type": ("a b $c",)}


def test_flags_of_other_programs_are_not_read(tmp_path: Path) -> None:
    script = (
        "ray start --head --num-gpus 8\n"
        "A=(\n  --lr 1e-6 # --lr 2e-6\n  --eval-prompt-data aime $X/aime.jsonl\n)\n"
        "ray job submit --address=x -- python3 train.py --colocate ${A[@]} --seed=3\n"
    )
    read = flags(tmp_path, script)
    assert set(read) == {"train.py", "colocate", "lr", "eval-prompt-data", "seed"}
    assert (read["lr"].value, read["colocate"].value, read["seed"].value) == (("1e-6",), (), ("3",))
    assert read["eval-prompt-data"].unread == "the script computes it"


@pytest.mark.parametrize(("opened", "mark"), [("'b", "'"), ("$((1 +", "("), ("${B:-", "{")])
def test_a_script_with_a_mark_that_never_ends(tmp_path: Path, opened: str, mark: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)line 2.*got: +{re.escape(mark)} that never ends"):
        hydra(tmp_path, f"echo a\necho {opened}\npython3 -m verl.main_ppo a.b=1\n")


def test_a_file_of_another_framework_is_refused(tmp_path: Path) -> None:
    script, yaml = tmp_path / "run.sh", tmp_path / "config.yaml"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8\n")
    yaml.write_text("actor_rollout_ref: {rollout: {n: 8}}\n")
    for file in (script, yaml):
        with pytest.raises(ConfigError, match="from-verl"):
            from_slime(file)
        with pytest.raises(ConfigError, match="from-verl"):
            from_miles(file)
    script.write_text("python3 train.py --hf-checkpoint m --rollout-batch-size 4\n")
    with pytest.raises(ConfigError, match="from-slime"):
        from_verl(script)


@pytest.mark.parametrize(
    "script",
    [
        'params=(actor_rollout_ref.rollout.n=8)\nexec bash "$HERE/run_async.sh" "${params[@]}"\n',
        "bash run_verl.sh actor_rollout_ref.rollout.n=8 $@\n",
        "export ARGS='--rollout-batch-size 4'\nsource scripts/train.sh\n",
    ],
)
def test_a_script_that_calls_another_one_is_refused(tmp_path: Path, script: str) -> None:
    """What it does not say may stand in the other one: no default may take its place."""
    file = tmp_path / "run.sh"
    file.write_text(script)
    for translate in (from_verl, from_slime, from_miles):
        with pytest.raises(ConfigError, match="another script starts the training") as caught:
            translate(file)
        assert str(caught.value.got).endswith(".sh")
    script += "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8\n"
    assert hydra(tmp_path, script)["actor_rollout_ref.rollout.n"].key


def test_a_python_launcher_is_refused(tmp_path: Path) -> None:
    launcher = tmp_path / "run.py"
    launcher.write_text("args = '--hf-checkpoint m'\n")
    with pytest.raises(ConfigError, match="computes its arguments"):
        from_slime(launcher)


def test_an_unreadable_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="launch script cannot be read"):
        from_slime(tmp_path / "none.sh")


def test_composed_yaml_is_read_with_its_interpolations_left_open(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("actor_rollout_ref:\n  rollout: {n: 8, response: '${data.x}'}\n  model:\n    path: ???\n")
    read = hydra_settings(file)
    assert read["actor_rollout_ref.rollout.n"].value == 8
    assert "--resolve" in read["actor_rollout_ref.rollout.response"].unread
    assert read["actor_rollout_ref.model.path"].unread == "it has no value yet"


def test_variables_that_are_set_once_and_arithmetic_are_read(tmp_path: Path) -> None:
    script = (
        'PP=6\nexport TP="4"; DIR=/data  # where it is\nALL=$((TP * PP))\n'
        'python3 train.py --pp $PP --tp=${TP} --all $ALL --more "$((ALL*2+8/3))" --data "${DIR}/x.jsonl" --n $((8*2))\n'
    )
    read = flags(tmp_path, script)
    assert {setting.unread for setting in read.values()} == {""}
    assert {key: setting.value for key, setting in read.items() if key != "train.py"} == {
        "pp": ("6",),
        "tp": ("4",),
        "all": ("24",),
        "more": ("50",),
        "data": ("/data/x.jsonl",),
        "n": ("16",),
    }


@pytest.mark.parametrize(
    ("assignment", "value", "outside"),
    [
        ("N=${N:-8}", "$N", "8, unless N"),
        ('export N="${N:-8}"', "${N}", "8, unless N"),
        ("N=${N:-${M:-8}}", "$N", "8, unless M, N"),
        ("M=8\nN=$((M * ${K:-2}))", "$N", "16, unless K"),
        (': "${N:=8}"  # here', "$N", "8, unless N"),
        ("N=8", "${N:-3}", "8"),
        ("N=", "${N:-3}", "???"),
        ("", "${N:-3}", "3, unless N"),
        ("", "${N-'3'}", "3, unless N"),
        ("source other.sh", "${N:-3}", "???"),
        ("for N in 1 2; do echo; done", "${N:-3}", "???"),
        ("if [ $X ]; then\n  N=4\nfi", "${N:-3}", "???"),
        ("", "${N:-~/data}", "???"),
        ("", "${N:+3}", "???"),
        ("N=-1", "$N", "-1"),
    ],
)
def test_a_default_is_what_bash_makes_of_it(tmp_path: Path, assignment: str, value: str, outside: str) -> None:
    setting = flags(tmp_path, f"{assignment}\npython3 train.py --lr 1e-6 --n {value}\n")["n"]
    expected, _, names = outside.partition(", unless ")
    assert ("???" if setting.unread else setting.value[0]) == expected
    assert (f"unless {names} is set outside" if names else "unless") in setting.place or not names


@pytest.mark.parametrize(
    "before",
    [
        "PP=6\nPP=8",
        "if [ $X ]; then\n  PP=6\nfi",
        "[ $X ] && PP=6",
        "PP=6\nsource other.sh",
        "PP=6\nread PP",
        "PP=6\nfor PP in 2 4; do echo; done",
        "PP=6\n((PP += 1))",
        "PP=6\nPP+=2",
        "PP=6 true",
        "PP=${1:-6}",
        "PP='$Q'",
    ],
)
def test_variables_that_may_have_another_value_are_to_dos(tmp_path: Path, before: str) -> None:
    read = flags(tmp_path, f"{before}\npython3 train.py --lr 1e-6 --pp $PP\n")
    assert read["pp"].unread == "the script computes it"
    assert read["lr"].value == ("1e-6",)


def test_folders_and_empty_lists_of_the_script_are_no_to_dos(tmp_path: Path) -> None:
    script = (
        'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nWANDB_ARGS=()\nEXTRA=""\nMORE=$(cat args)\n'
        'python3 train.py --lr 1 --chat "${SCRIPT_DIR}/chat" ${WANDB_ARGS[@]} ${EXTRA[@]} ${MORE[@]}\n'
    )
    assert {key: setting.unread for key, setting in flags(tmp_path, script).items()} == {
        "train.py": "",
        "lr": "",
        "chat": "the script computes it",
        "$(cat args)": "its settings are not in this file",
    }
    read = hydra(tmp_path, script.replace("train.py --lr 1 --chat ", "-m verl.main_ppo a.b=1 data.x="))
    assert {key for key, setting in read.items() if setting.unread} == {"data.x", "$(cat args)"}
