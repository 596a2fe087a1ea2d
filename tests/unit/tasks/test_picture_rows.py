"""Rows with pictures: what becomes a prompt with its image tokens, and what is refused before anything starts."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from moe_trm.config.schema import TaskConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.picture_processor import as_png
from moe_trm.models.pictures import collapsed, expanded, picture_tokens
from moe_trm.tasks.build import build_task
from moe_trm.tasks.file_task import FileTask
from moe_trm.types import Prompt
from tests.integration.picture_model import IMAGE, IMAGE_TOKEN, encoded, make_picture_model, picture

TOKENS_OF_A = 2 * 3
"""64 x 96 pixels; a token stands for 32 x 32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    picture("red", 96, 64).save(tmp_path / "a.png")
    picture("blue", 32, 32).save(tmp_path / "b.jpg")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no picture")
    picture("red", 2010, 10).save(tmp_path / "narrow.png")
    return tmp_path


def prompts(folder: Path, here: Path, *rows: dict[str, Any], **settings: Any) -> list[Prompt]:
    file = here / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "4", **row}) + "\n" for row in rows))
    config = TaskConfig(name="jsonl", prompts=str(file), **{"image_field": "images", **settings})
    task = build_task(config, str(folder), 0)
    assert isinstance(task, FileTask)
    return [task._prompt(example) for example in task._train]


def test_a_mark_becomes_as_many_image_tokens_as_the_models_processor_makes(folder: Path, here: Path) -> None:
    from transformers import AutoProcessor

    [prompt] = prompts(folder, here, {"prompt": "Two: <image>, <image>.", "images": ["a.png", "b.jpg"], "seen": 1})
    assert prompt.text == f"Two: {IMAGE}, {IMAGE}."
    images = [Image.open(io.BytesIO(data)) for data in prompt.pictures]
    assert [(image.format, image.size) for image in images] == [("PNG", (96, 64)), ("PNG", (32, 32))]
    made = AutoProcessor.from_pretrained(folder)(text=[prompt.text], images=images)
    assert list(prompt.token_ids) == made["input_ids"][0]
    assert prompt.token_ids.count(IMAGE_TOKEN) == TOKENS_OF_A + 1
    assert prompt.extra == {"seen": 1}


def test_pictures_are_paths_contents_or_parts_of_messages(folder: Path, here: Path) -> None:
    text = encoded(picture("red", 96, 64))
    part = {"type": "image", "image": "a.png"}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
    question = [{"type": "text", "text": "?"}]
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": [form, *question]}]} for form in (part, url)]
    rows += [
        {"prompt": [{"role": "user", "content": [{"type": "image"}, *question]}], "images": source}
        for source in ("a.png", ["a.png"], {"path": "a.png"}, [{"bytes": text, "path": None}])
    ]
    made = prompts(folder, here, *rows)
    assert len({(prompt.text, prompt.token_ids, prompt.pictures) for prompt in made}) == 1
    assert made[0].text == f"{IMAGE}?<|im_end|>"


def test_a_row_of_text_beside_others_has_no_pictures(folder: Path, here: Path) -> None:
    rows = ({"prompt": "<image>?", "images": ["a.png"]}, {"prompt": "What?", "images": []})
    assert [len(prompt.pictures) for prompt in prompts(folder, here, *rows)] == [1, 0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image>?", "images": []}, "0 pictures, 1 places"),
        ({"prompt": "<image>?", "images": ["a.png", "a.png"]}, "2 pictures, 1 places"),
        ({"prompt": "What?", "images": ["a.png"]}, "1 pictures, 0 places"),
        ({"prompt": "<image>?", "images": ["none.png"]}, "No such file"),
        ({"prompt": "<image>?", "images": ["cut.png"]}, "decoded"),
        ({"prompt": "<image>?", "images": ["text.png"]}, "no picture that can be decoded"),
        ({"prompt": "<image>?", "images": ["narrow.png"]}, "2010 x 10 pixels"),
        ({"prompt": "<image>?", "images": ["https://x.org/a.png"]}, "nothing is fetched"),
        ({"prompt": "<image>?", "images": [{"bytes": "%%", "path": None}]}, "no base64"),
        ({"prompt": "<image>?", "images": [7]}, "int is neither a path"),
        ({"prompt": "<|image_pad|>?", "images": ["a.png"]}, r"<\|image_pad\|>"),
        ({"prompt": "<image>?", "images": ["a.png"], "video": "x.mp4"}, "the field video"),
        ({"prompt": "<image><video>?", "images": ["a.png"], "films": ["x.mp4"]}, "the mark <video>"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "images": ["a.png"]},
            "1 in messages, 1 in images",
        ),
    ],
)
def test_a_bad_picture_refuses_the_start_with_its_row(
    folder: Path, here: Path, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)line 2.*{reason}"):
        prompts(folder, here, {"prompt": "<image>?", "images": ["a.png"]}, row)


def test_bad_pictures_are_counted_together(folder: Path, here: Path) -> None:
    bad = {"prompt": "<image>?", "images": ["cut.png"]}
    with pytest.raises(ConfigError, match=r"(?s)2 of 3 rows.*2 x a picture of a row cannot be used"):
        prompts(folder, here, bad, {"prompt": "<image>?", "images": ["a.png"]}, bad)


def test_a_picture_that_is_gone_ends_the_run_and_is_never_text(folder: Path, here: Path) -> None:
    file = here / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "<image>?", "answer": "4", "images": ["a.png"]}))
    task = build_task(TaskConfig(name="jsonl", prompts=str(file), image_field="images"), str(folder), 0)
    (here / "a.png").unlink()
    with pytest.raises(ConfigError, match="can no longer be read"):
        task.train_prompts(1, 1)


def test_without_the_setting_rows_with_pictures_are_refused(folder: Path, here: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)has a picture.*set task\.image_field"):
        prompts(folder, here, {"prompt": "<image>?", "images": ["a.png"]}, image_field=None)


def test_pictures_are_turned_and_laid_on_white_once_for_both_engines() -> None:
    """Engines differ in both; a plain PNG stays as it is."""
    turned, exif, stream = Image.new("RGB", (8, 4), "red"), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    turned.save(stream, "JPEG", exif=exif)
    assert as_png(stream.getvalue())[1] == (8, 4)
    clear = io.BytesIO()
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(clear, "PNG")
    assert Image.open(io.BytesIO(as_png(clear.getvalue())[0])).getpixel((0, 0)) == (255, 255, 255)
    plain = base64.b64decode(encoded(picture("red", 4, 4)))
    assert as_png(plain)[0] is plain


def test_expanded_ids_are_collapsed_again() -> None:
    ids = [4, 6, 5, 9, 9, 4, 6, 5]
    assert expanded(ids, 6, (3, 1)) == (4, 6, 6, 6, 5, 9, 9, 4, 6, 5)
    assert collapsed(expanded(ids, 6, (3, 1)), 6) == ids
    for counts in ((3,), (1, 2, 3)):
        with pytest.raises(ValueError, match="2 placeholders"):
            expanded(ids, 6, counts)


def test_other_families_take_no_pictures() -> None:
    for config in ({"architectures": ["Qwen3MoeForCausalLM"]}, {"architectures": ["Gemma4ForConditionalGeneration"]}):
        with pytest.raises(CheckpointError, match="is given no pictures here"):
            picture_tokens(config, "config.json")
