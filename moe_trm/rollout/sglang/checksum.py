"""Expected answer of the engine's `/weights_checker`, computed from Hugging Face tensors one at a time.

SGLang keeps q, k and v as one tensor, gate and up as one, and all experts of a layer as two (`w13_weight` `[E, 2I, H]`,
`w2_weight` `[E, H, I]`). Each is hashed as a whole: on the CPU the first 8 bytes of the SHA-256 of its contiguous
bytes, on CUDA the hash of `gpu_hash`. Every fused tensor is the concatenation of its parts along the leading axis. So
its hash is that of the parts' bytes in order, and the fused tensor need not exist here.

Shape letters: E experts, I expert width, H hidden width, V vocabulary.
Source: SGLang 0.5.23, `srt/utils/weight_checker.py` and `tensor_hash`; tensor parallel size 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_trm.errors import SyncError
from moe_trm.rollout.sglang.gpu_hash import GpuTensorHash
from moe_trm.sync.rounding import DTYPES, Rounding
from moe_trm.sync.tensors import tensor_bytes

VOCAB_MULTIPLE = 64
"""The engine pads the rows of embedding and output head to a multiple of this with zeros."""

_ATTENTION = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_GATE_AND_UP, _UP = ("gate_proj", "up_proj", "w1", "w3"), ("up_proj", "w3")
"""An expert's first two matrices, as most families call them and as Mixtral does."""
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
"""gpt-oss: the matrices of all experts of a layer as one tensor, and their biases.

The engine transposes the matrices.
"""
_LATENT = re.compile(r"(.*\.self_attn)\.(q_a_proj|kv_a_proj_with_mqa)\.weight")
"""Latent attention: one tensor where the queries are compressed, too (`q_lora_rank`).

Else they are `q_proj`, and each is a tensor of its own.
"""
_DENSE = re.compile(r"(.*)\.(gate|up)_proj\.(weight|bias)")
_SHARED_GATE = ".mlp.shared_expert_gate.weight"
"""A tensor that models with the gated delta rule have in every layer, and no other family."""
_DELTA = re.compile(r"(.*\.linear_attn)\.in_proj_(qkv|z|b|a)\.weight")
"""Qwen3.5: projections into the gated delta rule that Qwen3-Next has in two tensors, as the engine holds them."""
_HELD = {"sinks": "bfloat16", "w13_weight_bias": "float32", "w2_weight_bias": "float32", "A_log": "float32"}
"""The engine's dtype of tensors that do not follow `--dtype`, by the end of their names: gpt-oss's, and decays."""
_OFFSET = re.compile(r"(.*(layernorm|[qk]_norm|model\.norm))\.weight")
"""Norms of models with the gated delta rule, whose weights are offsets from 1: the engine holds the sum, too."""
_FLOAT32_GATES = ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Architectures whose routers SGLang holds in float32, whatever `--dtype` is."""
_GATE = re.compile(r"(.*\.block_sparse_moe)\.gate\.weight")
"""Of Mixtral, and of MiniMax-M2, which has a selection bias beside it and is held in float32."""
_VOCAB = ("model.embed_tokens.weight", "lm_head.weight")


def engine_place(name: str, pushed: Container[str] = ()) -> tuple[str, tuple[int, int]]:
    """Engine tensor of a Hugging Face tensor in the push `pushed`, and the sort key of the part within it.

    >>> engine_place("model.layers.0.mlp.experts.3.up_proj.weight")
    ('model.layers.0.mlp.experts.w13_weight', (3, 1))
    """
    if (layer := name.partition(".self_attn.")[0]) != name and f"{layer}{_SHARED_GATE}" in pushed:
        # Models with the gated delta rule have no module between a layer and its attention.
        place, part = engine_place(name)
        return place.replace(".self_attn", ""), part
    if match := _DELTA.fullmatch(name):
        return f"{match[1]}.in_proj_{'qkvz' if match[2] in ('qkv', 'z') else 'ba'}.weight", (0, int(match[2] in "za"))
    if (match := _ATTENTION.fullmatch(name)) and f"{match[1]}.kv_a_proj_with_mqa.weight" not in pushed:
        return f"{match[1]}.qkv_proj.{match[3]}", (0, "qkv".index(match[2]))
    if match := _EXPERT.fullmatch(name):
        fused = "w13_weight" if match[3] in _GATE_AND_UP else "w2_weight"
        return f"{match[1]}.{fused}", (int(match[2]), int(match[3] in _UP))
    if match := _STACKED.fullmatch(name):
        fused = "w13_weight" if match[2] == "gate_up_proj" else "w2_weight"
        return f"{match[1]}.{fused}{match[3] or ''}", (0, 0)
    if (match := _LATENT.fullmatch(name)) and f"{match[1]}.q_a_proj.weight" in pushed:
        return f"{match[1]}.fused_qkv_a_proj_with_mqa.weight", (0, int(match[2] != "q_a_proj"))
    if match := _DENSE.fullmatch(name):
        return f"{match[1]}.gate_up_proj.{match[3]}", (0, int(match[2] == "up"))
    return name, (0, 0)


class Layout(NamedTuple):
    """The engine's tensors by the names of a push, which are the same from push to push."""

    tensor_of: Mapping[str, str]
    """Engine tensor of each Hugging Face tensor."""
    parts: Mapping[str, Sequence[str]]
    """The parts of each engine tensor, in order."""
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]]
    """Of each engine tensor two dtypes: that of the push, and the one in which the engine stores it."""
    as_is: Mapping[str, torch.dtype | None]
    """The dtype in which the engine hashes the bytes of the parts as they are pushed; None: in no dtype."""
    sums: Mapping[str, str]
    """The engine's tensor of 1 + weight, by that of the weight."""


