"""Texts under one checkpoint's weights on both engines: prefill and routes of a server, and scores of the learner.

Shape letters: T tokens of a text, S sampled ones, L MoE layers, K experts per token, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from moe_trm.batch.collate import collate
from moe_trm.learner.build import close_learner
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.stream_names import around_norm
from moe_trm.models.tensors import EMBEDDING, OUTPUT
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.servers.backend import Served, backend_of
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import start_server
from moe_trm.runtime.private import Scratch
from moe_trm.step.probe.pooled import k3
from moe_trm.sync.manifest import WeightPush
from moe_trm.tools.evaluate.measure import push_of
from moe_trm.tools.growth.split import Array, CellTokens
from moe_trm.types import MicroBatch, RolloutRecord, SamplingParams, TrainRow
from routing import RouteRecord, token_digest
from routing.judge.flips import sets_differ
from routing.record.sources import Native, Record, RouteSource

CHUNK = 512
"""Tokens whose logits are in memory at once."""
SAME = 0.05
"""Mean distance in nats at which log-probs from the hidden states still count as the learner's own."""


@dataclass(frozen=True)
class ServedText:
    """`[S]` log-probs at temperature 1 by prefill, and the routes of that prefill, bound to the text's record."""

    logprobs: Array
    routes: RouteRecord


Serve = Callable[[Path, Sequence[RolloutRecord]], Sequence[ServedText]]
"""Texts in a server that was given the weights of this Hugging Face folder."""
LearnerAt = Callable[[Path], AbstractContextManager[Learner]]
"""A learner with the weights of this Hugging Face folder."""


def served_texts(
    served: Served, connect: Callable[[str, str], RolloutEngine], weights: Path, records: Sequence[RolloutRecord]
) -> Sequence[ServedText]:
    """A server is started, given `weights` by a push that is proved, and asked for all texts.

    `connect`: the engine of a run on a server with this address and key, which records routes.
    """
    with Scratch() as folder:
        key = secrets.token_hex(16)
        server = start_server(served, folder / "rollout.log", key)
        try:
            push = push_of(weights, served.rollout.server.dtype, folder)

            async def work() -> list[ServedText]:
                async with EngineHttp(server.url, key, timeout_s=served.rollout.timeout_s, max_attempts=2) as http:
                    prefill = partial(backend_of(served.rollout.engine).prefilled, http)
                    return await ask(connect(server.url, key), prefill, push, records)

            return asyncio.run(work())
        finally:
            server.stop()


async def ask(
    engine: RolloutEngine,
    prefill: Callable[[Sequence[int]], Awaitable[Array]],
    push: WeightPush,
    records: Sequence[RolloutRecord],
) -> list[ServedText]:
    """Log-probs and routes of the texts from an engine that takes the push first. `prefill`: see `ServerBackend`."""
    texts = []
    try:
        await engine.start()
        await engine.load_weights(push)
        for record in records:
            ids = record.tokens.tolist()
            logprobs = await prefill(ids)
            # One more token is sampled after all but the last: its routes are those of the text.
            routes = (await engine.turn(ids[:-1], SamplingParams(max_new_tokens=1))).routes
            assert routes is not None, "routes were asked for"
            bound = replace(routes, token_digest=token_digest(record.tokens, record.origin))
            texts.append(ServedText(logprobs[record.sampled[1:]], bound))
    finally:
        await engine.close()
    return texts


def learner_by(build: Callable[[Path], Learner], backend: str) -> LearnerAt:
    """The run's learner on the one rank of this process; `build` makes it from the weights of a folder."""

    @contextmanager
    def learner_at(weights: Path) -> Iterator[Learner]:
        dist.init_process_group(store=HashStore(), rank=0, world_size=1)
        try:
            yield build(weights)
        finally:
            close_learner(backend)

    return learner_at


class Head:
    """The output of a checkpoint, by which entropy and rounding follow from the last hidden state."""

    def __init__(self, weights: Path) -> None:
        checkpoint = HfCheckpoint(weights)
        self._weight_VH = checkpoint.read(OUTPUT if OUTPUT in checkpoint.names else EMBEDDING).float()
        self.num_layers = int(read_hf_config(weights)["num_hidden_layers"])

    def measure(self, hidden_SH: Tensor, targets_S: Tensor, logprobs: Array) -> tuple[Array, Array]:
        """`[S]` entropy, and k3 of rounding the hidden state to bfloat16; NaN where the output is another function."""
        entropy, unit, gap = [], [], []
        for hidden, targets in zip(torch.split(hidden_SH.float(), CHUNK), torch.split(targets_S, CHUNK), strict=True):
            exact, rounded = (
                (h @ self._weight_VH.T).double().log_softmax(-1) for h in (hidden, hidden.bfloat16().float())
            )
            of_targets, of_rounded = (part.gather(1, targets[:, None])[:, 0].numpy() for part in (exact, rounded))
            entropy.append(-(exact.exp() * exact).sum(-1).numpy())
            unit.append(k3(of_rounded - of_targets))
            gap.append(of_targets)
        if not np.abs(np.concatenate(gap) - logprobs).mean() <= SAME:
            return np.full(len(logprobs), np.nan), np.full(len(logprobs), np.nan)
        return np.concatenate(entropy), np.concatenate(unit)


