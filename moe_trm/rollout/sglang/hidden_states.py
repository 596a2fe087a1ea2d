"""Hidden states that an SGLang server writes to files, by its own debugging flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moe_trm.errors import EngineError
from moe_trm.models.stream_names import around_norm

FLAG = "--debug-tensor-dump-output-folder"


def read_states(folder: Path, token_ids: Sequence[int], num_layers: int) -> dict[str, Tensor]:
    """See `ServerBackend.hidden_states`. A file holds one pass; the pass over these tokens is taken."""
    for path in sorted(folder.rglob("Pass*.pt"), reverse=True):
        dumped = torch.load(path, map_location="cpu", weights_only=True)
        if dumped["model.forward_batch_info.input_ids"].tolist() == [*token_ids]:
            return dict(_named(dumped, num_layers))
    raise EngineError("the rollout server wrote no hidden states of this text", where=str(folder), got="no such pass")


def _named(dumped: dict[str, Tensor | list[Tensor]], num_layers: int) -> Iterator[tuple[str, Tensor]]:
    """A norm that adds to the stream first has two outputs: the norm, and the stream that went into it."""
    for module, value in dumped.items():
        names = around_norm(module, num_layers)
        if names is None:
            continue
        normed, stream = value if isinstance(value, list) else (value, dumped["model.embed_tokens"])
        if isinstance(value, list) or names[0] == "embedding":
            assert isinstance(stream, Tensor)
            yield names[0], stream
        yield names[1], normed