@lru_cache(maxsize=4)
def layout_of(names: frozenset[str], dtype: str, architecture: str = "") -> Layout:
    """Layout of a push of `names` to an engine in `dtype` that serves this architecture of Hugging Face's."""
    places = {name: engine_place(name, names) for name in names}
    parts: dict[str, list[str]] = {}
    for name in sorted(names, key=places.__getitem__):
        parts.setdefault(places[name][0], []).append(name)
    gates = architecture in _FLOAT32_GATES
    dtypes = {fused: _dtypes(fused, dtype, names, float32_gates=gates) for fused in parts}
    sums = {}
    if any(name.endswith(_SHARED_GATE) for name in names):
        sums = {fused: f"{match[1]}.gemma_weight" for fused in parts if (match := _OFFSET.fullmatch(fused))}
    as_is = {fused: None if fused in sums else _kept_dtype(fused, own, *dtypes[fused]) for fused, own in parts.items()}
    return Layout({name: fused for name, (fused, _) in places.items()}, parts, dtypes, as_is, sums)


def _dtypes(
    fused: str, engine_dtype: str, pushed: Container[str], *, float32_gates: bool
) -> tuple[torch.dtype, torch.dtype]:
    dtype = DTYPES[Rounding(engine_dtype).dtype_of(fused)]
    if float32_gates and fused.endswith(".mlp.gate.weight"):
        return dtype, torch.float32
    if (gate := _GATE.fullmatch(fused)) and f"{gate[1]}.e_score_correction_bias" in pushed:
        return dtype, torch.float32
    return dtype, DTYPES.get(_HELD.get(fused.rpartition(".")[2], ""), dtype)


def _kept_dtype(fused: str, parts: Sequence[str], dtype: torch.dtype, held: torch.dtype) -> torch.dtype | None:
    return dtype if dtype == held and fused not in _VOCAB and not _STACKED.fullmatch(parts[0]) else None


