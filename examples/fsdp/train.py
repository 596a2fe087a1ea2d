"""Replay under PyTorch's fully_shard (FSDP2): a tiny mixture of experts on CPUs, in packed rows.

    torchrun --nproc-per-node 2 examples/fsdp/train.py

Each rank has some of the sequences. The engine that sampled is a copy of the model with rounded weights. Every step
prints the loss over all sequences, the norm of the gradient, and the counts of the proof. One rank prints the same as
two.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routing import RouteRecord, Rows, token_digest
from routing.hf import HFReplayer
from routing.hf_context import replay
from routing.replay import Record

LENGTHS, STEPS = (9, 4, 12, 7, 3, 15, 6, 8), 4
CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts=8, num_experts_per_tok=2,
    initializer_range=0.3,
)  # fmt: skip


def packed(tokens: list[Tensor]) -> tuple[Rows, Tensor]:
    """One row of all sequences, and its token ids."""
    ends = torch.tensor([0, *(len(ids) for ids in tokens)]).cumsum(0)
    return Rows.packed(ends), torch.cat(tokens)[None]


def recorded(tokens: list[Tensor]) -> list[RouteRecord]:
    """Routes of a copy of the model with rounded weights; an engine's come from its answers."""
    torch.manual_seed(0)
    engine: Any = Qwen3MoeForCausalLM(CONFIG).eval()
    engine.load_state_dict({name: value.bfloat16().float() for name, value in engine.state_dict().items()})
    rows, input_ids = packed(tokens)
    replayer = HFReplayer(engine)
    with replayer.use_rows(Record(), rows, input_ids) as recording, torch.no_grad():
        engine(input_ids, position_ids=rows.position_ids(), use_cache=False)
    experts = torch.stack([recording.recorded().experts[layer] for layer in replayer.layer_ids], dim=1)
    return [
        RouteRecord(routes[:-1].numpy().astype("uint8"), replayer.layer_ids, 8, token_digest(ids.numpy()))
        for routes, ids in zip(rows.sequences(experts[None]), tokens, strict=True)
    ]


def shared_model(mesh: Any) -> Any:
    """The same model on every rank, then each layer's weights divided over them."""
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(CONFIG).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return model


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    all_tokens = [torch.randint(3, CONFIG.vocab_size, (length,), generator=generator) for length in LENGTHS]
    tokens = all_tokens[rank::size]
    model = shared_model(init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    records, (rows, input_ids) = recorded(tokens), packed(tokens)
    for step in range(STEPS):
        with replay(model, records, input_ids, rows, max_local_flip_rate=1.0, group=dist.group.WORLD) as replayed:
            logits = model(input_ids, position_ids=rows.position_ids(), use_cache=False).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        # A sequence's last token predicts nothing. FSDP takes the mean over ranks.
        total = sum(LENGTHS) - len(LENGTHS)
        loss = -logprobs[rows.without_last()[:, :-1]].sum() / total
        (loss * size).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total_loss = loss.detach().clone()
        dist.all_reduce(total_loss)
        report = replayed.report
        assert report is not None
        summary: dict[str, Any] = {"step": step, "loss": float(total_loss), "gradient_norm": float(norm.full_tensor())}
        summary |= {"replayed": report.replayed, "matched": report.matched, "local_flip_rate": report.local_flip_rate}
        if rank == 0:
            print(json.dumps(summary), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
