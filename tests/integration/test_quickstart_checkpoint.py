"""Tiny checkpoints as other programs see them, and the warm-up on a model that is smaller still."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moe_trm.models.tiny.checkpoint import EOS, make_checkpoint
from moe_trm.tasks.problems import ArithmeticProblem
from moe_trm.tasks.tokens import Tokens
from moe_trm.tools.quickstart import gsm8k
from moe_trm.tools.quickstart.warmup import Warmup, WarmupError, WarmupRecipe, main, warm_up


def test_checkpoint_is_deterministic_and_has_one_tensor_per_expert(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    make_checkpoint(tmp_path / "a", seed=1)
    make_checkpoint(tmp_path / "b", seed=1)
    make_checkpoint(tmp_path / "c", seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("model.layers.3.mlp.experts.15.down_proj.weight").shape == (128, 64)
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(4)
        for expert in range(16)
        for part in ("gate", "up", "down")
    }
    assert {name for name in names if ".experts." in name} == experts
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    expected = {
        "model_type": "qwen3_moe",
        "vocab_size": 128,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "norm_topk_prob": True,
    }
    assert {key: config[key] for key in expected} == expected
    assert config.get("num_experts", config.get("num_local_experts")) == 16  # transformers 5 writes the second name


def test_warm_up_writes_a_checkpoint_and_what_it_did(tmp_path: Path) -> None:
    recipe = WarmupRecipe(
        batch_size=8,
        steps=3,
        lr_warmup_steps=2,
        mixed_steps=2,
        enough=0.0,
        min_working=0.0,
        eval_size=8,
        max_digits=1,
        max_new_tokens=4,
    )
    report = warm_up(tmp_path / "a", seed=5, recipe=recipe)
    again = warm_up(tmp_path / "b", seed=5, recipe=recipe)
    assert (report.steps, report.mixed_steps) == (3, 2)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert report.greedy_accuracy == again.greedy_accuracy
    told = json.loads((tmp_path / "a" / "warmup.json").read_text())
    assert told["report"]["seed"] == 5
    assert told["recipe"]["mixed_steps"] == 2
    assert Tokens(tmp_path / "a").stop_token_ids == (2,)


def test_a_warm_up_that_does_not_learn_fails_and_leaves_nothing(tmp_path: Path) -> None:
    recipe = WarmupRecipe(
        batch_size=8, steps=2, further_steps=1, max_steps=3, lr_warmup_steps=1, eval_size=8, max_new_tokens=4
    )
    with pytest.raises(WarmupError, match="did not learn") as caught:
        warm_up(tmp_path / "a", recipe=recipe)
    assert "after 3 steps" in str(caught.value)
    assert not (tmp_path / "a").exists()
    with pytest.raises(WarmupError, match="too long"):
        warm_up(tmp_path / "a", recipe=WarmupRecipe(max_cpu_seconds=0.0))


def test_a_warm_up_that_waits_for_its_turn_goes_on() -> None:
    warmup = Warmup(0, WarmupRecipe(batch_size=4, pool_batches=1))
    warmup._start -= 86_400.0
    assert warmup.supervised_step(direct_share=0.0) > 0


def test_accuracy_reads_the_answer_and_can_ban_the_direct_one() -> None:
    warmup = Warmup(0, WarmupRecipe(max_new_tokens=6))

    encode = warmup.tokenizer.convert_tokens_to_ids
    after = {encode("="): encode("#"), encode("#"): encode("3"), encode("1"): encode("3")}

    class Parrot:
        """Says `#3` after a `=` and stops after all else; a `1` and a `3` when `#` is banned."""

        def __call__(self, input_ids: torch.Tensor, past_key_values: int | None, use_cache: bool) -> object:
            logits = torch.zeros(input_ids.shape[0], 1, 128)
            for row, token in enumerate(input_ids[:, -1].tolist()):
                logits[row, -1, after.get(token, EOS)] = 2.0
            logits[:, -1, encode("1")] += 1.0
            return type("Output", (), {"past_key_values": (past_key_values or 0) + 1, "logits": logits})()

    warmup.model = Parrot()
    # The last prompt is longer: what comes out while it is read is no answer.
    problems = [ArithmeticProblem(1, "+", 2), ArithmeticProblem(2, "+", 2), ArithmeticProblem(10, "-", 7)]
    assert warmup.accuracy(problems) == pytest.approx(2 / 3)
    assert warmup.accuracy(problems, ban_direct=True) == 0.0


def test_the_command_tells_a_typed_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gsm8k.main(["--train", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "a")]) == 2
    assert "prompt file not found" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])


def test_gsm8k_checkpoint_writes_any_text(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    rows = [
        {"question": f"Tom has {i} apples and eats {i // 2}.", "answer": f"He has {i - i // 2}.\n#### {i - i // 2}"}
        for i in range(50)
    ]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gsm8k.make_gsm8k_checkpoint(train, tmp_path / "a", vocab_size=320)
    tokens = Tokens(tmp_path / "a")
    assert tokens.vocab_size == 320
    text = "Zoë  pays $5 – twice\n#### 10"
    assert tokens.decode(tokens.encode(text)) == text
    assert len(tokens.encode("Tom has 3 apples")) < 10
