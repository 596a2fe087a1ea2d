"""A tiny Qwen3-VL-MoE that answers some of the rows: a start for runs on a laptop.

    python examples/pictures/start.py runs/pictures/train.jsonl --out runs/pictures/start

It trains random weights, those of the vision tower too, on rows with a `prompt`, an `answer` and one picture each,
until it solves `--until` of the rows that it kept back. The run then trains the text model alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("<pad>", "<bos>", "<|im_end|>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
IDS = {"image": 6, "video": 7, "vision_start": 4, "vision_end": 5}
NUM_CHECKED, BATCH_ROWS, CHECK_EVERY, LEARNING_RATE = 96, 32, 10, 2e-3


def tiny_model(seed: int) -> Any:
    """A model of a few hundred thousand weights, all of them random."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 512,
        "rope_parameters": rope, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],  # SGLang knows three alone
    }  # fmt: skip
    torch.manual_seed(seed)
    ids = {f"{name}_token_id": number for name, number in IDS.items()}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids))


def processor() -> Any:
    """A token for each character, and 32 x 32 pixels for each image token."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *map(chr, range(32, 127))])}
    tokens = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    tokens.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
             "vision_eos_token": "<|vision_end|>"}  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>",
        extra_special_tokens=named,
    )  # fmt: skip
    pixels = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
              "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}}  # fmt: skip
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**pixels), tokenizer, Qwen3VLVideoProcessor(**pixels), chat_template=template
    )


def save(model: Any, made: Any, folder: Path) -> None:
    """As the releases are: matrices of experts have their inputs first, which transformers does not write."""
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in stored.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    made.save_pretrained(folder)


class Rows:
    """Rows with their pictures, as the model takes them."""

    def __init__(self, file: Path, made: Any) -> None:
        self._folder, self._made = file.parent, made
        self._rows = [json.loads(line) for line in file.read_text().splitlines()]

    def batch(self, numbers: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The model's keywords, and the labels: ids of answers, -100 elsewhere."""
        rows = [self._rows[number] for number in numbers]
        made = self._made(
            text=[row["prompt"].replace("<image>", PLACEHOLDER) + row["answer"] + "<|im_end|>" for row in rows],
            images=[Image.open(self._folder / row["images"][0]) for row in rows],
            return_tensors="pt", padding=True, padding_side="right",
        )  # fmt: skip
        labels = made["input_ids"].clone()
        for place, row in enumerate(rows):
            length = int(made["attention_mask"][place].sum())
            labels[place, : length - len(row["answer"]) - 1] = -100
            labels[place, length:] = -100
        return dict(made), pad(labels[:, 1:], (0, 1), value=-100)

    def __len__(self) -> int:
        return len(self._rows)


def share_solved(model: Any, rows: Rows, numbers: list[int]) -> float:
    """Share of rows whose greedy answer is right: each token of the answer is the likeliest after those before it."""
    inputs, labels = rows.batch(numbers)
    with torch.no_grad():
        right = (model(**inputs).logits.argmax(-1) == labels) | (labels == -100)
    return float(right.all(1).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a JSONL file with prompt, answer and images on each line")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--until", type=float, default=0.5, help="share of rows that it then solves (default: 0.5)")
    parser.add_argument("--max-steps", type=int, default=500, help="give up after these (default: 500)")
    args = parser.parse_args()
    rng, made, model = random.Random(0), processor(), tiny_model(0)
    rows = Rows(args.rows, made)
    numbers = rng.sample(range(len(rows)), len(rows))
    checked, trained = numbers[:NUM_CHECKED], numbers[NUM_CHECKED:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, args.max_steps + 1):
        inputs, labels = rows.batch(rng.sample(trained, BATCH_ROWS))
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            solved = share_solved(model, rows, checked)
            print(f"step {step}: loss {loss.item():.3f}, solves {solved:.2f}", flush=True)
            if solved >= args.until:
                save(model, made, args.out)
                return 0
    print(f"solves less than {args.until} after {args.max_steps} steps: nothing was written", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
