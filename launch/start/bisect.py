"""The first operation in which the two engines of a run differ, found by the hidden states of one text on both sides.

Both compute the text from the weights of the checkpoint. What one operation does wrong, all after it have too, so the
first one that differs is the cause. Compared are the stream of the decoder before and after attention and MLP of every
layer, and what its norms make of it (`moe_trm/models/stream_names.py`). Shape letters: T tokens, D width.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from launch.start.checks import Check
from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import ConfigError
from moe_trm.learner.build import build_learner
from moe_trm.learner.protocol import Learner
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.stream_names import around_norm
from moe_trm.rollout.servers.backend import Served, ServerBackend, backend_of
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import start_server
from moe_trm.runtime.private import Scratch
from moe_trm.step.exact import InexactError
from moe_trm.step.fixed_texts import batch_of, fixed_ids
from routing.record.sources import Native

BOUNDS = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.06}
"""Largest relative differences of two right engines, by the coarser arithmetic."""


@dataclass(frozen=True)
class Difference:
    """Distance of a hidden state of the rollout engine from the learner's: `|a - b| / |b|` over all tokens."""

    name: str
    relative: float


def bisect(config: Config, folder: Path) -> Check:
    """Start a server, build the learner on one rank in this process, compare. Files are in `folder`.

    Raises:
        ConfigError: the run starts no server, or its engine writes no hidden states, or serves other weights.
        MoeTrmError: an engine does not come up.
    """
    hf = read_hf_config(config.model.checkpoint)
    if "quantization_config" in hf:
        raise ConfigError("a server of a quantised checkpoint begins without its weights", where="model.checkpoint")
    num_layers = int(hf["num_hidden_layers"])
    ids = fixed_ids(int(hf["vocab_size"]))[:1]
    served = served_states(Served.of(config), folder, ids[0].tolist(), num_layers)
    unsplit = config.learner.model_copy(update={"parallel": ParallelConfig()})
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        learner = build_learner(config.model_copy(update={"learner": unsplit}))
        all_differences = differences(served, learner_states(learner, ids, num_layers))
        bound = BOUNDS[max(config.rollout.server.dtype, unsplit.dtype, key=[*BOUNDS].index)]
        return verdict(all_differences, 0.0 if config.exact else bound)
    finally:
        dist.destroy_process_group()


@contextmanager
def naming_the_cause(learner: Learner, served: Callable[..., Mapping[str, Tensor]]) -> Iterator[None]:
    """An exact run that ends inside of the `with` because the engines differ says in which operation.

    `served`: `served_states` of the run. A learner of several ranks is left as it is.
    """
    try:
        yield
    except InexactError as error:
        if dist.get_world_size() > 1 or not error.token_ids:
            raise
        with Scratch() as folder:
            cause = where_they_differ(learner, served, error.token_ids, folder)
        raise error.because(cause) from error


def where_they_differ(
    learner: Learner, served: Callable[..., Mapping[str, Tensor]], token_ids: Sequence[int], folder: Path
) -> str:
    """The first operation whose bits differ on this text under the learner's weights. Its last token is a target."""
    weights = folder / "weights"
    learner.export_checkpoint(str(weights))
    num_layers = int(read_hf_config(weights)["num_hidden_layers"])
    theirs = served(folder, token_ids, num_layers, weights=weights)
    check = verdict(differences(theirs, learner_states(learner, torch.tensor([[*token_ids]]), num_layers)), 0.0)
    return check.says if check.status == "fail" else "prefill of its text agrees to the last bit, so decoding differs"


def served_states(
    served: Served, folder: Path, token_ids: Sequence[int], num_layers: int, *, weights: Path | None = None
) -> Mapping[str, Tensor]:
    """`[T, D]` of every hidden state that a server of this run computes, by name, in their order.

    `weights`: a Hugging Face folder in place of the checkpoint, served at a free port.
    """
    rollout = served.rollout
    if not rollout.starts_server:
        raise ConfigError(
            "hidden states are those of a server that this command starts", where="config key rollout.url"
        )
    backend, states = backend_of(rollout.engine), folder / "hidden-states"
    arguments = (*rollout.server.extra_args, *backend.writing_states(states))
    settings = rollout.server.model_copy(update={"extra_args": arguments})
    if weights is not None:
        settings = settings.model_copy(update={"port": 0, "random_weights": False})
        served = replace(served, model=served.model.model_copy(update={"checkpoint": str(weights)}))
    rollout = rollout.model_copy(update={"server": settings})
    key = secrets.token_hex(16)
    server = start_server(replace(served, rollout=rollout), folder / "rollout.log", key)
    try:
        http = EngineHttp(server.url, key, timeout_s=rollout.timeout_s, max_attempts=1)
        asyncio.run(_prefill(backend, http, token_ids))
    finally:
        server.stop()
    return backend.hidden_states(states, token_ids, num_layers)


async def _prefill(backend: ServerBackend, http: EngineHttp, token_ids: Sequence[int]) -> None:
    async with http:
        await backend.prefilled(http, token_ids)


def learner_states(learner: Learner, ids_BT: Tensor, num_layers: int) -> Mapping[str, Tensor]:
    """As `served_states`, of one text in this learner; its last token is only a target, and has none."""
    with keeping_states(learner, num_layers) as by_name:
        learner.score([batch_of(ids_BT)], [Native()], temperature=1.0)
    return {name: state[: ids_BT.shape[1] - 1] for name, state in by_name.items()}


@contextmanager
def keeping_states(learner: Learner, num_layers: int) -> Iterator[Mapping[str, Tensor]]:
    """The hidden states of the last pass inside the `with`, by name: `[N, D]` of this rank's layers and tokens."""
    by_name: dict[str, Tensor] = {}

    def keep(names: tuple[str, str], module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        # A norm that is fused with the next operation does nothing here.
        states = zip(names, (args[0], output), strict=True) if output is not args[0] else [(names[0], args[0])]
        by_name.update((name, state.detach().reshape(-1, state.shape[-1]).cpu().clone()) for name, state in states)

    with ExitStack() as hooks:
        for name, module in learner.named_modules():
            if (names := around_norm(name, num_layers)) is not None:
                hooks.callback(module.register_forward_hook(partial(keep, names)).remove)
        yield by_name


def differences(served: Mapping[str, Tensor], learner: Mapping[str, Tensor]) -> Iterator[Difference]:
    """The differences of all hidden states that both engines give, in the learner's order."""
    for name, ours in learner.items():
        if name in served:
            theirs = served[name].reshape(-1, ours.shape[-1])[: len(ours)].double()
            gap = torch.linalg.vector_norm(theirs - ours.double()) / torch.linalg.vector_norm(ours.double())
            yield Difference(name, float(gap))


def verdict(all_differences: Iterator[Difference], bound: float) -> Check:
    """The first difference beyond `bound` as a failed check, with the largest one before it."""
    largest, bits = Difference("none", 0.0), ""
    for difference in all_differences:
        if not difference.relative <= bound:
            says = (
                f"{difference.name} differs first, by {difference.relative:.2g} of its size; before it at most "
                f"{largest.relative:.2g}"
            )
            fix = "Compare this operation's weights and settings in both engines; what comes before it agrees."
            return Check("bisect", "fail", says, fix)
        largest = max(largest, difference, key=lambda candidate: candidate.relative)
        bits = bits or (difference.name if difference.relative else "")
    first = f"; the first bits differ at {bits}" if bits else ", to the last bit"
    return Check("bisect", "ok", f"all hidden states agree, at most {largest.relative:.2g} apart{first}")
