"""A tiny Qwen3-VL-MoE with the processor of pictures, in the form of the published releases, and pictures for it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EXPERTS, TOP_K, LAYERS = 8, 2, 3
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("<pad>", "<bos>", "<|im_end|>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
IMAGE_TOKEN = SPECIAL.index("<|image_pad|>")
PATCH, MERGE = 16, 2
"""A token stands for `PATCH * MERGE` pixels in either direction."""


def make_picture_model(folder: Path) -> Path:
    """Weights so large that experts and pictures change log-probs; characters for tokens."""
    model = _model()
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    # The releases have the matrices of experts transposed, and SGLang reads no others.
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in stored.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    _processor().save_pretrained(folder)
    return folder


def picture(colour: str, width: int, height: int) -> Any:
    """An image of pillow, in one colour."""
    from PIL import Image

    return Image.new("RGB", (width, height), colour)


def encoded(image: Any) -> str:
    """Base64 of its PNG, as SGLang takes it in `image_data`."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def _model() -> Any:
    from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "max_position_embeddings": 2048,
        "rope_parameters": rope, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "initializer_range": 0.2,
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2], "initializer_range": 0.2,
    }  # fmt: skip
    ids = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>",
           "vision_end": "<|vision_end|>"}  # fmt: skip
    torch.manual_seed(0)
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(
            text_config=text,
            vision_config=vision,
            **{f"{name}_token_id": SPECIAL.index(token) for name, token in ids.items()},
        )
    ).eval()


def _processor() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokens = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    tokens.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
             "vision_eos_token": "<|vision_end|>"}  # fmt: skip
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>",
        chat_template=template, extra_special_tokens=named,
    )  # fmt: skip
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    pixels = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE, "size": sizes}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**pixels),
        chat_template=template,
    )
