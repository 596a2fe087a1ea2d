"""SGLang's own models and weight loaders, one rank after the other in one process, and what its checker says of them.

`python -m tests.integration.sglang_ranks CASES.json OUT.json`, with SGLANG_USE_CPU_ENGINE=1: a case has `checkpoint`,
`dtype`, perhaps `damage` (`[rank, tensor]`, of which one element is changed after loading), and arguments of SGLang's
`ServerArgs`. The parallel state of each rank is published as a scheduler of SGLang does it. No process group is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from moe_trm.models.hf_config import read_hf_config
from moe_trm.rollout.sglang.served_differences import config_overrides
from moe_trm.sync.rounding import Rounding


def main() -> None:
    cases, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    out.write_text(json.dumps([answers(case) for case in json.loads(cases.read_text())], default=str))


def answers(case: dict[str, Any]) -> dict[str, Any]:
    """`server`: as of `/server_info`; `ranks`: as of `/weights_checker`; `error`: why the model is not loaded so."""
    from sglang.srt.server_args import ServerArgs

    folder, dtype, damage = Path(case.pop("checkpoint")), case.pop("dtype"), case.pop("damage", None)
    rounding = Rounding(dtype)
    weights = {name: rounding.pushed(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    overrides = json.dumps(config_overrides(read_hf_config(folder)))
    fixed = {"device": "cpu", "skip_tokenizer_init": True, "json_model_override_args": overrides}
    server = ServerArgs(model_path=str(folder), dtype=dtype, **fixed, **case)
    torch.set_default_dtype(getattr(torch, dtype))
    ranks = []
    for rank in range(server.tp_size):
        damaged = damage[1] if damage and damage[0] == rank else None
        try:
            ranks.append(rank_checksums(server, rank, weights, damaged))
        except (AssertionError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"server": server.resolved_dict(), "ranks": ranks}


def rank_checksums(server: Any, rank: int, weights: Mapping[str, torch.Tensor], damaged: str | None) -> Any:
    """What this rank answers, in the form that SGLang sends."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.utils.weight_checker import WeightChecker

    context = create_context(server, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    parallel = context.parallel
    whole = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)
    groups = {
        f"{name}_group": SimpleNamespace(
            rank_in_group=getattr(parallel, f"{name}_rank"),
            world_size=getattr(parallel, f"{name}_size"),
            cpu_group=None,
            device_group=None,
        )
        for name in ("tp", "attn_tp", "moe_tp", "moe_ep")
    }
    parallel.override_permanently(pp_group=whole, **groups)
    with use_context(context):
        initialize_dp_attention_flags(server)
        config = ModelConfig.from_server_args(server)
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            # SGLang on a CPU reads these under other names, after it has added heads where ranks do not divide them.
            if heads := getattr(config.hf_text_config, name, None):
                setattr(config.hf_text_config, f"{name}_cpu", heads)
        model = _initialize_model(config, LoadConfig())
        # Loaders may write into what they are given.
        model.load_weights((name, tensor.clone()) for name, tensor in weights.items())
        if damaged is not None:
            with torch.no_grad():
                dict(model.named_parameters())[damaged].view(-1)[-1] += 1
        answer = WeightChecker(get_model=lambda: model).handle("checksum", role="target")
    assert answer is not None
    return {**answer, "parallelism_info": [answer["parallelism_info"]]}


if __name__ == "__main__":
    main()
