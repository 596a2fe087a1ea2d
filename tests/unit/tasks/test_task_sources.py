"""Prompts from files and data sets: rows, fields, messages, chat templates, and what an answer is followed by."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_trm.config.schema import TaskConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.tiny.checkpoint import EOS, character_tokenizer, save, tiny_model
from moe_trm.tasks.build import build_task
from moe_trm.tasks.examples import Fields, read_examples
from moe_trm.tasks.gsm8k import read_gsm8k
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rows import read_rows
from moe_trm.tasks.tokens import Tokens
from tests.unit.conftest import SMALL

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrators') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<eos>\n{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    save(tiny_model(0, SMALL), tokenizer, folder)
    return folder


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list[dict[str, object]]) -> str:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]


def test_fields_are_named_and_the_others_are_extras(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"task": "2+2", "gold": 4, "level": {"of": [1, 2]}, "answer": "no"})
    [example] = read_examples(source, Fields("task", "gold"))
    assert (example.question, example.answer) == ("2+2", "4")
    assert example.extra == {"level": {"of": [1, 2]}, "answer": "no"}
    with pytest.raises(ConfigError, match=r"task\.prompt_field"):
        read_examples(source)


def test_a_field_that_no_function_could_be_sent_is_told_at_launch(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": "y", "note": "\\ud800"}\n')
    with pytest.raises(ConfigError, match=r"no plain data .*line 1"):
        read_examples(path)


def test_bad_rows_are_told_together_with_the_field_that_is_wrong(tmp_path: Path) -> None:
    """How many have which fault, and the first of them with their lines and values."""
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"prompt": "2+2", "answer": "4"})] * 3
    bad = ['{"prompt": ', '{"prompt": 7, "answer": "4"}', '{"prompt": "x", "answer": null}', "[]"]
    bad += ['{"prompt": "x", "gold": "4"}'] * 20
    path.write_text("\n".join([good[0], *bad, *good[1:]]))
    with pytest.raises(ConfigError, match="24 of 27 rows of the prompt file cannot be used") as caught:
        read_examples(path)
    lines = str(caught.value.got).splitlines()
    assert lines[0] == "21 x a row of the prompt file has no answer"
    assert {"1 x a line of the prompt file is not valid JSON", "1 x a row of the prompt file has no prompt"} < {*lines}
    assert {"line 3: prompt is 7", "line 4: answer is None", "line 6: no answer", "... and 4 more"} < {*lines}
    gsm = jsonl(tmp_path / "g.jsonl", *({"question": "x", "answer": f"so {n}"} for n in range(2)))
    with pytest.raises(ConfigError, match="2 of 2 rows") as caught:
        read_gsm8k(gsm)
    assert "line 2: answer ends in 'so 1'" in str(caught.value.got)


@pytest.mark.parametrize(
    ("row", "medium"),
    [
        ({"prompt": "<image>Find the cat.", "images": ["a.png"]}, "the field images"),
        ({"prompt": "Find the cat.", "image": "data:image/png;base64,AAAA"}, "the field image"),
        ({"prompt": "Find the cat.", "photo": [{"bytes": None, "path": "a.png"}]}, "the field photo"),
        ({"prompt": [{"role": "user", "content": "x", "images": ["a.png"]}]}, "the field images of message 1"),
        (
            {"prompt": "<|vision_start|><|image_pad|><|vision_end|>What is it?"},
            "the placeholder <|image_pad|> in the prompt",
        ),
        ({"prompt": [*MESSAGES, {"role": "user", "content": "<|image|>x"}]}, "the placeholder <|image|> in the prompt"),
        (
            {"prompt": "<image>Find it.", "seen": ["https://x/a.JPG"]},
            "the mark <image> in the prompt, and the field seen",
        ),
        ({"prompt": "Hear <audio>", "clip": "b/c.wav"}, "the mark <audio> in the prompt, and the field clip"),
        (
            {"prompt": [*MESSAGES, {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]},
            "a part of type image in message 3",
        ),
    ],
)
def test_a_row_with_a_picture_is_refused_with_its_place(tmp_path: Path, row: dict[str, object], medium: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", row | {"answer": "4"})
    with pytest.raises(ConfigError, match="has a picture, sound or video") as caught:
        read_examples(source)
    assert (caught.value.got, str(caught.value.where)) == (medium, f"{source}, line 1")


def test_every_row_with_a_picture_is_counted(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "x", "answer": "4", "images": images} for images in (["a.png"], [], ["b.png"])
    ]
    with pytest.raises(ConfigError, match="2 of 3 rows") as caught:
        read_examples(parquet(tmp_path / "a.parquet", rows))
    assert str(caught.value.got).startswith("2 x a row of the prompt file has a picture")


def test_text_about_pictures_and_empty_fields_are_text(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "Close the <image> tag.", "answer": "4", "images": [], "path": "x"},
        {"prompt": "What reads a.png?", "answer": "4", "path": "a.png"},
        {"prompt": "Close <image>.", "answer": "4", "hint": "Look at a.png, then write."},
    )
    asked = ["Close the <image> tag.", "What reads a.png?", "Close <image>."]
    assert [example.question for example in read_examples(source)] == asked


def test_parquet_and_jsonl_give_the_same_examples(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": MESSAGES, "answer": "4", "tests": ["a", "b"]}] * 3
    one = read_examples(parquet(tmp_path / "a.parquet", rows))
    two = read_examples(jsonl(tmp_path / "a.jsonl", *rows))
    assert [(e.question, e.answer, e.extra) for e in one] == [(e.question, e.answer, e.extra) for e in two]
    assert [example.name for example in one] == ["a.parquet:1", "a.parquet:2", "a.parquet:3"]


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_examples(tmp_path / "a.parquet")


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
def test_a_data_set_by_name_or_a_clear_error(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"prompt": "2+2", "answer": "4"})
    [row] = read_rows(f"hf:{tmp_path}:train", [])
    assert row.fields == {"prompt": "2+2", "answer": "4"}
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        list(read_rows("hf:no-such-owner/no-such-data-set", []))
    assert "parquet" in caught.value.fix


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is installed")
def test_without_the_reader_a_data_set_is_refused_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match="datasets is not installed") as caught:
        list(read_rows("hf:gsm8k:main:train", []))
    assert "moe-trm[data]" in caught.value.fix


def test_only_a_reward_of_your_own_can_do_without_answers(tmp_path: Path, checkpoint: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"prompt": "2+2", "level": 3})
    with pytest.raises(ConfigError, match="no answer"):
        build_task(TaskConfig(name="jsonl", prompts=source), str(checkpoint), seed=0)
    own = TaskConfig(name="jsonl", prompts=source, reward="own:reward")
    [prompt] = build_task(own, str(checkpoint), seed=0).train_prompts(1, 1)
    assert (prompt.answer, prompt.extra) == ("", {"level": 3})


def test_messages_always_go_through_the_chat_template(tmp_path: Path, chat: Path, checkpoint: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"prompt": MESSAGES, "answer": "4"})
    config = TaskConfig(name="jsonl", prompts=source)
    task = build_task(config, str(chat), seed=0)
    [prompt] = task.train_prompts(1, 1)
    assert prompt.text == "[system]be brief;[user]2+2;[assistant]"
    assert list(prompt.messages) == MESSAGES
    assert prompt.token_ids == task.tokens.encode_plain(prompt.text)
    with pytest.raises(CheckpointError, match="no chat template"):
        build_task(config, str(checkpoint), seed=0).train_prompts(1, 1)
    with pytest.raises(ConfigError, match="for prompts that are text"):
        build_task(config.model_copy(update={"template": "Q {prompt}"}), str(chat), seed=0).train_prompts(1, 1)


def test_a_text_can_be_the_users_message(tmp_path: Path, chat: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"prompt": "2+2", "answer": "4"})
    config = TaskConfig(name="jsonl", prompts=source, chat=True, template="Add: {prompt}")
    [prompt] = build_task(config, str(chat), seed=0).train_prompts(1, 1)
    assert prompt.text == "[user]Add: 2+2;[assistant]"
    assert prompt.messages == ({"role": "user", "content": "Add: 2+2"},)


def test_what_follows_an_answer_is_written_as_the_template_does(chat: Path) -> None:
    tokens = Tokens(chat)
    tool = [{"role": "tool", "content": "42"}]
    behind = "\n[tool]42;[assistant]"
    assert tokens.encode_continuation(tool, EOS) == tokens.encode_plain(behind), "the policy closed its answer itself"
    cut = tokens.encode_continuation(tool, tokens.encode_plain("7")[0])
    assert cut == (EOS, *tokens.encode_plain(behind)), "a cut answer is closed for it"
    whole = tokens.encode_plain("[user]2+2;[assistant]6*7<eos>\n[tool]42;[assistant]")
    assert (*tokens.encode_plain("[user]2+2;[assistant]6*7"), *cut) == whole
    with pytest.raises(CheckpointError, match="no narrators"):
        tokens.encode_continuation([{"role": "narrator", "content": "x"}], EOS)


def test_variables_of_the_template_reach_every_conversation_and_others_are_refused(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% set quiet = not think %}" + TEMPLATE + "{% if quiet %}()" + "{% endif %}{% generation %}{% endgeneration %}"
    )
    save(tiny_model(0, SMALL), tokenizer, tmp_path)
    source = jsonl(tmp_path / "a.jsonl", {"prompt": MESSAGES, "answer": "4"})

    def task(**variables: bool | int | float | str) -> Task:
        config = TaskConfig(name="jsonl", prompts=source, chat_template_kwargs=variables)
        return build_task(config, str(tmp_path), seed=0)

    quiet, loud = (task(think=think).train_prompts(1, 1)[0].text for think in (False, True))
    assert quiet == f"{loud}()"
    tokens = task(think=True).tokens
    talk = [{"role": "user", "content": "x"}]
    assert tokens.render(talk, variables={"think": False}) == f"{tokens.render(talk)}()", "a request comes first"
    for name in ("enable_thinking", "quiet", "messages"):
        with pytest.raises(CheckpointError, match="no such variable") as caught:
            task(**{name: True})
        assert (caught.value.got, caught.value.expected) == (name, "one of think")


def test_variables_without_a_template_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"prompt": "2+2", "answer": "4"})
    config = TaskConfig(name="jsonl", prompts=source, chat_template_kwargs={"think": True})
    with pytest.raises(CheckpointError, match="no chat template"):
        build_task(config, str(checkpoint), seed=0)


def test_a_template_that_hides_answers_is_refused(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }};{% endfor %}"
    save(tiny_model(0, SMALL), tokenizer, tmp_path)
    with pytest.raises(CheckpointError, match="as it is"):
        Tokens(tmp_path).encode_continuation([{"role": "user", "content": "x"}], EOS)


def test_a_template_that_rewrites_the_beginning_is_refused(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}:" + TEMPLATE
    save(tiny_model(0, SMALL), tokenizer, tmp_path)
    with pytest.raises(CheckpointError, match="changes the beginning"):
        Tokens(tmp_path).encode_continuation([{"role": "user", "content": "x"}], EOS)
