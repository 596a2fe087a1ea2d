"""transformers' model of a checkpoint folder, with plain weights whatever form the files have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.hf_config import library_config, read_full_config, read_hf_config
from moe_trm.models.multimodal import expert_stack
from moe_trm.models.tensors import is_prediction


def model_config(folder: Path) -> Any:
    """transformers' configuration of the model in `folder` with plain weights."""
    from transformers import AutoConfig, PreTrainedConfig

    plain = library_config(read_hf_config(folder))
    kind: type[PreTrainedConfig] = type(AutoConfig.for_model(plain["model_type"]))
    return kind.from_dict(plain)


def load_model(checkpoint: HfCheckpoint, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model and what did not fit, with `options` of `from_pretrained`.

    transformers 5.19 dequantises FP8 only where blocks divide the matrix, which those of DeepSeek-V3 do not, and rounds
    once less with a float32 learner. So quantised weights are read here, for either learner alike, and so is the text
    of a model that reads images.
    """
    import transformers

    config, hf = model_config(checkpoint.folder), read_hf_config(checkpoint.folder)
    options = {**options, "config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
    if all(checkpoint.parts(name) == (name,) for name in checkpoint.names):
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, **options)
    else:
        weights = {name: _Unread(partial(checkpoint.read, name)) for name in checkpoint.names}
        model, loaded = getattr(transformers, config.architectures[0]).from_pretrained(
            None, state_dict=weights, **options
        )
    _read_buffers(model, checkpoint)
    # Under names of the model, in which the experts of a layer are one tensor.
    unexpected = {name for name in loaded["unexpected_keys"] if not is_prediction(name, hf)}
    return model, {**loaded, "unexpected_keys": unexpected}


def config_with_vision(folder: Path) -> Any:
    """transformers' configuration of the whole model of a release that reads images."""
    from transformers import AutoConfig, PreTrainedConfig

    full_config = read_full_config(folder)
    kind: type[PreTrainedConfig] = type(AutoConfig.for_model(full_config["model_type"]))
    return kind.from_dict(full_config)


def load_with_vision(checkpoint: HfCheckpoint, **options: Any) -> tuple[Any, dict[str, Any]]:
    """As `load_model`: the whole model of a release that reads images, under its published names.

    Matrices of experts are turned here: transformers 5.19 turns those whose shape tells that they are transposed, and
    so none that is square.
    """
    import transformers

    full_config = read_full_config(checkpoint.folder)
    kind = str(full_config["model_type"])
    config = config_with_vision(checkpoint.folder)

    def read(name: str) -> Tensor:
        tensor = checkpoint.read_stored(name)
        return tensor.transpose(1, 2).contiguous() if expert_stack(name, kind) else tensor

    weights = {name: _Unread(partial(read, name)) for name in checkpoint.stored_names}
    model: Any = getattr(transformers, full_config["architectures"][0])
    options |= {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
    loaded: tuple[Any, dict[str, Any]] = model.from_pretrained(None, state_dict=weights, **options)
    return loaded


def empty_model(checkpoint: HfCheckpoint, *, dtype: torch.dtype, **options: Any) -> Any:
    """The model with its buffers, and without values of parameters: one zero stands for all of a parameter.

    It is made on torch's meta device, as `from_pretrained` makes it. transformers computes the buffers again that no
    checkpoint has. The others, which choose experts, are read.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(model_config(checkpoint.folder), dtype=dtype, **options)
    stand_ins: dict[Tensor, nn.Parameter] = {}
    for module in causal.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            # Tied weights are one parameter.
            setattr(module, leaf, stand_ins.setdefault(parameter, nn.Parameter(zero)))
        computed = module._non_persistent_buffers_set
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            if leaf in computed:
                setattr(module, leaf, torch.empty_like(buffer, device="cpu"))
        if computed:
            with torch.no_grad():
                causal._init_weights(module)
    _read_buffers(causal, checkpoint)
    return causal.eval()


def _read_buffers(causal: Any, checkpoint: HfCheckpoint) -> None:
    """Read the buffers of the checkpoint, which choose experts, in float32 whatever the dtype of the model.

    transformers 5.19 keeps those of DeepSeek-V3 so, and rounds those of MiniMax-M2.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for prefix, module in causal.named_modules():
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            if leaf not in module._non_persistent_buffers_set:
                (name,) = revert_weight_conversion(causal, {f"{prefix}.{leaf}": buffer})
                setattr(module, leaf, checkpoint.read(name).float())


@dataclass(frozen=True)
class _Unread:
    """A tensor that transformers reads by `[...]`, as it does a slice of a file."""

    read: Callable[[], Tensor]

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        return self.read()
