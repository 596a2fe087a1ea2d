"""A learner on Transformer Engine's layout of layers, on real ranks without CUDA.

Started by torchrun: `fused.py CHECKPOINT OUT RUN [RUN ...]`.

Megatron-Core's own specification for Transformer Engine puts the model together, its `TEGroupedMLP` included. The
stand-in for Transformer Engine has its modules' parameters (a norm's weight in the linear layer behind it, one weight
for each expert of a grouped layer) and computes in plain torch. RUN as of `runs.py`, with `layers=fused` or
without. Nothing is asserted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_trm.checkpoint.pieces import PieceReader, write_pieces
from moe_trm.sync.rounding import Rounding
from routing.replay import Native
from tests.integration.learner_support.conformance import build, save, work
from tests.integration.learner_support.runs import do_runs
from tests.integration.learner_support.work import objective


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the learner build fused layers on this machine."""
    from moe_trm.learner.megatron import build as learner_build
    from moe_trm.learner.megatron import cpu_shim, fp8

    cpu_shim.install()
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from moe_trm.learner.megatron.cpu_attention import CausalAttention
    from moe_trm.learner.megatron.cpu_spec import RMSNorm

    class NormAndLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
            self.eps = config.layernorm_epsilon

        def forward(self, values: Tensor, *rest: Any, **options: Any) -> Any:
            normed = F.rms_norm(values, values.shape[-1:], self.layer_norm_weight, self.eps)
            return super().forward(normed, *rest, **options)

    class Grouped(torch.nn.Module):
        def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_options: Any) -> None:
            super().__init__()
            self.num_gemms = num_gemms
            for number in range(num_gemms):
                weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
                weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                self.register_parameter(f"weight{number}", weight)

        def forward(self, tokens: Tensor, splits: list[int]) -> tuple[Tensor, None]:
            parts = tokens.split(splits)
            products = [F.linear(part, getattr(self, f"weight{number}")) for number, part in enumerate(parts)]
            return torch.cat(products), None

    class Provider(LocalSpecProvider):  # type: ignore[misc]
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def linear(self) -> type:
            return Linear

        def column_parallel_linear(self) -> type:
            return ColumnParallelLinear

        def row_parallel_linear(self) -> type:
            return RowParallelLinear

        def column_parallel_layer_norm_linear(self) -> type:
            return NormAndLinear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return RMSNorm

        def core_attention(self) -> type:
            return CausalAttention

        def grouped_mlp_modules(self, use_grouped: bool, use_legacy: bool) -> tuple[type, Any]:
            assert use_grouped
            assert not use_legacy
            return TEGroupedMLP, MLPSubmodules(linear_fc1=Grouped, linear_fc2=Grouped)

    patch.setattr(gpt_layer_specs, "TESpecProvider", Provider, raising=False)
    patch.setattr(gpt_layer_specs, "TENorm", RMSNorm, raising=False)
    patch.setattr(learner_build, "layers_here", lambda _learner: "transformer_engine")
    # Rows are padded as 8-bit products need it, which must change nothing.
    patch.setattr(fp8, "alignment", lambda _learner: 16)


def run(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Score, train a step, save; then take over what the run `from` saved."""
    learner = build(checkpoint, options)
    batches, random, numbers = work(learner)
    learner.export_shard(str(out / "before"), Rounding("float32"))
    scores = [*learner.score(batches, [Native()] * len(batches)), *learner.score(batches, random)]
    first = learner.update(batches, random, objective(batches, []))
    learner.export_shard(str(out / "after"), Rounding("float32"))
    pieces, counters = learner.state()
    (out / "state").mkdir(exist_ok=True)
    write_pieces(out / "state" / f"rank-{dist.get_rank()}.safetensors", pieces)
    dist.barrier()
    names = [f"{kind}.{number}" for kind in ("native", "replayed") for number in numbers]
    save(out, "scores", {name: score.logprobs for name, score in zip(names, scores, strict=True)})
    chunk: Any = learner._chunks[0]  # type: ignore[attr-defined]
    padded = learner._parts.padded(batches[0]).input_ids.shape[1]  # type: ignore[attr-defined]
    applied = learner.replay_report().applied_fraction
    save(out, "facts", {"norm": first.grad_norm, "applied": applied, "columns": padded})
    save(out, "parameters", {name: torch.tensor(value.shape) for name, value in chunk.named_parameters()})
    if "from" in options:
        other = build(checkpoint, options)
        other.restore(PieceReader(sorted((out.parent / options["from"] / "state").glob("*.safetensors"))), counters)
        other.export_shard(str(out / "restored"), Rounding("float32"))


def with_layers(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """The run on the layers that it names."""
    with pytest.MonkeyPatch.context() as patch:
        if options.get("layers") == "fused":
            install(patch)
        run(checkpoint, out, options | {"backend": "megatron"})


if __name__ == "__main__":
    do_runs(with_layers)
