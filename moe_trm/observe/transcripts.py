"""A few sampled rollouts of a step, as text and as a page with each token's log-ratio and the correction's decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np

from moe_trm.config.schema import ModelConfig, ObserveConfig
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.observe.report.session_tree import tree_lines
from moe_trm.observe.report.token_rows import Transcript, name_of, shortened, transcript
from moe_trm.observe.report.transcript_page import transcript_page
from moe_trm.observe.sinks import Sink
from moe_trm.runtime.private import write_private
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import RolloutRecord, TrainRow


class Decoder(Protocol):
    """Text that each token adds to the tokens before it, special tokens included."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]: ...


class Transcripts(Sink):
    """Writes `RUN_DIR/transcripts/step-NNNNNN.{txt,html}` every `every` steps, and for the first step it sees.

    There are `rollouts` of them, of different prompts first. The tokenizer of `checkpoint` turns ids into text, read
    when there is something to write, unless there is a `decoder`.
    """

    def __init__(
        self, run_dir: Path, checkpoint: str, *, every: int, rollouts: int, decoder: Decoder | None = None
    ) -> None:
        self._folder, self._checkpoint = run_dir / "transcripts", checkpoint
        self._every, self._most = every, rollouts
        self._due = True
        self._seen: dict[int, Transcript] = {}
        self._decoder = decoder

    def judged(self, rows: Sequence[TrainRow], evidence: Evidence, correction: Correction) -> None:
        """Keeps the first rows of each prompt, and a few more in case there are not enough prompts."""
        if not self._due:
            return
        for place, row in enumerate(rows):
            group, ids = row.record.group_id, self._seen
            prompts = {seen.row.record.group_id for seen in ids.values()}
            enough = len(ids) >= 2 * self._most or (len(ids) >= self._most and group in prompts)
            if row.record.row_id not in ids and not enough:
                ids[row.record.row_id] = transcript(row, place, evidence, correction)

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        selected, self._seen = choose(list(self._seen.values()), self._most), {}
        if selected:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"step-{step:06d}"
            pieces = [self._pieces(entry) for entry in selected]
            write_private(path.with_suffix(".txt"), as_text(step, selected, pieces).encode())
            write_private(path.with_suffix(".html"), transcript_page(step, selected, pieces).encode())
        self._due = (step + 1) % self._every == 0 or (self._due and not selected)

    def _pieces(self, transcript: Transcript) -> list[str]:
        if self._decoder is None:
            self._decoder = Tokens(self._checkpoint)
        return self._decoder.pieces(transcript.row.record.tokens.tolist())


def open_transcripts(observe: ObserveConfig, model: ModelConfig, run_dir: Path, first_step: int) -> Transcripts:
    """As configured; `observe.transcripts` is above 0.

    What an earlier run of this name wrote after `first_step` is removed.
    """
    for path in (run_dir / "transcripts").glob("step-*.*"):
        if int(path.stem.removeprefix("step-")) > first_step:
            path.unlink()
    return Transcripts(run_dir, model.checkpoint, every=observe.transcripts, rollouts=observe.transcript_rollouts)


def choose(seen: Sequence[Transcript], most: int) -> list[Transcript]:
    """At most `most`, of different prompts as far as there are, in their order."""
    firsts: dict[int, Transcript] = {}
    for entry in seen:
        firsts.setdefault(entry.row.record.group_id, entry)
    different = list(firsts.values())
    remaining = [entry for entry in seen if all(entry is not first for first in different)]
    return (different + remaining)[:most]


def as_text(step: int, transcripts: Sequence[Transcript], pieces: Sequence[Sequence[str]]) -> str:
    """Text for a terminal: `[-...-]` around rejected tokens, `{...}` around tokens from a tool or template."""
    parts = [f"Step {step}. [-rejected by the correction-] {{given by a tool or template, not sampled}}"]
    for entry, texts in zip(transcripts, pieces, strict=True):
        record = entry.row.record
        ratios = [value for value in entry.log_ratio if value is not None]
        worst = max(ratios, key=abs, default=0.0)
        kept = sum(value is True for value in entry.keep)
        parts.append(
            f"\n=== {name_of(record).lower()} of prompt {record.prompt_id}: reward {_reward(record)}, advantage "
            f"{entry.advantage:.3g}, "
            f"ended by {record.finish_reason}\n    {record.num_sampled} tokens sampled at weight versions "
            f"{versions(record.versions)}, "
            f"{kept} kept; largest {entry.ratio} log-ratio {worst:+.2g}\n"
        )
        if record.expected:
            parts.append(f"    expected answer: {shortened(record.expected)}\n")
        if len(record.session) > 1:
            parts += [f"    {line}" for line in tree_lines(record.session, record.row)]
        parts.append("".join(_marked(entry, texts)))
    return "\n".join(parts) + "\n"


def _reward(record: RolloutRecord) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_parts.items())
    return f"{record.reward:g} ({parts})" if parts else f"{record.reward:g}"


def versions(values: np.ndarray) -> str:
    """`7`, or `6 to 7` when weights changed in between."""
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _marked(entry: Transcript, texts: Sequence[str]) -> list[str]:
    def mark(place: int) -> tuple[str, str]:
        if entry.kinds[place] == "given":
            return "{", "}"
        return ("[-", "-]") if entry.keep[place] is False else ("", "")

    runs = groupby(range(len(texts)), key=mark)
    return [prefix + "".join(texts[place] for place in places) + after for (prefix, after), places in runs]
