"""Tokens as text, one by one: nothing is lost, no character is cut, special tokens stay visible."""

from __future__ import annotations

import json

import pytest

from moe_trm.tasks.tokens import Tokens


@pytest.fixture(scope="module")
def bytes_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """A byte-level tokenizer without merges: one token per byte, so that most characters take several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocab), "eos_token_id": 0}))
    return Tokens(folder)


@pytest.mark.parametrize("text", ["plain text\n", "Größe 漢字 👩‍💻 ok", "  two  spaces ", "é" * 5])
def test_pieces_join_to_the_text_and_cut_no_character(bytes_tokens: Tokens, text: str) -> None:
    ids = bytes_tokens.encode_plain(text)
    pieces = bytes_tokens.pieces(ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_special_tokens_are_visible_and_a_broken_end_is_not_lost(bytes_tokens: Tokens) -> None:
    assert bytes_tokens.pieces([*bytes_tokens.encode_plain("a"), 0]) == ["a", "<eos>"]
    assert bytes_tokens.pieces(bytes_tokens.encode_plain("aé")[:-1]) == ["a", "\ufffd"]
    assert bytes_tokens.pieces([]) == []
