"""Tiny checkpoints of published models: names, dtypes, files and quirks of the release, sizes divided.

Made from the config.json of the release: FP8 blocks or MXFP4 where it announces them, layers behind the last that
predict several tokens at once, float32 biases that choose experts, several files with an index. The same seed gives the
same bytes. A model that reads images has its vision encoder, and the experts of a layer in two tensors.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_trm.models import fp8_blocks, mxfp4
from moe_trm.models.hf_config import library_config, reads_images, text_config
from moe_trm.models.hybrid import TINY as HYBRID
from moe_trm.models.quantisation import BLOCKS, SCALE_INV, SCALES, Quantisation, quantisation_of
from moe_trm.models.tiny.checkpoint import BOS, EOS, PAD, character_tokenizer, save
from moe_trm.models.tiny.families import random_model

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "first_k_dense_replace": 1, "sliding_window": 16, "rotary_dim": 16, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "index_topk": 8, "index_n_heads": 4, "index_head_dim": 16,
}  # fmt: skip
VISION_SIZES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_position_embeddings": 16,
    "out_hidden_size": 64, "patch_size": 4,
}  # fmt: skip
"""In place of the published values, where there are any. 32 + 8 latents are 2.5 blocks of 16 weights."""
ALWAYS = {"vocab_size": 128, "max_position_embeddings": 512, "initializer_range": 0.2}
SPECIAL_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
BLOCK = [16, 16]
_QUANTISED = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\.(?!indexer\.weights)"
    r".*(_proj(_with_mqa)?|\.w\d|\.wq_b|\.wk)\.weight"
)
_EXACT = ".e_score_correction_bias"


def divided(published: Mapping[str, Any]) -> dict[str, Any]:
    """The published config.json with small sizes."""
    if reads_images(published):
        vision, ids = {**published["vision_config"], **VISION_SIZES}, {}
        for number, key in enumerate(key for key in published if key.endswith("_token_id")):
            ids[key] = ALWAYS["vocab_size"] - 1 - number
        return {**published, **ids, "text_config": divided(published["text_config"]), "vision_config": vision}
    small = {**published, **{key: value for key, value in SIZES.items() if published.get(key)}, **ALWAYS}
    small |= SPECIAL_IDS
    if "linear_num_key_heads" in published:
        small["initializer_range"] = HYBRID["initializer_range"]
    if kinds := published.get("layer_types"):
        small["layer_types"] = kinds[: SIZES["num_hidden_layers"]]
    if "mrope_section" in (rope := published.get("rope_parameters") or {}):
        small["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    alike = published["num_key_value_heads"] == published["num_attention_heads"]
    small["num_key_value_heads"] = small["num_attention_heads"] if alike else 2
    small["num_experts_per_tok"] = max(2, int(published["num_experts_per_tok"]) // 2)
    if int(published.get("n_group") or 1) > 1:
        small |= {"n_group": 4, "topk_group": 2}
    if scaling := published.get("rope_scaling"):
        small["rope_scaling"] = {**scaling, "factor": 4.0, "original_max_position_embeddings": 128}
    if "weight_block_size" in (quantised := published.get("quantization_config") or {}):
        small["quantization_config"] = {**quantised, "weight_block_size": BLOCK}
    return small


def make_published(published: Mapping[str, Any], folder: Path, seed: int = 0) -> Path:
    """Write a tiny checkpoint of the model whose config.json is `published` to `folder`, which is returned."""
    import transformers

    config, where = divided(published), str(folder)
    hf = text_config(config)
    form = quantisation_of(hf, where)
    made = config if reads_images(config) else library_config(hf)
    kind = transformers.CONFIG_MAPPING[made["model_type"]]
    model = random_model(made["architectures"][0], kind.from_dict({**made, "dtype": "float32"}), seed)
    with tempfile.TemporaryDirectory() as scratch:
        save(model, character_tokenizer(), Path(scratch))
        plain = load_file(Path(scratch) / "model.safetensors")
    random = torch.Generator().manual_seed(seed)
    if reads_images(config):
        plain = {**model.state_dict(), **_multi_token_layer(plain, hf, random)}
    plain |= _prediction(plain, hf, random)
    stored = dict[str, Tensor]()
    for name, tensor in plain.items():
        stored |= stored_form(name, tensor if name.endswith(_EXACT) else tensor.bfloat16(), form)
    folder.mkdir(parents=True, exist_ok=True)
    character_tokenizer().save_pretrained(folder)
    names = sorted(stored)
    files = {f"model-0000{number + 1}-of-00003.safetensors": names[number::3] for number in range(3)}
    for file, held in files.items():
        save_file({name: stored[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


def _multi_token_layer(
    saved: Mapping[str, Tensor], hf: Mapping[str, Any], random: torch.Generator
) -> dict[str, Tensor]:
    """Qwen3.5's layer that predicts several tokens at once, as the last of the model, with a tensor for each matrix."""
    width, last = int(hf["hidden_size"]), f"model.language_model.layers.{hf['num_hidden_layers'] - 1}."
    layer = {name.replace(last, "mtp.layers.0."): value for name, value in saved.items() if name.startswith(last)}
    layer |= {f"mtp.{x}.weight": torch.ones(width) for x in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    layer["mtp.fc.weight"] = torch.ones(width, 2 * width)
    return {name: torch.randn(value.shape, generator=random) * 0.2 for name, value in layer.items()}


def _prediction(plain: Mapping[str, Tensor], hf: Mapping[str, Any], random: torch.Generator) -> dict[str, Tensor]:
    """Layers behind the last: each is a layer of the model and a projection of two embeddings, all random."""
    layers, tensors = int(hf["num_hidden_layers"]), dict[str, Tensor]()
    last, width = f"model.layers.{layers - 1}.", int(hf["hidden_size"])
    for number in range(layers, layers + int(hf.get("num_nextn_predict_layers") or 0)):
        layer = {name.replace(last, f"model.layers.{number}."): value for name, value in plain.items() if last in name}
        start = f"model.layers.{number}."
        layer |= {start + x: torch.ones(width) for x in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
        layer |= {start + "eh_proj.weight": torch.ones(width, 2 * width)}
        layer |= {start + x: plain["lm_head.weight"] for x in ("embed_tokens.weight", "shared_head.head.weight")}
        tensors |= {name: torch.randn(value.shape, generator=random) * 0.2 for name, value in layer.items()}
    return tensors


def stored_form(name: str, tensor: Tensor, form: Quantisation | None) -> dict[str, Tensor]:
    """The tensors that the files hold for one tensor."""
    if form is not None and form.method == "fp8" and _QUANTISED.fullmatch(name):
        values, scales = fp8_blocks.quantize(tensor, form.block, torch.float32, powers=form.powers)
        return {name: values, name + SCALE_INV: scales}
    if form is not None and form.method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
        values, scales = mxfp4.quantize(tensor)
        return {name + BLOCKS: values, name + SCALES: scales}
    return {name: tensor.contiguous()}
