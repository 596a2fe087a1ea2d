"""A tiny checkpoint for GSM8K: a byte-pair tokenizer trained on the data's own text, and a random Qwen3-MoE model.

`python -m moe_trm.tools.quickstart.gsm8k --train train.jsonl --out DIR` makes it. The model knows nothing; it is for
running every part of the pipeline on real prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moe_trm.errors import MoeTrmError
from moe_trm.models.tiny.checkpoint import SPECIAL, UNK, TinyShape, save, tiny_model, wrap
from moe_trm.tasks.examples import read_examples


def byte_pair_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level byte-pair tokenizer with at most `vocab_size` ids, the special ids first. It can write any text."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer)


def make_gsm8k_checkpoint(train: Path, folder: Path, seed: int = 0, vocab_size: int = 2048) -> None:
    """Tokenizer and model in `folder`. Raises `ConfigError` when `train` is not a GSM8K file."""
    examples = read_examples(train)
    tokenizer = byte_pair_tokenizer((f"{example.question}\n{example.answer}" for example in examples), vocab_size)
    save(tiny_model(seed, TinyShape(vocab_size=vocab_size)), tokenizer, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit status 2 after a typed error."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_trm.tools.quickstart.gsm8k", description="make a tiny checkpoint for GSM8K"
    )
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights (default: 0)")
    args = parser.parse_args(argv)
    try:
        make_gsm8k_checkpoint(args.train, args.out, args.seed)
    except MoeTrmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
