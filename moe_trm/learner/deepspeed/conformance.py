"""The proof that replay is exact for a family, on a tiny model of the same classes with random weights.

| step | what holds |
|---|---|
| `build` | transformers builds the model |
| `attach` | each gate is understood (`routing.hosts.hf_gates`) |
| `native` | a pass with its own recorded routes has the bits of the pass that recorded them |
| `forced` | with random routes, log-probs are those of the gates' own code under that choice |
| `gradient` | so is the gradient of each router, and it is not zero |
| `dispatch` | each token was proved in each layer |

The gates' own code under another choice: inside a gate, the `torch.topk` over experts gives the chosen ids.

Shape letters: T tokens, L layers with experts, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_trm.errors import CheckpointError
from moe_trm.models.hf_config import library_config
from moe_trm.models.registry import find_family
from moe_trm.models.tiny.shrunk import EXPERT_KEYS, VOCABULARY, shrunk
from routing.hf import HFReplayer, gate_of, moe_blocks
from routing.record.record import RouteRecord, token_digest
from routing.record.sources import Record, ReplayRecorded, ReplayRecords, RouteSource

NUM_TOKENS = 12
ATOL, GRADIENT_RTOL = 2e-5, 1e-3
"""In float32, where rounding alone gives at most 1e-6, and a wrong expert more than 1e-3."""
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Of code that was never run here, and of the replay that refuses it."""


@dataclass(frozen=True)
class Conformance:
    """The step at which a family failed and why; both empty: it is proved."""

    step: str = ""
    problem: str = ""