class Hasher(Protocol):
    """Common interface of `hashlib` objects and `GpuTensorHash`."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class EngineChecksums:
    """Accumulator of the checksums of an engine in `dtype` on `device`, for the tensors `names` of a push in any order.

    `architecture`: as in the config.json of what the engine serves.

    A part that arrives early is held until its turn. Threads may add at the same time, if none adds to the engine
    tensor of another (`parts`).
    """

    def __init__(self, names: Iterable[str], dtype: str, device: str = "cpu", architecture: str = "") -> None:
        layout = layout_of(frozenset(names), dtype, architecture)
        self._tensor_of, self._order, self._dtypes, self._as_is, self._sums = layout
        self._hashers: dict[str, Hasher] = {
            fused: GpuTensorHash() if device == "cuda" else hashlib.sha256()
            for fused in (*self._order, *self._sums.values())
        }
        self._taken = dict.fromkeys(self._order, 0)
        self._held: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of the push, once."""
        fused = self._tensor_of[name]
        self._held[name] = tensor
        parts = self._order[fused]
        while self._taken[fused] < len(parts) and parts[self._taken[fused]] in self._held:
            part = parts[self._taken[fused]]
            tensor, stacked = self._held.pop(part), _STACKED.fullmatch(part)
            self._hash(fused, tensor.mT if stacked and not stacked[3] else tensor)
            self._taken[fused] += 1

    def add_bytes(self, name: str, data: memoryview, dtype: torch.dtype) -> bool:
        """Take the next tensor of its engine tensor by its bytes, once.

        False where they are not what the engine hashes, because it casts, turns or pads the tensor, or where others
        come first: then nothing is taken.
        """
        fused = self._tensor_of[name]
        place = self._taken[fused]
        if self._as_is[fused] != dtype or self._order[fused][place] != name:
            return False
        self._hashers[fused].update(data)
        self._taken[fused] = place + 1
        return True

    def parts(self) -> tuple[Sequence[str], ...]:
        """The parts of each engine tensor, in order."""
        return tuple(self._order.values())

    def result(self) -> dict[str, str]:
        """Checksum by engine tensor. Raises `SyncError` when a tensor never came."""
        missing = [name for fused, parts in self._order.items() for name in parts[self._taken[fused] :]]
        if missing:
            raise SyncError(
                "tensors of the push are missing", got=_some(missing), expected="every tensor of the manifest"
            )
        return {fused: hasher.hexdigest()[:16] for fused, hasher in self._hashers.items()}

    def _hash(self, fused: str, tensor: Tensor) -> None:
        hasher = self._hashers[fused]
        dtype, held = self._dtypes[fused]
        hasher.update(tensor_bytes(tensor.to(dtype).to(held)))
        if fused in self._sums:
            self._hashers[self._sums[fused]].update(tensor_bytes(tensor.to(dtype).to(held) + 1))
        if fused in _VOCAB:
            padding_rows = -tensor.shape[0] % VOCAB_MULTIPLE
            hasher.update(bytes(padding_rows * tensor.shape[1] * dtype.itemsize))


def compare(expected: Mapping[str, str], reported: Mapping[str, str], where: str) -> None:
    """Raise `SyncError` that names the tensors unless the engine reports exactly the expected checksums."""
    differing = sorted(name for name in expected.keys() & reported.keys() if expected[name] != reported[name])
    absent = sorted(expected.keys() - reported.keys())
    unknown = sorted(reported.keys() - expected.keys())
    if not (differing or absent or unknown):
        return
    parts = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("differ", differing), ("not in the engine", absent), ("never pushed", unknown))
        if names
    ]
    raise SyncError(
        "the engine does not hold the weights that were pushed",
        where=where,
        got="; ".join(parts),
        expected=f"{len(expected)} tensors with the checksums of the push",
        fix=(
            "Do not train on its samples. Push again; if it repeats, look for damaged storage or another writer of "
            "the push folder."
        ),
    )


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
