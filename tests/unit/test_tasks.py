"""Tasks: problems, prompts, files, rewards, tokenizers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_trm.config.schema import TaskConfig
from moe_trm.errors import CheckpointError, ConfigError, RecordRejected
from moe_trm.quickstart.checkpoint import BOS, EOS, PAD, TinyShape, character_tokenizer, make_checkpoint
from moe_trm.tasks.arithmetic import held_out_problems
from moe_trm.tasks.build import build_task
from moe_trm.tasks.gsm8k import read_gsm8k
from moe_trm.tasks.jsonl import read_examples
from moe_trm.tasks.problems import Problem, draw
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.reward_math import MathVerify
from moe_trm.tasks.rewards import exact, guarded, score, score_answer
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(
        folder, seed=0, shape=TinyShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, experts=4, expert_ffn=8)
    )
    return folder


@pytest.fixture(scope="module")
def arithmetic(checkpoint: Path) -> Task:
    return build_task(TaskConfig(), str(checkpoint), seed=3)


@pytest.fixture(scope="module")
def math_verify() -> Iterator[MathVerify]:
    verifier = MathVerify(timeout_s=1)
    yield verifier
    verifier.close()


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
        (Problem(672, "+", 39), "2+9=11,7+3+1=11,6+0+1=7#711"),
        (Problem(999, "+", 1), "9+1=10,9+0+1=10,9+0+1=10#1000"),
        (Problem(52, "-", 7), "2-7=5b,5-0-1=4#45"),
        (Problem(7, "-", 52), "~2-7=5b,5-0-1=4#-45"),
        (Problem(5, "-", 5), "5-5=0#0"),
        (Problem(0, "+", 0), "0+0=0#0"),
    ],
)
def test_working(problem: Problem, solution: str) -> None:
    assert problem.solution() == solution
    assert problem.solution(with_working=False) == "#" + solution.partition("#")[2]


def test_arithmetic_prompts_follow_from_seed_and_step(arithmetic: Task, checkpoint: Path) -> None:
    again = build_task(TaskConfig(), str(checkpoint), seed=3)
    assert arithmetic.train_prompts(5, 8) == again.train_prompts(5, 8)
    assert arithmetic.train_prompts(5, 8) != arithmetic.train_prompts(6, 8)
    assert arithmetic.train_prompts(5, 8) != build_task(TaskConfig(), str(checkpoint), seed=4).train_prompts(5, 8)
    assert arithmetic.eval_prompts() == build_task(TaskConfig(), str(checkpoint), seed=4).eval_prompts()


def test_held_out_prompts_are_distinct_and_never_trained_on(arithmetic: Task) -> None:
    held_out = {prompt.prompt_id for prompt in arithmetic.eval_prompts()}
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
    assert score(arithmetic, prompt, record(tokens, num_prompt)) == 1.0
    assert score(arithmetic, prompt, record(tokens[:-1], num_prompt, "length")) == 0.0
    assert score(arithmetic, replace(prompt, answer="12345"), record(tokens, num_prompt)) == 0.0
    seen: list[Sequence[int]] = []

    class Recorder(type(arithmetic)):  # type: ignore[misc]
        def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
            seen.append(tuple(token_ids))
            return 0.5

    recorder = Recorder(arithmetic.tokens, seed=0, max_digits=3, eval_size=1)
    assert score(recorder, prompt, record(tokens, num_prompt)) == 0.5
    assert seen == [tuple(answer)]
    assert score_answer(arithmetic, prompt, answer, finished=True) == 1.0
    assert score_answer(arithmetic, prompt, answer, finished=False) == 0.0


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
        (ZeroDivisionError("x"), "reward_error"),
        (KeyError("x"), "reward_error"),
    ],
)
def test_a_bad_reward_rejects_the_record(value: object, reason: str) -> None:
    def reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
        if isinstance(value, BaseException):
            raise value
        return value  # type: ignore[return-value]

    with pytest.raises(RecordRejected) as caught:
        guarded(reward, Prompt("p7", (1,)), (2,))
    assert caught.value.reason == reason
    assert "p7" in str(caught.value)


def test_numbers_of_other_libraries_and_booleans_are_rewards() -> None:
    for value in (np.float32(0.5), True, 1):
        assert guarded(lambda prompt, ids, value=value: value, Prompt("p", ()), ()) == float(value)


def lines(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_jsonl_task(checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}", "answer": i} for i in range(5)]
    config = TaskConfig(
        name="jsonl",
        prompts=lines(tmp_path / "a.jsonl", *rows, "", rows[0]),
        eval_prompts=lines(tmp_path / "b.jsonl", *rows),
        eval_size=2,
        template="Q {prompt} A",
    )
    task = build_task(config, str(checkpoint), seed=0)
    assert [prompt.text for prompt in task.eval_prompts()] == ["Q say 0 A", "Q say 1 A"]
    epoch = [prompt.prompt_id for step in (1, 2, 3) for prompt in task.train_prompts(step, 2)]
    assert sorted(epoch) == [f"a.jsonl:{line}" for line in (1, 2, 3, 4, 5, 7)]
    second = [prompt.prompt_id for step in (4, 5, 6) for prompt in task.train_prompts(step, 2)]
    assert sorted(second) == sorted(epoch)
    assert second != epoch
    prompt = task.train_prompts(1, 1)[0]
    assert task.reward(prompt, task.tokens.encode(f"x # {prompt.answer}")) == 1.0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{not json", "not valid JSON"),
        ([1], "not an object"),
        ({"text": "x", "answer": "y"}, "no prompt"),
        ({"prompt": 3, "answer": "y"}, "no prompt"),
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
    try:
        prompt = task.train_prompts(1, 1)[0]
        assert prompt.text == "Question: How many?\nAnswer:"
        assert task.eval_prompts() == ()
        assert task.reward(prompt, task.tokens.encode(" 2 * 509\n#### 1018")) == 1.0
        assert task.reward(prompt, task.tokens.encode("#### 1019")) == 0.0
    finally:
        task.close()


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("#### 18.00", "18", 1.0),
        ("#### $18", "18", 1.0),
        ("so it is 36/2", "18", 1.0),
        ("#### \\frac{1}{2}", "0.5", 1.0),
        ("#### 19", "18", 0.0),
        ("", "18", 0.0),
        ("#### 1,8", "18", 0.0),
        ("#### 81", "18", 0.0),
    ],
)
def test_math_reward(math_verify: MathVerify, text: str, answer: str, value: float) -> None:
    assert math_verify(text, answer) == value


def test_math_reward_never_hangs_and_works_off_the_main_thread(math_verify: MathVerify) -> None:
    found: list[float] = []
    thread = threading.Thread(
        target=lambda: found.extend([math_verify("9**9**9**9", "18"), math_verify("#### 18", "18")])
    )
    thread.start()
    thread.join(60)
    assert found == [0.0, 1.0]


def test_math_reward_without_a_decision_rejects_and_recovers() -> None:
    verifier = MathVerify(timeout_s=30, patience_s=0.5)
    try:
        assert verifier("#### 18", "18") == 1.0
        with pytest.raises(RecordRejected) as caught:
            verifier("9**9**9**9", "18")
        assert caught.value.reason == "reward_timeout"
        assert verifier("#### 18", "18") == 1.0
        with pytest.raises(RecordRejected, match="not mathematical"):
            verifier("3", "hello world")
    finally:
        verifier.close()


def test_gsm8k_gold_answers_are_worth_1_and_changed_ones_0(math_verify: MathVerify) -> None:
    if not GSM8K.is_file():
        pytest.skip("GSM8K's test.jsonl is not beside this checkout (../shared/data/gsm8k)")
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    examples = read_gsm8k(GSM8K)
    assert len(examples) == 1319
    for row, example in zip(rows, examples, strict=True):
        working, mark, number = row["answer"].rpartition("#### ")
        changed = str(int(number.replace(",", "")) + 1)
        assert math_verify(row["answer"], example.answer) == 1.0, row
        assert math_verify(working + mark + changed, example.answer) == 0.0, row


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


def test_chat_needs_a_template(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        Tokens(checkpoint).encode_chat("hello")


def test_draw_covers_all_lengths() -> None:
    import random

    drawn = [draw(random.Random(0), 3, held_out=False) for _ in range(1)]
    rng = random.Random(0)
    drawn = [draw(rng, 3, held_out=False) for _ in range(300)]
    assert {len(str(problem.a)) for problem in drawn} == {1, 2, 3}
    assert {problem.op for problem in drawn} == {"+", "-"}
    assert not any(problem.held_out for problem in drawn)
