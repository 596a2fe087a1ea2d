"""Cost of replay: forward and backward of a small Megatron model on the CPU, with the rollout's and with its own
routes.

`python -m benchmarks.replay_overhead --json FILE`. Native and replayed passes alternate in one process. Every figure is
the median over pairs, by CPU time and by wall time. The proof is timed directly, inside the replayed passes: the second
cut of the records, the count of local flips, the comparison with the dispatcher's map, the report. Replayed routes are
the model's own, so both sides compute the same.

Shape letters: B sequences, R tokens of each, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.options import command_line
from benchmarks.table import Row, report
from routing import Layout, RouteRecord, token_digest
from routing.layout.packed import AnyLayout
from routing.megatron import MegatronReplayer
from routing.record.sources import Native, Record, ReplayRecords, RouteSource
from routing.replay.replay_pass import ReplayPass

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 8, 2, 512


class Batch(TypedDict):
    """The rows of a micro-batch, each `[B, R]`."""

    input_ids: Tensor
    target_ids: Tensor
    valid: Tensor


class Clock:
    """Seconds of CPU time spent in timed calls; a call inside of another counts once."""

    def __init__(self) -> None:
        self.spent_s, self._is_running = 0.0, False

    def take(self) -> float:
        spent, self.spent_s = self.spent_s, 0.0
        return spent

    def time(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._is_running:
            return call(*args)
        self._is_running, started = True, time.process_time()
        try:
            return call(*args)
        finally:
            self._is_running = False
            self.spent_s += time.process_time() - started


class TimedPass(ReplayPass):
    """A pass whose counting is timed."""

    clock: Clock

    def count(self, layer: int, live: Tensor, targets: Tensor, recompute: bool) -> None:
        self.clock.time(super().count, layer, live, targets, recompute)

    def prove(self, layer: int, matches: Callable[[Tensor], Tensor], recompute: bool) -> None:
        self.clock.time(super().prove, layer, matches, recompute)


class TimedReplayer(MegatronReplayer):
    """A replayer whose proof is timed; `use` does the rest of replay untimed."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self.clock = clock
        super().__init__(model)

    def new_pass(self, source: RouteSource, layer_ids: Sequence[int], num_local: int) -> ReplayPass:
        timed = TimedPass(source, layer_ids, num_local, self._counters)
        timed.clock = self.clock
        return timed

    def _cut_again(self, routes_SLK: np.ndarray, rows_B: np.ndarray, layout: AnyLayout) -> np.ndarray:
        expected: np.ndarray = self.clock.time(super()._cut_again, routes_SLK, rows_B, layout)
        return expected


def build_model(hidden: int, recompute: bool) -> Any:
    """A random GPT with a mixture of experts in every layer."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_trm.learner.megatron.cpu import cpu_block_spec

    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=hidden, ffn_hidden_size=2 * hidden, moe_ffn_hidden_size=hidden,
        num_attention_heads=4, num_query_groups=2, kv_channels=hidden // 4, normalization="RMSNorm", qk_layernorm=True,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False, num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K, moe_layer_freq=1, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32", use_cpu_initialization=True,
        params_dtype=torch.float32, **(again if recompute else {}),
    )  # fmt: skip
    return GPTModel(config, cpu_block_spec(config), VOCAB, 4096, position_embedding_type="rope")


def random_batch(rows: int, length: int) -> Batch:
    tokens = torch.randint(1, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "target_ids": tokens[:, 1:].contiguous(),
        "valid": torch.ones(rows, length, dtype=torch.bool),
    }


def forward(replayer: MegatronReplayer, model: Any, source: RouteSource, batch: Batch) -> tuple[Tensor, ReplayPass]:
    layout = Layout(*batch["input_ids"].shape)
    with replayer.use(source, layout, **batch) as running:
        positions = torch.arange(layout.length).expand(layout.batch, layout.length)
        return model(batch["input_ids"], positions, None, labels=batch["target_ids"]), running


def own_routes(replayer: MegatronReplayer, model: Any, batch: Batch) -> ReplayRecords:
    """The routes that `model` chooses itself, as the rollout engine would have sent them."""
    with torch.no_grad():
        recorded = forward(replayer, model, Record(), batch)[1].recorded()
    layout = Layout(*batch["input_ids"].shape)
    routes_BRLK = torch.stack([layout.from_router(recorded.experts[layer]) for layer in replayer.layer_ids], 2)
    tokens = torch.cat([batch["input_ids"], batch["target_ids"][:, -1:]], 1).numpy()
    return ReplayRecords(
        tuple(
            RouteRecord(routes.numpy().astype(np.uint8), replayer.layer_ids, EXPERTS, token_digest(ids))
            for routes, ids in zip(routes_BRLK, tokens, strict=True)
        )
    )


def measure(rows: int, length: int, hidden: int, repeats: int, *, recompute: bool) -> Row:
    torch.manual_seed(0)
    model, batch, clock = build_model(hidden, recompute), random_batch(rows, length), Clock()
    replayer = TimedReplayer(model, clock)
    routes = own_routes(replayer, model, batch)

    def step(source: RouteSource) -> tuple[float, float]:
        model.zero_grad()
        cpu, wall = time.process_time(), time.perf_counter()
        # As in a step: nothing that an earlier pass made of the same source is there yet.
        fresh_source = ReplayRecords(source.records) if isinstance(source, ReplayRecords) else source
        forward(replayer, model, fresh_source, batch)[0].mean().backward()  # type: ignore[no-untyped-call]
        clock.time(replayer.report)
        return time.process_time() - cpu, time.perf_counter() - wall

    step(Native()), step(routes), clock.take()
    pairs, proofs = [], []
    for turn in range(repeats):
        # Which side goes first alternates, so that a drift of the machine cancels.
        if turn % 2:
            replayed, proof = step(routes), clock.take()
            native = step(Native())
        else:
            native = step(Native())
            clock.take()
            replayed, proof = step(routes), clock.take()
        pairs.append((native, replayed))
        proofs.append(proof)
        clock.take()
    return {
        "batch": rows,
        "length": length,
        "hidden": hidden,
        "recompute": "full" if recompute else "none",
        "native ms": 1e3 * median(native[0] for native, _ in pairs),
        "replay ms": 1e3 * median(replayed[0] for _, replayed in pairs),
        "replay %": 100 * (median(replayed[0] / native[0] for native, replayed in pairs) - 1),
        "replay wall %": 100 * (median(replayed[1] / native[1] for native, replayed in pairs) - 1),
        "proof ms": 1e3 * median(proofs),
        "proof %": 100 * median(proof / native[0] for proof, (native, _) in zip(proofs, pairs, strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--rows", type=int, default=32, help="sequences B (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens R (default: %(default)s)")
    parser.add_argument("--hidden", type=int, nargs="*", default=[128, 256], help="hidden sizes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="pairs per row (default: %(default)s)")
    options = parser.parse_args(argv)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from moe_trm.learner.megatron.cpu import install

    install()
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    rows = [
        measure(options.rows, options.length, hidden, options.repeats, recompute=recompute)
        for hidden in options.hidden
        for recompute in (False, True)
    ]
    report("Replay against native routing: forward and backward, CPU time, medians over pairs", rows, options.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
