"""The mixture-of-experts blocks of a Hugging Face model, also where several ranks share its weights.

PyTorch's `fully_shard` (FSDP2) keeps modules and their names. Around every forward of a layer and around its
recomputation it puts the layer's weights together. So gates and experts see whole weights and the rank's own tokens,
and hooks replay and prove as in one process. Where gates do not see that, this module refuses:

| refused | why |
|---|---|
| `FullyShardedDataParallel` (FSDP1) | it renames modules and flattens weights; nothing here was tested with it |
| weights on the meta device | counts stand where the weights are, and there they hold nothing |
| weights that rest on another device than they work on (`CPUOffloadPolicy`) | the same |
| gates that give distributed logits (tensor parallelism) | a rank would see a part of the choice alone |
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from routing.errors import ReplayRefusedError

_CHECKPOINTED = "_checkpoint_wrapped_module."
"""Part of the names inside of torch's `checkpoint_wrapper`, which accelerate puts around layers under FSDP2."""
_FLATTENED = "_fsdp_wrapped_module"


def gate_of(block: nn.Module) -> Any:
    """The module that chooses experts; gpt-oss calls it `router`. None: there is none."""
    return getattr(block, "gate", getattr(block, "router", None))


def selection_bias(block: nn.Module) -> Tensor | None:
    """`[E]` what the block's gate adds to the sigmoid of its logits to choose; None: it chooses by softmax.

    The gate has it, in MiniMax-M2 the block.
    """
    for owner in (gate_of(block), block):
        if (bias := getattr(owner, "e_score_correction_bias", None)) is not None:
            return bias  # type: ignore[no-any-return]
    return None


def moe_blocks(model: nn.Module) -> dict[int, Any]:
    """0-based decoder layer -> its block with `gate` and `experts`, ascending.

    Raises:
        ReplayRefusedError: a gate that is a plain linear layer (transformers before 5.0 chooses experts inside the
            block), experts that no gate stands beside, input noise that would make replay differ from the rollout, or
            a model of FSDP1.
    """
    blocks: dict[int, Any] = {}
    experts: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _FLATTENED in name:
            raise ReplayRefusedError(
                "routes are not replayed under FullyShardedDataParallel (FSDP1), because this was never proved. Share "
                "the model with torch.distributed.fsdp.fully_shard (FSDP2) instead."
            )
        if name.endswith(".experts"):
            experts[name] = module
        place = re.search(r"(?:^|\.)layers\.(\d+)\.\w+$", name.replace(_CHECKPOINTED, ""))
        if place is None or not (gate_of(module) is not None and hasattr(module, "experts")):
            continue
        if lacking := [part for part in ("top_k", "num_experts", "weight") if not hasattr(gate_of(module), part)]:
            raise ReplayRefusedError(
                f"the gate of {name} is a {type(gate_of(module)).__name__} without {', '.join(lacking)}: routes cannot "
                "be replayed by hooks. In transformers 5.0 and later most gates have them."
            )
        if getattr(module, "jitter_noise", 0):
            raise ReplayRefusedError(f"{name} multiplies its input by random noise; set router_jitter_noise=0")
        blocks[int(place[1])] = module
    attached = {id(block.experts) for block in blocks.values()}
    if alone := next((name for name, module in experts.items() if id(module) not in attached), None):
        raise ReplayRefusedError(
            f"{alone} are experts without a gate beside them in a module of a decoder layer (layers.N.NAME): their "
            "routes can be neither recorded nor replayed by hooks"
        )
    return dict(sorted(blocks.items()))


def body_of(model: nn.Module) -> nn.Module:
    """The module that holds the decoder layers. A backward reaches its output before any layer recomputes."""
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            return module
    raise ReplayRefusedError("the model has no list of decoder layers called `layers`")


def check_weights(layer: int, gate: Any) -> None:
    """Raise `ReplayRefusedError` unless the gate's weights are where it works."""
    rests = gate.weight.device.type
    if rests == "meta":
        raise ReplayRefusedError(
            f"the gate of layer {layer} has no weights yet (meta device): load the weights first, then attach"
        )
    mesh = getattr(gate.weight, "device_mesh", None)
    if mesh is not None and mesh.device_type != rests:
        raise ReplayRefusedError(
            f"the gate of layer {layer} works on {mesh.device_type}, and its weights rest on {rests} "
            "(CPUOffloadPolicy): that was never proved. Share the model without offloading weights."
        )


def check_whole(layer: int, logits: Tensor) -> None:
    """Raise `ReplayRefusedError` where `logits` of a gate are a part that is known to be one (`DTensor`)."""
    if hasattr(logits, "device_mesh"):
        raise ReplayRefusedError(
            f"the gate of layer {layer} gives logits that are distributed over ranks (tensor parallelism): a rank "
            "sees a part of the choice alone. Leave the gates out of the parallel plan."
        )