class _Steps:
    """The steps in order; each is a method that returns what is wrong, or nothing."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self._hf_config = hf_config
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(3, VOCABULARY, (1, NUM_TOKENS + 1), generator=generator)
        self._rows: dict[str, Any] = {
            "input_ids": self._tokens[:, :-1],
            "target_ids": self._tokens[:, 1:],
            "valid": torch.ones(1, NUM_TOKENS, dtype=torch.bool),
        }

    def build(self) -> str:
        self._causal = _tiny(self._hf_config)
        return ""

    def attach(self) -> str:
        self._replayer = HFReplayer(self._causal, max_local_flip_rate=1.0)
        return ""

    def native(self) -> str:
        with torch.no_grad():
            with self._replayer.use(Record(), **self._rows) as running:
                self._native = self._scores()
            again = self._replayed(ReplayRecorded(running.recorded()))
        self._replayer.report()
        return "" if torch.equal(again, self._native) else f"log-probs differ by {_gap(again, self._native):.1e}"

    def forced(self) -> str:
        layers, experts = self._replayer.layer_ids, self._replayer.num_experts
        drawn = np.random.default_rng(0).random((NUM_TOKENS, len(layers), experts))
        routes = np.argsort(drawn, axis=-1)[..., : self._replayer.top_k]
        record = RouteRecord(routes.astype(np.uint8), layers, experts, token_digest(self._tokens[0].numpy()))
        replayed = self._replayed(ReplayRecords((record,)))
        self._gradients = [_router_gradients(self._causal, replayed)]
        self._report = self._replayer.report()
        self._replayer.detach()
        with own_choice(self._causal, routes):
            by_gates = self._scores()
        self._gradients.append(_router_gradients(self._causal, by_gates))
        if (gap := _gap(replayed, by_gates)) > ATOL:
            return f"log-probs differ by {gap:.1e} from the gates' own code under the same choice"
        return "" if _gap(by_gates, self._native) > 10 * ATOL else "another choice of experts changes no log-prob"

    def gradient(self) -> str:
        for layer, ours, by_gates in zip(self._replayer.layer_ids, *self._gradients, strict=True):
            size = float(by_gates.norm())
            if not size:
                return f"layer {layer}: the router has no gradient"
            if (error := float((ours - by_gates).norm()) / size) > GRADIENT_RTOL:
                return f"layer {layer}: the router's gradient is off by {error:.1e}"
        return ""

    def dispatch(self) -> str:
        due = NUM_TOKENS * len(self._replayer.layer_ids)
        return "" if self._report.matched == due else f"{self._report.matched} of {due} token-layers were proved"

    def _replayed(self, source: RouteSource) -> Tensor:
        with self._replayer.use(source, **self._rows):
            return self._scores()

    def _scores(self) -> Tensor:
        logits = self._causal(input_ids=self._rows["input_ids"], use_cache=False).logits
        return logits.float().log_softmax(-1).gather(-1, self._rows["target_ids"][..., None])[0, :, 0]  # type: ignore[no-any-return]


STEPS = ("build", "attach", "native", "forced", "gradient", "dispatch")


def examine(hf_config: Mapping[str, Any]) -> Conformance:
    """Every step for the classes of `hf_config`, up to the first that fails. Takes seconds on a CPU.

    Numbers that the caller draws stay the same.
    """
    with torch.random.fork_rng(devices=[]):
        steps = _Steps(hf_config)
        for step in STEPS:
            try:
                problem = getattr(steps, step)()
            except _ERRORS as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                return Conformance(step, problem)
    return Conformance()


class _ForcedTopK(TorchFunctionMode):
    """Inside of it, the best K of E are `ids` `[T, K]`."""

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        super().__init__()
        self._ids, self._num_experts = ids, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk) and args[0].shape[-1] == self._num_experts:
            ids = self._ids.view(*args[0].shape[:-1], -1)
            return torch.return_types.topk((args[0].gather(-1, ids), ids))
        return func(*args, **(kwargs or {}))


@contextmanager
def own_choice(model: nn.Module, routes: np.ndarray) -> Iterator[None]:
    """In forwards inside of it, each gate of `model` runs its own code with `routes` `[T, L, K]` for its choice."""
    with ExitStack() as stack:
        for place, block in enumerate(moe_blocks(model).values()):
            gate = gate_of(block)
            choice = _ForcedTopK(torch.from_numpy(routes[:, place].astype(np.int64)), int(gate.num_experts))
            stack.callback(gate.register_forward_pre_hook(partial(_enter, choice)).remove)
            stack.callback(gate.register_forward_hook(partial(_leave, choice), always_call=True).remove)
        yield


def _enter(choice: TorchFunctionMode, _gate: nn.Module, _args: Any) -> None:
    choice.__enter__()  # type: ignore[no-untyped-call]


def _leave(choice: TorchFunctionMode, _gate: nn.Module, _args: Any, _output: Any) -> None:
    choice.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _tiny(hf_config: Mapping[str, Any]) -> Any:
    """The causal model, in float32 on the CPU. Weights are so large that another expert changes the log-probs."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    small = shrunk(library_config(hf_config))
    try:
        config = type(AutoConfig.for_model(small["model_type"])).from_dict(small)
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in causal.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in causal.named_buffers():
            if name.endswith("bias"):
                buffer.uniform_(-0.1, 0.1, generator=generator)
    return causal


def _gap(scores: Tensor, others: Tensor) -> float:
    return float((scores - others).detach().abs().max())


def _router_gradients(model: nn.Module, scores: Tensor) -> list[Tensor]:
    weights = [gate_of(block).weight for block in moe_blocks(model).values()]
    return list(torch.autograd.grad(scores.sum(), weights, materialize_grads=True))


def check_conformance(hf_config: Mapping[str, Any], where: str) -> None:
    """Refuse a family for which replay is not exact. Families with a description are proved by tests.

    Args:
        hf_config: config.json of the text.
        where: its file.

    Raises:
        CheckpointError: the step that failed, and why.
    """
    if find_family(hf_config) is not None or not any(map(hf_config.get, EXPERT_KEYS)):
        return
    finding = examine(hf_config)
    if finding.step:
        raise CheckpointError(
            "replay is not exact for this family: a tiny model of its classes failed",
            where=where,
            got=f"{(hf_config.get('architectures') or ['no architecture'])[0]}, step {finding.step}: {finding.problem}",
            expected=f"a family that passes {', '.join(STEPS)}",
            fix="Use a checkpoint of a family that docs/models.md has as proved.",
        )
