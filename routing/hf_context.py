"""Replay of one forward of a Hugging Face model inside a `with`, for trainers that keep nothing between forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from routing.hf import HFReplayer
from routing.layout.columns import Columns
from routing.layout.rows import Rows
from routing.record.record import RouteRecord
from routing.record.sources import ReplayRecords, ReplayReport


@dataclass
class Replayed:
    """The value that `replay` yields.

    Attributes:
        rows: where the sequences lie in `input_ids`; `rows.position_ids()` are theirs.
        report: what was proved of the forward, once the context is left.
    """

    rows: Rows
    report: ReplayReport | None = None


@contextmanager
def replay(
    model: nn.Module,
    records: Sequence[RouteRecord | None],
    input_ids: Tensor,
    attention_mask: Tensor | Rows | None = None,
    *,
    target_ids: Tensor | None = None,
    columns: Columns | None = None,
    origins: Sequence[bytes | None] = (),
    samples: Sequence[int] | None = None,
    at_sampling: Sequence[bool | None] = (),
    prompts: Sequence[int] = (),
    max_local_flip_rate: float = 0.3,
    missing: Literal["reject", "native"] = "reject",
    group: ProcessGroup | None = None,
) -> Iterator[Replayed]:
    """Context for exactly one forward of `model`, whose experts are those of `records`; proved when it is left.

    ```python
    with replay(model, records, input_ids, attention_mask) as replayed:
        logits = model(input_ids, attention_mask=attention_mask).logits
    print(replayed.report.local_flip_rate)
    ```

    A backward may come inside or later. Layers that it recomputes (gradient checkpointing) get the same routes, and a
    later backward is proved when it ends. Padding and the last token of each sequence keep the gate's own choice.

    Args:
        model: any that `routing.hf.HFReplayer` takes.
        records: one for each sequence of T tokens, with routes of T - 1 and the digest of its tokens; None on rows of
            padding alone.
        input_ids: `[B, R]`.
        attention_mask: `[B, R]`, 1 on tokens, which stand without a gap: padding is on either side, as TRL and verl
            pad. Or `Rows`, as of packed sequences. None: no padding.
        target_ids: `[B, R]` next tokens, where the rows stop before the last token of each sequence.
        columns: as of `HFReplayer.use_rows`.
        origins: likewise.
        samples: likewise.
        at_sampling, prompts: as of `ReplayRecords`; unknown where empty, and then fewer faults can be found.
        max_local_flip_rate: as of `HFReplayer`.
        missing: likewise.
        group: ranks whose forwards are one, as under `fully_shard` or context parallelism. The report is of them all,
            and an error of the proof is raised on all (collective: all of them leave the context). None: this process.
            A later backward is proved on its own rank.

    Raises:
        ReplayRefusedError: a model without experts, or with gates that cannot be replayed.
        RouteError: records of other tokens, rows or models, before anything is computed.
        ReplayProofError: a forward that did not use the records, or that was none or several.
        FlipBoundError: too many flips, in all or in one sample.
    """
    if isinstance(attention_mask, Rows):
        rows = attention_mask
    else:
        rows = Rows.padded(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
    replayer = HFReplayer(model, max_local_flip_rate=max_local_flip_rate, missing=missing)
    replayed, source = (
        Replayed(rows),
        ReplayRecords(tuple(records), tuple(origins), at_sampling=tuple(at_sampling), prompts=tuple(prompts)),
    )
    try:
        with replayer.use_rows(source, rows, input_ids, target_ids, columns=columns, samples=samples):
            yield replayed
        replayed.report = replayer.report(group)
    finally:
        replayer.rest()
