"""Template, reward and rollout function meet a real prompt before any server is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.start.dry_run import try_task
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, ConfigError, MoeTrmError

AGENT = """
import aiohttp

async def run(base_url, api_key, prompt):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        body = {"model": "policy", "prompt": prompt.messages[0]["content"]}
        async with client.post(f"{base_url}/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        text = answer["choices"][0]["text"]
"""
ROLLOUT = "async def rollout(session):\n    turn = await session.sample()\n    "


def config(checkpoint: Path, folder: Path, source: str, **task: Any) -> Config:
    """A run on one prompt with the functions `reward`, `rollout` and `run` of `source`, those of them that it has."""
    own, prompts = folder / "own.py", folder / "prompts.jsonl"
    own.write_text(source)
    prompts.write_text(json.dumps({"prompt": "1+2=", "answer": "3", "note": 7}) + "\n")
    reward = {"reward": f"{own}:reward"} if "def reward" in source else {}
    rollout = {"function": f"{own}:rollout"} if "def rollout" in source else {}
    rollout |= {"agent": f"{own}:run"} if "def run(" in source else {}
    return Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            "task": {"name": "jsonl", "prompts": str(prompts), "reward_timeout_s": 20} | reward | task,
            "rollout": rollout,
        }
    )


@pytest.mark.parametrize(
    "source",
    [
        "",
        "def reward(sample): return float(sample.completion == sample.answer and sample.extra['note'] == 7) / 1",
        "async def reward(samples: list): return [{'a': 1.0} for _ in samples]",
        ROLLOUT + "return float(turn.text == '3' and turn.finish_reason == 'stop') / 1",
        ROLLOUT + "await session.append('1')\n    await session.sample(max_new_tokens=1)",
        "def reward(sample): return 1 / sample.num_turns\n" + ROLLOUT + "return None",
        AGENT + "        return float(text == '3' and answer['usage']['completion_tokens'] == 2) / 1",
        "def reward(sample): return 1 / (sample.completion == '3')\n" + AGENT + "        return None",
    ],
)
def test_what_works_is_let_through(checkpoint: Path, tmp_path: Path, source: str) -> None:
    try_task(config(checkpoint, tmp_path, source))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def other(): ...\ndef reward(sample):\n    print(1)",
         ["your reward function returned NoneType", "task.reward", "own.py:2", "prompts.jsonl:1"]),
        ("def reward(sample): return {'a': 1.0, 'b': None}", ["returned NoneType", "own.py:1"]),
        ("def reward(sample):\n    return sample.extra['nothing']",
         ["the reward function failed", "KeyError: 'nothing'", "own.py:2"]),
        ("def reward(sample):\n    import json\n    return json.loads('x')", ["JSONDecodeError", "own.py:3"]),
        ("def reward(a, b): ...", ["one argument"]),
        (ROLLOUT + "return 'good'", ["your rollout function returned str", "rollout.function", "own.py:1"]),
        (ROLLOUT + "return turn.nothing", ["the rollout function failed", "AttributeError", "own.py:3"]),
        ("async def rollout(session):\n    return None", ["rollout.function"]),
        ("def rollout(session): ...", ["not an async function"]),
        ("def reward(sample): ...\n" + ROLLOUT + "return None", ["your reward function returned", "task.reward"]),
    ],
)  # fmt: skip
def test_what_fails_is_told_with_its_file_and_line(
    checkpoint: Path, tmp_path: Path, source: str, says: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        try_task(config(checkpoint, tmp_path, source))
    for words in says:
        assert words in str(caught.value)
    assert "expected: None" not in str(caught.value)


def test_a_function_that_fails_on_one_prompt_is_told_and_the_run_goes_on(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a sample is rejected and counted. A run need not be refused for it."""
    source = "calls = []\ndef reward(sample):\n    calls.append(1)\n    return [1.0][2 - len(calls)]"
    try_task(config(checkpoint, tmp_path, source, reward_processes=1))
    assert "task.reward: the reward function failed" in caplog.text
    assert "IndexError" in caplog.text


def test_a_reward_that_takes_too_long_is_told(checkpoint: Path, tmp_path: Path) -> None:
    source = "import time\ndef reward(sample): time.sleep(60)"
    with pytest.raises(ConfigError, match=r"nothing within 0\.1 s"):
        try_task(config(checkpoint, tmp_path, source, reward_timeout_s=0.1))


def test_messages_without_a_chat_template_are_told(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        try_task(config(checkpoint, tmp_path, "", chat=True))


def test_a_bad_row_is_told_with_its_line(checkpoint: Path, tmp_path: Path) -> None:
    asked = config(checkpoint, tmp_path, "")
    assert asked.task.prompts is not None
    with Path(asked.task.prompts).open("a") as file:
        file.write('{"prompt": "1"}\n')
    with pytest.raises(MoeTrmError, match="line 2"):
        try_task(asked)


def test_prompts_that_leave_no_room_are_counted_and_named(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model has 512 positions, and an answer of 12 tokens needs room: 500 tokens fit, 501 do not.

    The tokenizer writes one token for a digit, and one before them.
    """
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"

    def write(path: Path, *lengths: int) -> str:
        path.write_text("".join(json.dumps({"prompt": "1" * each, "answer": "3"}) + "\n" for each in lengths))
        return str(path)

    sources = {"prompts": write(rows, 5, 500, 499, 699), "eval_prompts": write(held_out, 4, 511)}
    asked = config(checkpoint, tmp_path, "", **sources)
    limits = {"max_new_tokens": 12}
    asked = asked.model_copy(update={"rollout": asked.rollout.model_copy(update=limits)})
    try_task(asked)
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 training prompts leave no room for 12 new tokens in 512, and will be rejected: "
        "rows.jsonl:2 (501 tokens), rows.jsonl:4 (700 tokens)",
        "1 of 2 held-out prompts leave no room for 12 new tokens in 512, and will be rejected: held_out.jsonl:2 "
        "(512 tokens)",
    ]
    caplog.clear()
    turns = config(checkpoint, tmp_path, ROLLOUT + "return 1.0", prompts=write(rows, 5, 298, 299))
    turns = turns.model_copy(update={"rollout": turns.rollout.model_copy(update={"max_tokens": 300})})
    try_task(turns)
    assert "1 of 3 training prompts leave no room for 1 new tokens in 300" in caplog.text
    assert "rows.jsonl:3 (300 tokens)" in caplog.text


@pytest.mark.parametrize(
    ("source", "weights", "unknown"),
    [
        ("def reward(sample): return {'right': 1.0, 'short': 0.5}", {"right": 5.0}, ""),
        ("def reward(sample): return {'right': 1.0}", {"rigth": 5.0}, "rigth"),
        ("def reward(sample): return 1.0", {"right": 5.0}, "right"),
    ],
)
def test_weights_name_rewards_that_are_returned(
    checkpoint: Path, tmp_path: Path, source: str, weights: dict[str, float], unknown: str
) -> None:
    run = config(checkpoint, tmp_path, source, reward_weights=weights)
    if not unknown:
        try_task(run)
        return
    with pytest.raises(ConfigError, match="have a weight and are not returned") as refused:
        try_task(run)
    assert (refused.value.where, refused.value.got) == ("task.reward_weights", unknown)


def test_characters_without_a_token_are_named(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try_task(config(checkpoint, tmp_path, ""))
    assert not caplog.records
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1→2é=", "answer": "π"}\n{"prompt": "1+é=", "answer": "3"}\n')
    try_task(config(checkpoint, tmp_path, "", prompts=str(tmp_path / "rows.jsonl")))
    assert [record.getMessage() for record in caplog.records] == [
        "the tokenizer has no token for 3 of the characters in prompts and answers, so the policy can neither read nor "
        "write them: 'é' 'π' '→'"
    ]
