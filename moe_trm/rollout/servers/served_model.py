"""Description of the model that the rollout engine serves, from its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_trm.errors import CheckpointError
from moe_trm.models.hf_config import moe_layers, num_experts, text_config
from moe_trm.models.pictures import picture_tokens


@dataclass(frozen=True)
class ServedModel:
    """Sizes that every response is checked against.

    Attributes:
        architecture: the first of the checkpoint's `architectures`.
        vocab_size: token ids are `0..vocab_size - 1`.
        num_layers: decoder layers, dense ones included.
        moe_layer_ids: 0-based decoder layers that route; empty for a dense model.
        num_experts: routed experts per MoE layer; 0 for a dense model.
        top_k: experts per token; 0 for a dense model.
        num_kv_heads: key and value heads of a layer.
        delta_rows: rows of q, k and v in the projection into the gated delta rule; none without one.
        image, reserved: of a model that is served with its vision tower, as in `PictureTokens`.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    num_kv_heads: int = 1
    delta_rows: tuple[int, ...] = ()
    image: int | None = None
    reserved: frozenset[int] = frozenset()

    @classmethod
    def from_checkpoint(cls, folder: Path, *, pictures: bool = False) -> ServedModel:
        """Read `config.json` of a Hugging Face checkpoint folder: of its text, or all of it with `pictures`.

        Raises `CheckpointError`.
        """
        path = folder / "config.json"
        try:
            full_config = json.loads(path.read_text())
            text = cls.from_config(text_config(full_config))
            if not pictures:
                return text
            tokens = picture_tokens(full_config, str(path))
            served = str(full_config["architectures"][0])
            return replace(text, architecture=served, image=tokens.image, reserved=tokens.reserved)
        except OSError as error:
            raise CheckpointError(
                "cannot read the checkpoint", where=str(path), got=error.strerror, expected="config.json"
            ) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                "config.json is damaged or of an unknown model", where=str(path), got=f"{type(error).__name__}: {error}"
            ) from error

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ServedModel:
        """From a parsed `config.json`."""
        experts = num_experts(config)
        return cls(
            architecture=str(config["architectures"][0]),
            vocab_size=int(config["vocab_size"]),
            num_layers=int(config["num_hidden_layers"]),
            moe_layer_ids=moe_layers(config),
            num_experts=experts,
            top_k=int(config["num_experts_per_tok"]) if experts else 0,
            num_kv_heads=int(config.get("num_key_value_heads") or config.get("num_attention_heads", 1)),
            delta_rows=_delta_rows(config) if "linear_num_key_heads" in config else (),
        )


def _delta_rows(config: Mapping[str, Any]) -> tuple[int, ...]:
    keys = int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    return keys, keys, int(config["linear_num_value_heads"]) * int(config["linear_value_head_dim"])
