"""One of two ranks that have different columns of the same rows: replay there, against the same work in one process.

`python -m tests.integration.columns_rank` in the environment of torchrun prints a line of JSON for each case and rank.
Attention between the ranks gathers keys and values. Weights are shared by `fully_shard` as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface

from routing import Columns, Rows
from routing.hf_context import replay
from tests.integration.fsdp_rank import whole_gradients
from tests.integration.test_replay_hf import build
from tests.integration.test_replay_rows import LENGTHS, layout, place, records, samples

RANKS, FAMILY = 2, "qwen3_moe"
CASES = [
    (kind, name, recomputed)
    for kind in ("contiguous", "zigzag")
    for name in ("right", "left", "padded within")
    for recomputed in (False, True)
]


class Gathered(torch.autograd.Function):
    """`[...]` of each rank to `[ranks, ...]` on all of them."""

    @staticmethod
    def forward(_ctx: Any, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(parts, mine.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole)
        return whole[dist.get_rank()]


@dataclass
class Attention:
    """Causal attention within sequences, of this rank's queries to the keys of all ranks. `by_rank` is set first."""

    by_rank: tuple[Columns, ...] = ()

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_others: Any
    ) -> tuple[Tensor, None]:
        own = self.by_rank[dist.get_rank()]
        keys, values = (self.whole(part).repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
        scores = query @ keys.transpose(2, 3) * scaling + self.bias(own)[:, None]
        return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None

    def whole(self, mine: Tensor) -> Tensor:
        """`[B, H, C, D]` of this rank to `[B, H, R, D]` of all."""
        parts = Gathered.apply(mine.transpose(1, 2))
        return sum(one.uncut(part) for one, part in zip(self.by_rank, parts, strict=True)).transpose(1, 2)

    @staticmethod
    def bias(own: Columns) -> Tensor:
        """`[B, C, R]`, 0 where a query may look, and at itself always."""
        rows = own.rows
        owner, token = rows.sequence_of().view(rows.shape), rows.mask()
        here, column = own.index, torch.arange(rows.shape[1])
        same = (owner[:, here, None] == owner[:, None]) & token[:, here, None] & token[:, None]
        seen = (same & (column <= here[:, None])) | (column == here[:, None])
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))


ATTENTION = Attention()


def rows_of(name: str) -> Rows:
    if name != "padded within":
        return layout(name)
    room = [-(-length // (2 * RANKS)) * 2 * RANKS for length in LENGTHS]
    ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (LENGTHS, room)]
    return Rows.packed(ends[0], int(ends[1][-1]) + 2 * RANKS, cu_seqlens_padded=ends[1])


def following(rows: Rows, ids: Tensor) -> Tensor:
    """`[B, R]` next token of each place."""
    return ids.flatten().roll(-1).view(rows.shape)


def scored(model: Any, columns: Columns, ids: Tensor, known: Any, group: Any, **mask: Tensor) -> tuple[Tensor, Any]:
    """`[B, C]` log-probs of what follows each place of these columns, and the report."""
    rows = columns.rows
    bound = {"max_local_flip_rate": 1.0, "group": group}
    with replay(model, known, ids, rows, columns=columns, **bound) as replayed:
        logits = model(columns.cut(ids), position_ids=columns.position_ids(), use_cache=False, **mask).logits
    targets = columns.cut(following(rows, ids))
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0], replayed.report


def prepared(recomputed: bool) -> Any:
    model = build(FAMILY)
    if recomputed:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def case(kind: str, name: str, recomputed: bool) -> dict[str, Any]:
    rows, tokens = rows_of(name), samples()
    ids, known = place(rows, tokens), records(FAMILY, tokens, 3)
    due = rows.without_last()
    alone = prepared(recomputed)
    mask = {} if rows.is_packed else {"attention_mask": rows.mask().long()}
    expected, report = scored(alone, Columns(rows), ids, known, None, **mask)
    (-expected[due].sum()).backward()

    cut = Columns.contiguous if kind == "contiguous" else Columns.zigzag
    ATTENTION.by_rank = tuple(cut(rows, rank, RANKS) for rank in range(RANKS))
    own = ATTENTION.by_rank[dist.get_rank()]
    model, mesh = prepared(recomputed), init_device_mesh("cpu", (RANKS,))
    model.set_attn_implementation("gathered")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    got, proved = scored(model, own, ids, known, dist.group.WORLD)
    mine = own.cut(due)
    (-RANKS * got[mine].sum()).backward()  # FSDP takes the mean over ranks
    requested, found = whole_gradients(alone), whole_gradients(model)
    gaps = {one: float((found[one] - whole).norm() / whole.norm()) for one, whole in requested.items()}
    return {
        "case": [kind, name, recomputed],
        "mine": int(mine.sum()),
        "logprobs": float((got - own.cut(expected))[mine].detach().abs().max()),
        "gradients": max(gaps.values()),
        "routers": max(gap for one, gap in gaps.items() if one.endswith("gate.weight")),
        "alone": [report.replayed, report.matched, report.local_flips],
        "ranks": [proved.replayed, proved.matched, proved.local_flips],
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    AttentionInterface.register("gathered", ATTENTION)
    for one in CASES:
        print(json.dumps(case(*one)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
