"""Layouts that Megatron-Core accepts and computes wrongly are refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from routing import ReplayRefusedError
from routing.hosts.megatron_checks import check_config


def settings(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"} | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, "overlap_p2p_comm"),
        ({"tensor_model_parallel_size": 2}, "sequence_parallel"),
        ({"moe_router_fusion": True}, "fused kernel"),
        ({"mtp_num_layers": 1}, "MTP"),
        ({"moe_expert_capacity_factor": 1.0}, "dropped"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "selects experts itself"),
        ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "sinkhorn"),
        ({"num_moe_experts": None}, "dense"),
        ({"moe_router_force_load_balancing": True}, "random ones"),
        ({"moe_router_padding_for_quantization": True}, "adds experts"),
        ({"moe_router_padding_for_fp8": True}, "adds experts"),
        ({"overlap_moe_expert_parallel_comm": True}, "interleave"),
        ({"cuda_graph_impl": "local"}, "captured"),
        ({"moe_token_dispatcher_type": "flex"}, "the flex dispatcher"),
        ({"moe_token_dispatcher_type": None}, "dispatcher"),
    ],
)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ReplayRefusedError, match=reason):
        check_config(settings(**changes))


def test_whole_experts_under_tensor_parallelism_are_refused_before_megatron_0_17(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = settings(tensor_model_parallel_size=2, sequence_parallel=True)
    monkeypatch.setattr("routing.hosts.megatron_checks.version", lambda _name: "0.16.1")
    with pytest.raises(ReplayRefusedError, match="gradients"):
        check_config(layout)
    check_config(settings(**vars(layout) | {"expert_tensor_parallel_size": 2}))
    monkeypatch.setattr("routing.hosts.megatron_checks.version", lambda _name: "0.19.2")
    check_config(layout)


def test_right_layouts_pass() -> None:
    check_config(settings())
    check_config(
        settings(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=True)
    )
