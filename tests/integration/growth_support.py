"""Two checkpoints of a tiny model, texts of each, and growths planted between them.

The server is the model of transformers with a little noise on its weights, the learner is Megatron-Core's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.tools.growth.cells import Serve, ServedText
from moe_trm.tools.growth.examine import Growth, StoredTexts, judge, measure
from moe_trm.types import RolloutRecord, TokenBatch
from routing import RouteRecord, expert_dtype, token_digest
from routing.hf import HFReplayer
from routing.record.sources import Record, ReplayReport, RouteSource
from tests.unit.doubles import StandInLearner

STEPS, PROMPTS, GROUP, PROMPT = (10, 20), 12, 1, 6
NOISE, ROUTER_NOISE = 2e-4, 2e-4
Change = Callable[[str, Tensor], Tensor]


class NoisyServer:
    """The model in `folder` with noise of a fixed size on its weights."""

    def __init__(self, folder: Path) -> None:
        self._causal = load_policy(HfCheckpoint(folder), "float32", recompute=False).causal.eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, weight in self._causal.named_parameters():
                is_router = name.endswith(("gate.weight", "router.weight"))
                drawn = torch.randn(weight.shape, generator=generator)
                weight.add_(drawn * ROUTER_NOISE if is_router else NOISE * weight * drawn)

    @torch.no_grad()
    def score(self, ids_T: Tensor) -> tuple[np.ndarray, RouteRecord]:
        """`[T - 1]` log-probs and routes, bound to nothing but the tokens."""
        inputs, targets = ids_T[None, :-1], ids_T[None, 1:]
        replayer = HFReplayer(self._causal, max_local_flip_rate=1.0)
        with replayer.use(Record(), inputs, targets, torch.ones_like(inputs, dtype=torch.bool)) as opened:
            logprobs = self._causal(inputs).logits.double().log_softmax(-1)
        replayer.detach()
        recorded, layers, number = opened.recorded(), replayer.layer_ids, replayer.num_experts
        experts = torch.stack([recorded.by_row(layer, *inputs.shape)[0] for layer in layers], dim=1).numpy()
        routes = RouteRecord(experts.astype(expert_dtype(number)), layers, number, token_digest(ids_T.numpy()))
        return logprobs.gather(-1, targets[..., None])[0, :, 0].numpy(), routes

    @torch.no_grad()
    def sample(self, length: int, seed: int) -> Tensor:
        """`[B, T]` ids."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, 120, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, dim=0)
        while ids.shape[1] < length:
            probs = self._causal(ids).logits[:, -1].float().softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], dim=1)
        return ids


@lru_cache(maxsize=4)
def server(folder: Path) -> NoisyServer:
    return NoisyServer(folder)


def serve(folder: Path, records: Sequence[RolloutRecord]) -> list[ServedText]:
    """As `cells.Serve`."""
    texts = []
    for record in records:
        logprobs, routes = server(folder).score(torch.from_numpy(record.tokens.astype(np.int64)))
        texts.append(ServedText(logprobs[record.sampled[1:]], routes.bind(record.tokens, record.origin)))
    return texts


def texts_of(sampler: NoisyServer, version: int, *, length: int = 30, label: int | None = None) -> StoredTexts:
    """What a run records of this server: texts, log-probs and routes, `label` the version of their weights."""
    records = []
    for number, ids in enumerate(sampler.sample(length, seed=version)):
        logprobs, routes = sampler.score(ids)
        tokens, sampled = ids.numpy().astype(np.int32), np.arange(len(ids)) >= PROMPT
        values = logprobs[sampled[1:]].astype(np.float32)
        record = RolloutRecord(
            sample_id=number,
            group_id=number // GROUP,
            prompt_id=str(number // GROUP),
            tokens=tokens,
            sampled=sampled,
            turn_ids=np.zeros(len(ids), np.int16),
            rollout_logprobs=values,
            full_logprobs=values,
            versions=np.full(len(values), version if label is None else label, np.int32),
            routes=None,
            sampling_mask=None,
            finish_reason="length",
        )
        records.append(replace(record, routes=routes.bind(tokens, record.origin)))
    return StoredTexts(version, tuple(records), {})


def changed(folder: Path, target: Path, change: Change) -> Path:
    """A copy of a checkpoint whose tensors are changed."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def trained(name: str, tensor: Tensor) -> Tensor:
    """A little training: other weights everywhere."""
    generator = torch.Generator().manual_seed(len(name))
    return tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.dim() > 1 else tensor


class PlainLearner(StandInLearner):
    """The model of transformers in float32."""

    def __init__(self, folder: Path) -> None:
        self._causal = load_policy(HfCheckpoint(folder), "float32", recompute=False).causal.eval()
        self._replayer = HFReplayer(self._causal, max_local_flip_rate=1.0)
        self.moe_layer_ids = self.model_moe_layer_ids = self._replayer.layer_ids

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        modules: Iterator[tuple[str, torch.nn.Module]] = self._causal.named_modules()
        return modules

    @torch.no_grad()
    def score(self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], **options: object) -> list[Scores]:
        [batch], [source] = batches, sources
        with self._replayer.use(source, batch.input_ids, batch.target_ids, batch.valid) as opened:
            logprobs = self._causal(batch.input_ids).logits.double().log_softmax(-1)
        targets = logprobs.gather(-1, batch.target_ids[..., None])[..., 0]
        return [Scores(targets * batch.mask, recorded=opened.recorded() if isinstance(source, Record) else None)]

    def replay_report(self) -> ReplayReport:
        return self._replayer.report()


@contextmanager
def learner_at(folder: Path) -> Iterator[Learner]:
    """As `cells.LearnerAt`."""
    yield PlainLearner(folder)


def examined(
    start: Path, weights: Path, texts: Sequence[StoredTexts], *, served: Serve = serve, replays: bool = False
) -> Growth:
    """The split between two checkpoints."""
    cells, tokens = measure(texts, [start, weights], served, learner_at, replays=replays, keeps_masks=False)
    return judge(STEPS, tokens, cells, [len(part.records) for part in texts], replays=replays)
