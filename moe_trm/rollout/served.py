"""What the checkpoint says about the model that the rollout engine serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trm.errors import CheckpointError


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
    """

    architecture: str
    vocab_size: int
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int

    @classmethod
    def from_checkpoint(cls, folder: Path) -> ServedModel:
        """Read `config.json` of a Hugging Face checkpoint folder. Raises `CheckpointError`."""
        path = folder / "config.json"
        try:
            return cls.from_config(json.loads(path.read_text()))
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
        """From a parsed `config.json` of the Qwen MoE family. A layer routes when it is in the sparse stride and not listed as dense."""
        num_layers = int(config["num_hidden_layers"])
        num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
        routed = (layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
        return cls(
            architecture=str(config["architectures"][0]),
            vocab_size=int(config["vocab_size"]),
            num_layers=num_layers,
            moe_layer_ids=tuple(routed) if num_experts else (),
            num_experts=num_experts,
            top_k=int(config["num_experts_per_tok"]) if num_experts else 0,
        )