def cell_of(learner: Learner, head: Head, record: RolloutRecord, served: ServedText) -> CellTokens:
    """The sampled tokens of one text in both engines at the learner's weights."""
    with _last_norm(learner, head.num_layers) as states:
        scores = _score(learner, record, Record())
    native, count = _of_sampled(scores.logprobs, record), record.num_tokens - 1
    replayed = _of_sampled(_score(learner, replace(record, routes=served.routes), None).logprobs, record)
    experts, margins = choices(scores, learner.moe_layer_ids, record)
    unknown = np.full(len(native), np.nan)
    entropy, unit, scale = unknown, unknown, unknown
    if "out" in states:
        here = torch.from_numpy(record.sampled[1:])
        targets = torch.from_numpy(record.tokens[1:][record.sampled[1:]].astype(np.int64))
        entropy, unit = head.measure(states["out"][:count][here], targets, native)
        scale = states["in"][:count][here].float().pow(2).mean(-1).sqrt().double().numpy()
    return CellTokens(
        native - served.logprobs,
        replayed - served.logprobs,
        flips(served.routes, experts, learner.moe_layer_ids, record),
        margins,
        entropy,
        unit,
        scale,
    )


def score_again(learner: Learner, record: RolloutRecord, *, replays: bool, keeps_masks: bool) -> tuple[Array, Array]:
    """`[S]` log-probs of the run's own pass, made again: over the vocabulary, and as the run scores them."""
    source = None if replays else Native()
    full = _of_sampled(_score(learner, record, source).logprobs, record)
    if not keeps_masks or record.sampling_mask is None:
        return full, full
    kept = _score(learner, record, source, keep_mask=True).logprobs
    over_kept = np.full(len(full), np.nan)
    over_kept[record.scored] = (
        kept[0, : record.num_tokens - 1].cpu().double().numpy()[record.sampled[1:]][record.scored]
    )
    return full, over_kept


def native_pass(learner: Learner, record: RolloutRecord) -> Scores:
    """One text by the learner's own routes, which are recorded."""
    return _score(learner, record, Record())


def choices(scores: Scores, layers: Sequence[int], record: RolloutRecord) -> tuple[Array, Array]:
    """`[S, L, K]` experts and `[S, L]` margins of a `Record` pass; NaN where a router has none."""
    assert scores.recorded is not None
    shape, here = scores.logprobs.shape, torch.from_numpy(record.sampled[1:])
    experts, margins = [], []
    for layer in layers:
        experts.append(scores.recorded.by_row(layer, *shape)[0, : len(here)].cpu()[here])
        by_row = scores.recorded.margins_by_row(layer, *shape)
        unknown = torch.full((int(here.sum()),), float("nan"))
        margins.append(unknown if by_row is None else by_row[0, : len(here)].cpu()[here])
    return torch.stack(experts, 1).numpy(), torch.stack(margins, 1).double().numpy()


def flips(routes: RouteRecord, experts_SLK: Array, layers: Sequence[int], record: RolloutRecord) -> Array:
    """`[S, L]` bool: the routes of the text choose other sets than the learner."""
    theirs = routes.select(layers).experts[record.sampled[1:]].astype(np.int64)
    result: Array = sets_differ(torch.from_numpy(theirs), torch.from_numpy(experts_SLK)).numpy()
    return result


def _score(learner: Learner, record: RolloutRecord, source: RouteSource | None, *, keep_mask: bool = False) -> Scores:
    """One text; `source` None replays the record's routes."""
    row = record if keep_mask else replace(record, sampling_mask=None)
    batch = collate(MicroBatch((TrainRow(row),)), keep_mask=keep_mask)
    [scores] = learner.score([batch], [source or batch.rollout_routes], temperature=1.0)
    learner.replay_report()
    return scores


def _of_sampled(values: Tensor, record: RolloutRecord) -> Array:
    result: Array = values[0, : record.num_tokens - 1].cpu().double().numpy()[record.sampled[1:]]
    return result


@contextmanager
def _last_norm(learner: Learner, num_layers: int) -> Iterator[dict[str, Tensor]]:
    """Input and output of the last norm, `[T, H]` each; nothing where there is no such module."""
    states: dict[str, Tensor] = {}

    def keep(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        for name, state in (("in", args[0]), ("out", output)):
            states[name] = state.detach().reshape(-1, state.shape[-1]).cpu()

    hooks = [
        module.register_forward_hook(keep)
        for name, module in learner.named_modules()
        if (around_norm(name, num_layers) or ("", ""))[1] == "final norm"
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
