"""Names of hidden states that mean the same in every engine: what goes into the norms of a decoder, and what comes out.

A decoder layer adds to its stream x twice: `x + attention(input norm(x))`, then `x + MLP(post-attention norm(x))`. The
MLP is the routed experts with their router, or a dense one. The final norm comes after the last layer.
"""

from __future__ import annotations

import re

_NORM = re.compile(
    r"(?:.*\.)?(?:layers\.(?P<layer>\d+)\.(?:(?P<input>input_layernorm)|pre_mlp_layernorm|post_attention_layernorm)"
    r"|decoder\.final_layernorm|model\.norm)"
)
"""Names of the modules in Hugging Face, SGLang and Megatron-Core."""


def around_norm(module: str, num_layers: int) -> tuple[str, str] | None:
    """Names of the hidden states before and after a module; None where it is no norm of the stream."""
    match = _NORM.fullmatch(module)
    if match is None:
        return None
    if match["layer"] is None:
        return f"layer {num_layers - 1}: MLP", "final norm"
    layer = int(match["layer"])
    if match["input"] is None:
        return f"layer {layer}: attention", f"layer {layer}: post-attention norm"
    return f"layer {layer - 1}: MLP" if layer else "embedding", f"layer {layer}: input norm"
