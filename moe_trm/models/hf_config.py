"""Model description from a Hugging Face checkpoint folder, before anything is loaded. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_trm.errors import CheckpointError

TEXT_PART: Mapping[str, str] = {
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}
"""Architectures of models that also read images, and those of their text alone, which is trained and served where no
prompt has pictures."""


def reads_images(hf_config: Mapping[str, Any]) -> bool:
    """True for the whole config.json of a model whose text is a part of it."""
    return (hf_config.get("architectures") or [""])[0] in TEXT_PART and "text_config" in hf_config


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the text alone; that of a text model as it is.

    As in transformers, whether embedding and output weight are tied is said outside of `text_config`.
    """
    if not reads_images(hf_config):
        return dict(hf_config)
    outer = {key: hf_config[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in hf_config}
    return {
        **outer,
        **hf_config["text_config"],
        "architectures": [TEXT_PART[hf_config["architectures"][0]]],
        "tie_word_embeddings": bool(hf_config.get("tie_word_embeddings")),
    }


def read_hf_config(checkpoint: str | Path) -> dict[str, Any]:
    """`config.json` of the text model in a Hugging Face checkpoint folder, as plain data.

    Raises `CheckpointError` as `read_full_config`.
    """
    return text_config(read_full_config(checkpoint))


def missing_folder_fix(checkpoint: str) -> str:
    """Advice for a checkpoint folder that is not there; a name of the Hugging Face hub is downloaded first."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", checkpoint) and not Path(checkpoint).parent.is_dir():
        folder = f"checkpoints/{checkpoint.rpartition('/')[2]}"
        return (
            "Check model.checkpoint. If it is a name of the Hugging Face hub, download it where the network is: "
            f"`hf download {checkpoint} --local-dir {folder}`, and set model.checkpoint={folder}."
        )
    return "Check model.checkpoint."


def read_full_config(checkpoint: str | Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face checkpoint folder as it is, with what `hf_quant_config.json` says of weights.

    Raises:
        CheckpointError: no such folder, no config.json in it, or not JSON.
    """
    folder = Path(checkpoint)
    where = f"model.checkpoint={checkpoint}"
    if not folder.is_dir():
        raise CheckpointError(
            "checkpoint folder not found",
            where=where,
            got="no such folder",
            expected="a folder with config.json and safetensors",
            fix=missing_folder_fix(str(checkpoint)),
        )
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            "checkpoint has no config.json",
            where=where,
            got=sorted(p.name for p in folder.iterdir())[:8],
            expected="config.json",
            fix="Point model.checkpoint at a complete Hugging Face checkpoint.",
        )
    return with_quantisation_file(_json_object(path), folder)


