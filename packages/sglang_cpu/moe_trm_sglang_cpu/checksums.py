"""Checksums of the loaded weights, after one walk through the model.

SGLang walks through all modules five times before it hashes the first tensor. For a small model that takes half as long
as the hashing. Here one walk finds the tensors, at every request. Names, their order and the hashes are SGLang's.
Quantised weights, and requests that leave tensors out, are SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor


def wrap(native: Callable[..., dict[str, Any]], sglang: Any) -> Callable[..., dict[str, Any]]:
    """SGLang's `WeightChecker._compute_checksum`, which is `native`, for plain weights.

    Args:
        native: SGLang's.
        sglang: its module `weight_checker`.
    """

    def compute(checker: Any, skip_tensor_list: Sequence[str] | None = None, *, role: str) -> dict[str, Any]:
        found = None if skip_tensor_list else plain_tensors(checker._get_model(), sglang.select_comparable_weight)
        if found is None:
            return native(checker, skip_tensor_list, role=role)
        hashed = [(name, tensor) for name, tensor in found if not sglang._is_skip_weight_check(name, tensor)]
        checksums = {name: sglang._hash_tensor(tensor.data) for name, tensor in hashed}
        return {
            "checksums": checksums,
            "per_gpu_checksum": sglang.overall_checksum(checksums),
            "parallelism_info": checker._parallelism_info(role=role).model_dump(),
        }

    return compute


def plain_tensors(model: Any, quantised: Callable[[Any], object | None]) -> list[tuple[str, Tensor]] | None:
    """Parameters and then buffers with their names, each once, as torch's `named_parameters` and `named_buffers`.

    Args:
        model: SGLang's.
        quantised: SGLang's class for weights of this way to multiply, None for plain ones.

    Returns None where a module has quantised weights.
    """
    parameters: list[tuple[str, Tensor]] = []
    buffers: list[tuple[str, Tensor]] = []
    known: set[int] = set()
    for path, module in model.named_modules():
        if quantised(getattr(module, "quant_method", None)) is not None:
            return None
        prefix = f"{path}." if path else ""
        for found, own in ((parameters, module._parameters), (buffers, module._buffers)):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in known:
                    known.add(id(tensor))
                    found.append((prefix + name, tensor))
    return parameters + buffers


def wrap_unpacking(native: Callable[[Any], Any], kind: type) -> Callable[[Any], Any]:
    """SGLang's `msgspec_to_builtins`, which is `native`, for the answer `kind`.

    SGLang reads the annotations of its fields again for every answer.
    """

    def unpacked(obj: Any) -> Any:
        return msgspec.to_builtins(obj) if type(obj) is kind else native(obj)

    return unpacked
