"""The whole model of a release that reads images: as it is published, forwarded with pictures, and written back."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from moe_trm.batch.collate import collate
from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import LearnerError
from moe_trm.learner.checkpoint.folder import CheckpointFolder, read_manifest
from moe_trm.learner.deepspeed.lora import DeepSpeedAdapters
from moe_trm.learner.deepspeed.optimizer import freeze
from moe_trm.learner.deepspeed.pictures import PictureInputs
from moe_trm.learner.deepspeed.policy import HfPolicy, load_policy
from moe_trm.learner.deepspeed.weights import checkpoint_form, owned_tensors
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_form import ExportForm
from moe_trm.learner.hf_tensors import check_tensors
from moe_trm.learner.scoring import Scoring
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.picture_processor import PictureProcessor
from moe_trm.tools.export.checkpoint import export_checkpoint
from moe_trm.types import MicroBatch, RolloutRecord, TokenBatch, TrainRow
from routing.layout.padded import Layout
from tests.integration.picture_model import IMAGE, IMAGE_TOKEN, make_picture_model, picture
from tests.unit.records import make_record
from tests.unit.tools.export.test_saved_weights import save

SIZES = ((64, 96), (32, 32), (64, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> HfPolicy:
    return load_policy(HfCheckpoint(folder), "float32", recompute=False, vision=True).eval()


@pytest.fixture(scope="module")
def inputs(folder: Path) -> PictureInputs:
    return PictureInputs(PictureProcessor(folder), IMAGE_TOKEN, torch.float32)


def png(colour: str, size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    picture(colour, *size).save(stream, "PNG")
    return stream.getvalue()


def row(folder: Path, pictures: tuple[bytes, ...], number: int) -> RolloutRecord:
    """A prompt with these pictures, and six sampled tokens."""
    from transformers import AutoProcessor

    images = [Image.open(io.BytesIO(data)) for data in pictures]
    text = IMAGE * len(pictures) + "ab?"
    prompt = AutoProcessor.from_pretrained(folder)(text=[text], images=images or None)["input_ids"][0]
    record = make_record(sample_id=number, num_prompt=len(prompt), num_sampled=6)
    tokens = np.array([*prompt, *range(40, 46)], np.int32)
    return record.changed(tokens=tokens, routes=None, sampling_mask=None, pictures=pictures)


def batch(*records: RolloutRecord) -> TokenBatch:
    return collate(MicroBatch(tuple(map(TrainRow, records))), keep_mask=False)


def scores(policy: HfPolicy, inputs: PictureInputs, made: TokenBatch) -> torch.Tensor:
    layout = Layout(*made.input_ids.shape)
    pictures = inputs.of(made, torch.device("cpu"))
    with torch.no_grad():
        return policy(made.input_ids, Scoring.of(made, 1.0), layout, pictures)[0][made.mask]


def test_the_text_part_has_the_names_and_the_scores_of_a_text_model(folder: Path, policy: HfPolicy) -> None:
    checkpoint = HfCheckpoint(folder)
    check_tensors(checkpoint, read_hf_config(folder))
    text = load_policy(checkpoint, "float32", recompute=False).causal.eval()
    ids = torch.randint(8, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    assert type(text).__name__ == "Qwen3MoeForCausalLM"
    with torch.no_grad():
        assert torch.equal(text(input_ids=ids).logits, policy.causal(input_ids=ids).logits)
    form = ExportForm(checkpoint, "float32")
    written = dict(form.written((name, checkpoint.read(name)) for name in sorted(checkpoint.names)))
    assert_same(written | dict(form.kept()), load_file(folder / "model.safetensors"))


def test_the_whole_model_has_the_tensors_of_the_release(folder: Path, policy: HfPolicy) -> None:
    """transformers 5.19 would write the matrices of experts as it holds them, which no engine reads."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in policy.causal.state_dict().items():
        made |= checkpoint_form(policy.causal, name, tensor)
    assert_same(made, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("frozen", [True, False])
def test_pushes_leave_out_what_is_frozen_and_exports_have_all_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    deepspeed = SimpleNamespace(zero=SimpleNamespace(GatheredParameters=lambda *_, **__: torch.no_grad()))
    monkeypatch.setattr("moe_trm.learner.deepspeed.weights.load_deepspeed", lambda: deepspeed)
    causal = load_policy(HfCheckpoint(folder), "float32", recompute=False, vision=True).causal
    freeze(causal, LearnerConfig(freeze_vision=frozen))
    trained = {name for name, parameter in causal.named_parameters() if parameter.requires_grad}
    assert any(".visual." in name for name in trained) != frozen
    with torch.no_grad():
        for name, parameter in causal.named_parameters():
            parameter.mul_(2 if name in trained else 1)
    pushed = dict(owned_tensors(causal, DeepSpeedAdapters(), partitioned=False, vision=not frozen))
    assert any(".visual." in name for name in pushed) != frozen
    form = ExportForm(HfCheckpoint(folder), "float32", trains_vision=not frozen)
    stored = load_file(folder / "model.safetensors")
    expected = {name: t if frozen and ".visual." in name else 2 * t for name, t in stored.items()}
    assert_same(dict(form.written(iter(pushed.items()))) | dict(form.kept()), expected)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_saved_weights_are_exported_as_the_release_is(
    folder: Path, policy: HfPolicy, tmp_path: Path, frozen: bool, published: bool
) -> None:
    parameters = policy.causal.named_parameters()
    trained = ((name, tensor.detach()) for name, tensor in parameters if not (frozen and ".visual." in name))
    checkpoint = save(tmp_path, folder, "deepspeed", trained, freeze_vision=frozen)
    edited = read_manifest(checkpoint)
    config = {**edited.config, "task": {"image_field": "images"}}
    shutil.copytree(checkpoint, CheckpointFolder(tmp_path).partial(8), dirs_exist_ok=True)
    checkpoint = CheckpointFolder(tmp_path).commit(8, edited.files, config)
    out = export_checkpoint(checkpoint, tmp_path / "out", published=published)
    stored = load_file(folder / "model.safetensors")
    made: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        made |= load_file(file)
    assert_same(made, {name: t if frozen and ".visual." in name else 2 * t for name, t in stored.items()})


def test_padded_rows_score_as_each_row_by_itself(folder: Path, policy: HfPolicy, inputs: PictureInputs) -> None:
    """Rows with two pictures, one, and none."""
    one, two, three = (png(colour, size) for colour, size in zip(("red", "blue", "green"), SIZES, strict=True))
    records = [row(folder, pictures, number) for number, pictures in enumerate([(one, two), (three,), ()])]
    together = scores(policy, inputs, batch(*records))
    alone = torch.cat([scores(policy, inputs, batch(record)) for record in records])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)
    other = records[0].changed(pictures=(png("white", SIZES[0]), two))
    assert (scores(policy, inputs, batch(other)) - alone[:6]).abs().max() > 1e-3


def test_a_row_without_its_pictures_is_refused(folder: Path, inputs: PictureInputs) -> None:
    record = row(folder, (png("red", SIZES[0]),), 0)
    for pictures in ((), (png("red", SIZES[1]),), (*record.pictures, png("red", SIZES[1]))):
        with pytest.raises(LearnerError, match="has not the image tokens"):
            inputs.of(batch(record.changed(pictures=pictures)), torch.device("cpu"))


def assert_same(made: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert made.keys() == expected.keys()
    assert [name for name, tensor in made.items() if not torch.equal(tensor, expected[name])] == []