def with_quantisation_file(hf_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`config.json` with the description of weights that NVIDIA's ModelOpt writes beside it.

    `hf_quant_config.json` has the form of the weights (NVFP4, FP8, MXFP4) under `quantization`. It counts where
    config.json has no `quantization_config`. Without `quant_algo` only the cache of the engine is quantised.

    Raises:
        CheckpointError: a file that is not JSON.
    """
    path = folder / "hf_quant_config.json"
    if hf_config.get("quantization_config") or not path.is_file():
        return hf_config
    described = _json_object(path).get("quantization") or {}
    if not described.get("quant_algo"):
        return hf_config
    return {**hf_config, "quantization_config": {"quant_method": "modelopt", **described}}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(data, dict):
        raise _damaged(path, type(data).__name__)
    return data


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is not valid JSON",
        where=str(path),
        got=problem,
        expected="a JSON object",
        fix="Copy the checkpoint again.",
    )


def check_vocabulary(folder: str | Path, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids the model has no embedding for. A folder without tokenizer.json passes.

    Raises:
        CheckpointError: the largest token id is not below `vocab_size`.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return
    data = json.loads(path.read_text(encoding="utf-8"))
    vocab = data["model"].get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in data.get("added_tokens", [])]
    if ids and max(ids) >= vocab_size:
        raise CheckpointError(
            "tokenizer and model vocabulary do not fit",
            where=str(path),
            got=f"token id {max(ids)}",
            expected=f"ids below vocab_size={vocab_size} of config.json",
            fix="Use the tokenizer that belongs to this checkpoint.",
        )


def num_experts(hf_config: Mapping[str, Any]) -> int:
    """Routed experts per MoE layer, 0 for a dense model. Families name it differently."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(hf_config[name]) for name in names if hf_config.get(name)), 0)


PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys for the number of layers that predict several tokens at once."""
_ALIASES = {"kimi_k2": "deepseek_v3", "qwen3_vl_moe_text": "qwen3_moe"}
"""Model types without a causal language model in transformers, whose model is another one to the last operation."""


_ROTATIONS = ("rope_parameters", "rope_scaling")
"""Keys with the rotation of heads: of transformers 5, and of releases before it."""


def without_prediction_layers(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model whose layers for predicting several tokens at once were left out."""
    return {**hf_config, **{key: 0 for key in PREDICTION_LAYERS if key in hf_config}}


def plain_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model with its weights as plain tensors."""
    return {key: value for key, value in hf_config.items() if key != "quantization_config"}


def library_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of what a learner trains and an engine serves, for libraries that execute no code of a repository.

    Weights are plain, layers for predicting several tokens at once are left out, Kimi-K2 is a DeepSeek-V3, and the text
    of Qwen3-VL a Qwen3. There are no sections of positions, which are for images: those of text are alike in all of
    them.
    """
    config = without_prediction_layers(plain_config(hf_config))
    if config.get("model_type") in _ALIASES:
        config["model_type"] = _ALIASES[config["model_type"]]
        config.pop("auto_map", None)
    for name in _ROTATIONS:
        if "mrope_section" in (rope := config.get(name) or {}):
            plain = {key: rope[key] for key in rope if not key.startswith("mrope_")}
            config[name] = plain if plain.keys() - {"rope_type", "type"} else None
    return config


def has_sections(hf_config: Mapping[str, Any]) -> bool:
    """True where heads are rotated in sections by positions in time, height and width."""
    return any("mrope_section" in (hf_config.get(name) or {}) for name in _ROTATIONS)


def expert_width(hf_config: Mapping[str, Any]) -> int:
    """Columns of one routed expert; OLMoE and Mixtral call it `intermediate_size`."""
    return int(hf_config.get("moe_intermediate_size") or hf_config["intermediate_size"])


def head_dim(hf_config: Mapping[str, Any]) -> int:
    """Columns of one attention head."""
    return int(hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"])


def rotary_share(hf_config: Mapping[str, Any]) -> float:
    """Share of each head's columns that are rotated; MiniMax-M2 gives their number."""
    rope = hf_config.get("rope_parameters") or {}
    if share := rope.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor"):
        return float(share)
    return int(hf_config["rotary_dim"]) / head_dim(hf_config) if hf_config.get("rotary_dim") else 1.0


def shared_width(hf_config: Mapping[str, Any]) -> int:
    """Columns of all experts that every token meets."""
    for key in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        if width := hf_config.get(key):
            return int(width)
    return int(hf_config.get("n_shared_experts") or 0) * expert_width(hf_config)


LAYER_KEYS = ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq", "mlp_layer_types")
"""Keys that say which layers are mixtures of experts."""
_PATTERNS = ("hybrid_override_pattern", "layers_block_type")
"""Keys of Nemotron-H for the kind of each layer: `E` in the letters of the release, `moe` in transformers' list."""


def layer_pattern(hf_config: Mapping[str, Any]) -> Sequence[str]:
    """Kinds of the layers of a Nemotron-H, as its config.json has them; empty of other models."""
    return next((hf_config[key] for key in _PATTERNS if hf_config.get(key)), ())


def moe_layers(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """0-based decoder layers that are mixtures of experts; empty for a dense model.

    Qwen-MoE: in the stride `decoder_sparse_step` and not in `mlp_only_layers`. DeepSeek-V3, GLM-4-MoE: from
    `first_k_dense_replace` on, in the stride `moe_layer_freq`, and not `dense` in `mlp_layer_types`. OLMoE, Mixtral:
    all. Nemotron-H: those that its pattern says.
    """
    if not num_experts(hf_config):
        return ()
    if pattern := layer_pattern(hf_config):
        return tuple(layer for layer, kind in enumerate(pattern) if kind in ("E", "moe"))
    kinds = hf_config.get("mlp_layer_types") or ()
    dense = {*(hf_config.get("mlp_only_layers") or ()), *(i for i, kind in enumerate(kinds) if kind == "dense")}
    step, first = int(hf_config.get("decoder_sparse_step") or 1), int(hf_config.get("first_k_dense_replace") or 0)
    frequency = int(hf_config.get("moe_layer_freq") or 1)
    return tuple(
        layer
        for layer in range(int(hf_config["num_hidden_layers"]))
        if layer not in dense and (layer + 1) % step == 0 and layer >= first and layer % frequency == 0
    )
