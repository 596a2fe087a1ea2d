"""Tasks: problems, prompts, files, rewards, tokenizers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_trm.config.schema import TaskConfig
from moe_trm.errors import CheckpointError, ConfigError, RecordRejected
from moe_trm.models.tiny.checkpoint import BOS, EOS, PAD, character_tokenizer
from moe_trm.tasks.arithmetic import held_out_problems
from moe_trm.tasks.build import build_task
from moe_trm.tasks.examples import read_examples
from moe_trm.tasks.gsm8k import read_gsm8k
from moe_trm.tasks.math_reward import math_verify
from moe_trm.tasks.problems import ArithmeticProblem, draw
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.rewards import exact, read_reward, reward_input, score
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


async def score_answer(task: Task, prompt: Prompt, token_ids: Sequence[int], *, finished: bool) -> float:
    """The reward of an answer without its stop token."""
    answer, nothing = np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32)
    tokens = np.concatenate([np.array(prompt.token_ids, np.int32), answer])
    record = RolloutRecord(
        sample_id=-1,
        group_id=-1,
        prompt_id=prompt.prompt_id,
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt.token_ids),
        turn_ids=np.zeros(len(tokens), np.int16),
        rollout_logprobs=nothing,
        full_logprobs=nothing,
        versions=nothing.astype(np.int32),
        routes=None,
        sampling_mask=None,
        finish_reason="stop" if finished else "length",
    )
    return (await score(task, prompt, record)).total


@pytest.fixture(scope="module")
def arithmetic(checkpoint: Path) -> Task:
    return build_task(TaskConfig(), str(checkpoint), seed=3)


def record(tokens: Sequence[int], num_prompt: int, finish_reason: str = "stop") -> RolloutRecord:
    sampled = np.arange(len(tokens)) >= num_prompt
    values = np.zeros(int(sampled.sum()), np.float32)
    versions = np.zeros(int(sampled.sum()), np.int32)
    turns = np.zeros(len(tokens), np.int16)
    return RolloutRecord(
        0, 0, "p", np.array(tokens, np.int32), sampled, turns, values, values, versions, None, None, finish_reason
    )


@pytest.mark.parametrize(
    ("problem", "solution"),
    [
        (ArithmeticProblem(672, "+", 39), "2+9=11,7+3+1=11,6+0+1=7#711"),
        (ArithmeticProblem(999, "+", 1), "9+1=10,9+0+1=10,9+0+1=10#1000"),
        (ArithmeticProblem(52, "-", 7), "2-7=5b,5-0-1=4#45"),
        (ArithmeticProblem(7, "-", 52), "~2-7=5b,5-0-1=4#-45"),
        (ArithmeticProblem(5, "-", 5), "5-5=0#0"),
        (ArithmeticProblem(0, "+", 0), "0+0=0#0"),
    ],
)
def test_working(problem: ArithmeticProblem, solution: str) -> None:
    assert problem.solution() == solution
    assert problem.solution(with_working=False) == "#" + solution.partition("#")[2]


def test_arithmetic_prompts_follow_from_seed_and_step(arithmetic: Task, checkpoint: Path) -> None:
    again = build_task(TaskConfig(), str(checkpoint), seed=3)
    assert arithmetic.train_prompts(5, 8) == again.train_prompts(5, 8)
    assert arithmetic.train_prompts(5, 8) != arithmetic.train_prompts(6, 8)
    assert arithmetic.train_prompts(5, 8) != build_task(TaskConfig(), str(checkpoint), seed=4).train_prompts(5, 8)
    assert arithmetic.eval_sets() == build_task(TaskConfig(), str(checkpoint), seed=4).eval_sets()


def test_held_out_prompts_are_distinct_and_never_trained_on(arithmetic: Task) -> None:
    held_out = {prompt.prompt_id for prompt in arithmetic.eval_sets()[""]}
    assert len(held_out) == 256
    trained = {prompt.prompt_id for step in range(1, 60) for prompt in arithmetic.train_prompts(step, 16)}
    assert not held_out & trained
    with pytest.raises(ConfigError, match="too few held-out"):
        held_out_problems(1, 256)


def test_prompt_ids_are_the_tokenizers(arithmetic: Task) -> None:
    prompt = arithmetic.train_prompts(1, 1)[0]
    assert prompt.token_ids[0] == BOS
    assert arithmetic.tokens.decode(prompt.token_ids) == prompt.text
    assert prompt.text == f"{prompt.prompt_id}="
    assert arithmetic.tokens.stop_token_ids == (EOS,)
    assert arithmetic.tokens.vocab_size == 128


def test_ids_become_the_text_that_transformers_writes(arithmetic: Task) -> None:
    tokens = arithmetic.tokens
    for ids in ([], [BOS, 4, 98, EOS], [EOS, 17, EOS, 20], [*range(4, 100)]):
        expected = tokens._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokens.decode(ids) == tokens.decode(tuple(ids)) == expected


def test_character_ids() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer.encode(" ~\n") == [BOS, 4, 4 + 94, 4 + 95]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (PAD, EOS, 3)
    text = "1+1=2, a  b!\n"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_score_reads_the_sampled_tokens_without_the_stop_token(arithmetic: Task) -> None:
    prompt = arithmetic.train_prompts(1, 1)[0]
    answer = arithmetic.tokens.encode(f"junk#{prompt.answer}")[1:]
    tokens = [*prompt.token_ids, *answer, EOS]
    num_prompt = len(prompt.token_ids)

    def scored(prompt: Prompt, record: RolloutRecord) -> float:
        return asyncio.run(score(arithmetic, prompt, record)).total

    assert scored(prompt, record(tokens, num_prompt)) == 1.0
    assert scored(prompt, record(tokens[:-1], num_prompt, "length")) == 0.0
    assert scored(replace(prompt, answer="12345"), record(tokens, num_prompt)) == 0.0
    seen = reward_input(arithmetic, replace(prompt, extra={"level": 3}), record(tokens, num_prompt))
    assert seen.completion_ids == tuple(answer)
    assert (seen.completion, seen.prompt, seen.answer) == (f"junk#{prompt.answer}", prompt.text, prompt.answer)
    assert (seen.transcript, seen.num_turns, seen.finished, seen.extra) == (seen.completion, 1, True, {"level": 3})
    assert asyncio.run(score_answer(arithmetic, prompt, answer, finished=True)) == 1.0
    assert asyncio.run(score_answer(arithmetic, prompt, answer, finished=False)) == 0.0


def test_the_last_answer_of_several_is_scored_and_the_transcript_has_them_all(arithmetic: Task) -> None:
    prompt = arithmetic.train_prompts(1, 1)[0]
    first, tool, last = (arithmetic.tokens.encode_plain(text) for text in ("1+1=", "2", f"#{prompt.answer}"))
    several = record([*prompt.token_ids, *first, *tool, *last, EOS], len(prompt.token_ids))
    turn_ids, sampled = np.zeros(several.num_tokens, np.int16), several.sampled.copy()
    tool_start = len(prompt.token_ids) + len(first)
    turn_ids[tool_start:], sampled[tool_start : tool_start + len(tool)] = 1, False
    seen = reward_input(arithmetic, prompt, replace(several, turn_ids=turn_ids, sampled=sampled))
    assert seen.completion == f"#{prompt.answer}"
    assert seen.transcript == f"1+1=2#{prompt.answer}"
    assert seen.num_turns == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("#711", 1.0), ("7#1#711", 1.0), ("711", 0.0), ("#7110", 0.0), ("#711#", 0.0), ("", 0.0), ("# 711 ", 1.0)],
)
def test_exact(text: str, value: float) -> None:
    assert exact(text, "711") == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "reward_nan"),
        (float("inf"), "reward_nan"),
        ("1", "reward_type"),
        (None, "reward_type"),
        ([1.0], "reward_type"),
        ({}, "reward_type"),
        ({"a": "x"}, "reward_type"),
        ({"a": 1.0, "b": float("nan")}, "reward_nan"),
    ],
)
def test_what_is_no_number_rejects_the_sample(value: object, reason: str) -> None:
    with pytest.raises(RecordRejected) as caught:
        read_reward(value, {}, "prompt p7")
    assert caught.value.reason == reason
    assert "p7" in str(caught.value)


def test_a_reward_function_that_forgets_to_return_is_told_so() -> None:
    with pytest.raises(RecordRejected) as caught:
        read_reward(None, {}, "prompt p7")
    assert "your reward function returned NoneType" in str(caught.value)
    assert "return a number" in caught.value.fix


def test_numbers_of_other_libraries_and_booleans_are_rewards() -> None:
    for value in (np.float32(0.5), True, 1):
        assert read_reward(value, {}, "").total == float(value)


def test_named_rewards_are_summed_by_weight() -> None:
    reward = read_reward({"right": 1, "short": 0.5}, {"short": -2.0, "unused": 9.0}, "")
    assert reward.total == 0.0
    assert reward.parts == {"right": 1.0, "short": 0.5}


def lines(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_jsonl_task(checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}", "answer": i} for i in range(5)]
    config = TaskConfig(
        name="jsonl",
        prompts=lines(tmp_path / "a.jsonl", *rows, "", rows[0]),
        eval_prompts=lines(tmp_path / "b.jsonl", *rows),
        eval_sets={"other": lines(tmp_path / "c.jsonl", *rows[3:])},
        eval_size=2,
        template="Q {prompt} A",
    )
    task = build_task(config, str(checkpoint), seed=0)
    texts = {name: [prompt.text for prompt in prompts] for name, prompts in task.eval_sets().items()}
    assert texts == {"": ["Q say 0 A", "Q say 1 A"], "other": ["Q say 3 A", "Q say 4 A"]}
    epoch = [prompt.prompt_id for step in (1, 2, 3) for prompt in task.train_prompts(step, 2)]
    assert sorted(epoch) == [f"a.jsonl:{line}" for line in (1, 2, 3, 4, 5, 7)]
    second = [prompt.prompt_id for step in (4, 5, 6) for prompt in task.train_prompts(step, 2)]
    assert sorted(second) == sorted(epoch)
    assert second != epoch
    prompt = task.train_prompts(1, 1)[0]
    assert asyncio.run(score_answer(task, prompt, task.tokens.encode(f"x # {prompt.answer}"), finished=True)) == 1.0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{not json", "not valid JSON"),
        ([1], "not an object"),
        ({"text": "x", "answer": "y"}, "no prompt"),
        ({"prompt": 3, "answer": "y"}, "no prompt"),
        ({"prompt": "", "answer": "y"}, "no prompt"),
        ({"prompt": [], "answer": "y"}, "no prompt"),
        ({"prompt": ["x"], "answer": "y"}, "no prompt"),
        ({"prompt": [{"role": "user"}], "answer": "y"}, "no prompt"),
        ({"prompt": "x"}, "no answer"),
        ({"prompt": "x", "answer": ["y"]}, "no answer"),
        ({"question": "x", "answer": True}, "no answer"),
    ],
)
def test_a_bad_line_is_told_by_its_number(tmp_path: Path, row: object, words: str) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "x", "answer": "y"}, "", row)
    with pytest.raises(ConfigError, match=f"{words}.*line 3"):
        read_examples(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        read_examples(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="empty"):
        read_examples(lines(tmp_path / "p.jsonl", ""))
    with pytest.raises(ConfigError, match="no final answer"):
        read_gsm8k(lines(tmp_path / "q.jsonl", {"question": "x", "answer": "18"}))


def test_gsm8k_task(checkpoint: Path, tmp_path: Path) -> None:
    config = TaskConfig(
        name="gsm8k",
        prompts=lines(tmp_path / "g.jsonl", {"question": "How many?", "answer": "9 * 2 = <<9*2=18>>18\n#### 1,018"}),
    )
    task = build_task(config, str(checkpoint), seed=0)

    async def work() -> list[float]:
        try:
            prompt = task.train_prompts(1, 1)[0]
            assert prompt.text == "Question: How many?\nAnswer:"
            assert task.eval_sets() == {}
            answers = (" 2 * 509\n#### 1018", "#### 1019")
            return [await score_answer(task, prompt, task.tokens.encode(text), finished=True) for text in answers]
        finally:
            await task.close()

    assert asyncio.run(work()) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("#### 18.00", "18", True),
        ("#### $18", "18", True),
        ("so it is 36/2", "18", True),
        ("#### \\frac{1}{2}", "0.5", True),
        ("#### 19", "18", False),
        ("", "18", False),
        ("#### 1,8", "18", False),
        ("#### 81", "18", False),
        ("9**9**9**9", "18", False),
    ],
)
def test_math_reward(text: str, answer: str, value: bool) -> None:
    assert math_verify(sample(text, answer)) == float(value)


def test_math_reward_of_an_unfinished_answer_and_of_an_impossible_question() -> None:
    assert math_verify(replace(sample("#### 18", "18"), finish_reason="length")) == 0.0
    with pytest.raises(ValueError, match="not mathematical"):
        math_verify(sample("3", "hello world"))


def test_a_math_reward_leaves_the_log_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    math_verify(sample("#### (((", "18"))
    with pytest.raises(ValueError, match="not mathematical"):
        math_verify(sample("3", "hello world"))
    assert not caplog.records
    logging.getLogger(__name__).warning("heard")
    assert caplog.messages == ["heard"]


def sample(text: str, answer: str) -> RewardInput:
    return RewardInput("p", "", answer, text, (), text, 1, "stop")


def test_gsm8k_gold_answers_are_worth_1_and_changed_ones_0() -> None:
    if not GSM8K.is_file():
        pytest.skip("GSM8K's test.jsonl is not beside this checkout (../shared/data/gsm8k)")
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    examples = read_gsm8k(GSM8K)
    assert len(examples) == 1319
    for row, example in zip(rows, examples, strict=True):
        working, mark, number = row["answer"].rpartition("#### ")
        changed = str(int(number.replace(",", "")) + 1)
        assert math_verify(sample(row["answer"], example.answer)) == 1.0, row
        assert math_verify(sample(working + mark + changed, example.answer)) == 0.0, row


def test_checkpoints_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not found"):
        Tokens(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no config"):
        Tokens(tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokens(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    assert Tokens(tmp_path).vocab_size == 128
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 90}))
    with pytest.raises(CheckpointError, match="no embedding for") as caught:
        Tokens(tmp_path)
    assert caught.value.got == "id 99 for '\\n'"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Tokens(tmp_path)


def test_draw_covers_all_lengths() -> None:
    import random

    drawn = [draw(random.Random(0), 3, held_out=False) for _ in range(1)]
    rng = random.Random(0)
    drawn = [draw(rng, 3, held_out=False) for _ in range(300)]
    assert {len(str(problem.a)) for problem in drawn} == {1, 2, 3}
    assert {problem.op for problem in drawn} == {"+", "-"}
    assert not any(problem.held_out for problem in drawn)
