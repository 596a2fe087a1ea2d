"""The shape in which a running SGLang server holds its tensors, from its `/server_info`, and what is not known here.

Source: SGLang 0.5.23, `srt/runtime_context.py` (ranks and groups), and the layers that each setting below changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.rollout.sglang.slices import Ranks

_MINIMAX, _QWEN3_5 = "MiniMaxM2ForCausalLM", "Qwen3_5Moe"


class Unknown(NamedTuple):
    """A setting with which slices are not predicted: its name in `/server_info`, values without effect, and why."""

    setting: str
    harmless: tuple[object, ...]
    why: str


_PLACED = "experts are elsewhere than in their order"
_OTHER_GROUPS = "tensors are shared among other ranks"
UNKNOWN = (
    Unknown("device", ("cpu", "cuda"), "how this device hashes is not known"),
    Unknown("pp_size", (1,), "a pipeline stage reports the tensors of its own layers"),
    Unknown("attn_cp_size", (1,), _OTHER_GROUPS),
    Unknown("dcp_size", (1,), _OTHER_GROUPS),
    Unknown("moe_dp_size", (1,), _OTHER_GROUPS),
    Unknown("shared_experts_tp_size", (None,), _OTHER_GROUPS),
    Unknown("enable_shared_experts_attn_tp", (False,), _OTHER_GROUPS),
    Unknown("enable_dense_mlp_attn_tp", (False,), _OTHER_GROUPS),
    Unknown("moe_a2a_backend", ("none",), _OTHER_GROUPS),
    Unknown("enable_eplb", (False,), _PLACED),
    Unknown("ep_num_redundant_experts", (0,), _PLACED),
    Unknown("init_expert_location", ("trivial",), _PLACED),
    Unknown("moe_runner_backend", ("auto", "triton", "triton_kernel"), "its kernels store experts in another order"),
)


def unpredicted(server: Mapping[str, Any], model: ServedModel) -> str:
    """The reasons why the checksums of this server are not predicted; empty: they are."""
    return "; ".join(_reasons(server, model))


def _reasons(server: Mapping[str, Any], model: ServedModel) -> Iterator[str]:
    for setting, harmless, why in UNKNOWN:
        if (value := server.get(setting, harmless[0])) not in harmless:
            yield f"{setting}={value}: {why}"
    if model.image is not None:
        yield f"{model.architecture}: tensors of a vision tower beside the text's"
    size = _attention_ranks(server)
    if server.get("device") == "cpu" and model.num_kv_heads % size:
        yield f"{model.num_kv_heads} key heads for {size} ranks: a server on a CPU adds heads of zeros"


def shape_of(server: Mapping[str, Any], model: ServedModel, dtype: str, held: Collection[str]) -> EngineShape:
    """The shape of a server that computes in `dtype` and reports tensors named `held`."""
    total, attention = server.get("tp_size", 1), _attention_ranks(server)
    divided = attention < total  # by attention in data-parallel groups
    embedding = attention
    if divided and model.architecture.startswith(_QWEN3_5):
        embedding = 1
    ranks = Ranks(
        total,
        attention=attention,
        experts=total // server.get("ep_size", 1),
        shared=total,
        dense=server.get("moe_dense_tp_size") or total,
        embedding=embedding,
        head=attention if server.get("enable_dp_lm_head") and model.architecture != _MINIMAX else total,
    )
    return EngineShape(
        dtype,
        server.get("device", "cpu"),
        model.architecture,
        ranks,
        model.num_kv_heads,
        model.delta_rows,
        model.num_experts,
        shared_among_experts=not any(".mlp.shared_experts." in name for name in held),
        transposes=server.get("moe_runner_backend") != "triton_kernel",
        sinks="float32" if server.get("attention_backend") == "trtllm_mha" else "bfloat16",
    )


def _attention_ranks(server: Mapping[str, Any]) -> int:
    return int(server.get("tp_size", 1)) // int(server.get("attn_dp_size", 1))
