"""The folder that a rollout server starts from, where the checkpoint's weights are in a form that pushes do not have.

A push consists of plain tensors. A server that holds FP8 or MXFP4 would copy them into its 8-bit tensors under the
scales of the old weights, and on a CPU it does not start. So it starts from config.json without `quantization_config`
and the tokenizer, with random weights of the right shapes (`--load-format dummy`). The first push, which every run
makes before it samples, brings those of the checkpoint, dequantised by the learner.

A model with the gated delta rule starts in the same way where config.json has another dtype than the server: SGLang
would hold the weights of the rule's norm in that one. It does so where config.json has sections of positions, too, for
which SGLang has a table beside the weights that no push brings. Of a model that also reads images, the text is served,
and pushes have its names.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import ConfigError
from moe_trm.models.family import HfConfig
from moe_trm.models.hf_config import has_sections, library_config, read_full_config, read_hf_config, reads_images
from moe_trm.models.quantisation import quantisation_of
from moe_trm.models.registry import find_family

log = logging.getLogger(__name__)

RANDOM_WEIGHTS = ("--load-format", "dummy")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")


def has_plain_weights(checkpoint: Path) -> bool:
    """True where the engine can load the checkpoint's weights. Raises `CheckpointError` for an unknown form."""
    return quantisation_of(read_hf_config(checkpoint), f"{checkpoint}/config.json") is None


def check_quantised(rollout: RolloutConfig, hf: HfConfig, where: str) -> None:
    """Refuse what is not known to work with a quantised checkpoint. Raises `ConfigError`, `CheckpointError`."""
    if quantisation_of(hf, where) is None or rollout.quantization is None:
        return
    raise ConfigError(
        "an engine that rounds the weights it is sent is not known to work with a quantised checkpoint",
        where="config key rollout.quantization",
        got=f"{rollout.quantization} with weights that are {hf['quantization_config'].get('quant_method')} ({where})",
        expected="none: the engine then computes with the dequantised weights",
        fix=(
            "Leave rollout.quantization out. rollout.fake_quantization=fp8_e4m3 with "
            "rollout.fake_quantization_block=128 gives the engine weights that published FP8 can hold, on any device."
        ),
    )


def folder_to_serve(checkpoint: Path, beside: Path, dtype: str) -> Path:
    """The checkpoint itself; or a folder in `beside` without weights, whose config.json is for plain ones.

    The latter where the weights are quantised, where the server would hold some of them in another than its `dtype` or
    more than the weights, and where the text is a part of the model.
    """
    hf = read_hf_config(checkpoint)
    is_text = not reads_images(read_full_config(checkpoint))
    family = find_family(hf)
    held = hf.get("dtype") or hf.get("torch_dtype")
    has_states = family is not None and "gated delta" in family.attention_kinds(hf)
    holds_weights = not has_states or (held == dtype and not has_sections(hf))
    if is_text and has_plain_weights(checkpoint) and holds_weights:
        return checkpoint
    if not is_text:
        log.warning("the rollout server is started on the text of %s (%s)", checkpoint, hf["architectures"][0])
    folder = beside / "served-model"
    folder.mkdir()
    weights = {path for pattern in _WEIGHTS for path in checkpoint.glob(pattern)}
    for path in checkpoint.iterdir():
        if path.is_file() and path not in weights and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    config = {**library_config(hf), **({"dtype": dtype} if has_states else {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
