"""What only CUDA runs, each call against the signatures of the installed torch: `PLACES` says where it is executed.

`strict_cuda` stands for `torch.cuda`. It has the names of the real one, takes what they take, and refuses the rest.

Not executed anywhere without a GPU: kernels. `tests/gpu` runs them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch import learner as launched
from moe_trm.config.schema import Config, LayerNoiseConfig
from moe_trm.learner.deepspeed import build as deepspeed_build
from moe_trm.learner.deepspeed import state as deepspeed_state
from moe_trm.learner.layer_noise import LayerNoise
from moe_trm.tools.doctor import environment
from moe_trm.tools.evaluate.own_policy import OwnPolicy

ROOT = Path(__file__).parents[2]
HERE = "tests/integration/test_cuda_calls.py"
OTHER_DEVICE = "tests/integration/test_other_device.py"
OTHER_DEVICE_MEGATRON = "tests/integration/test_other_device_megatron.py"
MACHINE = "tests/unit/learner/test_learner_machine.py"
SIGNS = (
    r"torch\.cuda\.|\"nccl\"|device\.type == \"cuda\"|non_blocking=True|import transformer_engine|pin_memory"
    r"|cuda_rng_tracker|model_parallel_cuda|torch\.Generator\(self\._device\)"
)
PLACES = {
    "launch/learner.py": HERE,
    "moe_trm/tools/audit/commands.py": "tests/integration/test_audit.py",
    "moe_trm/tools/doctor/environment.py": HERE,
    "moe_trm/tools/doctor/layout_rank.py": "tests/integration/test_layout_differences.py",
    "moe_trm/tools/doctor/rehearsal.py": "tests/integration/test_rehearsal.py",
    "launch/start/cuda.py": "tests/unit/launch/test_cuda.py",
    "launch/start/preflight.py": "tests/unit/config/test_choices.py",
    "moe_trm/tools/evaluate/own_policy.py": HERE,
    "moe_trm/learner/deepspeed/build.py": HERE,
    "moe_trm/learner/deepspeed/runtime.py": OTHER_DEVICE,
    "moe_trm/learner/deepspeed/state.py": HERE,
    "moe_trm/learner/layer_noise.py": HERE,
    "moe_trm/learner/megatron/build.py": HERE,
    "moe_trm/learner/megatron/cpu_shim.py": MACHINE,
    "moe_trm/learner/megatron/exact.py": HERE,
    "moe_trm/learner/megatron/layers.py": MACHINE,
    "moe_trm/learner/megatron/notices.py": MACHINE,
    "moe_trm/learner/megatron/packed.py": "tests/integration/test_learner_fused.py",
    "moe_trm/learner/megatron/state.py": HERE,
    "moe_trm/rollout/servers/backend.py": "tests/unit/tools/plan/test_preflight.py",
    "moe_trm/rollout/servers/process.py": "tests/unit/rollout/test_placement.py",
    "moe_trm/step/push.py": "tests/unit/rollout/test_lent_memory.py",
    "packages/sglang_cpu/moe_trm_sglang_cpu/plugin.py": "tests/integration/test_sglang_cpu.py",
    "routing/replay/cut.py": OTHER_DEVICE_MEGATRON,
    "routing/hf.py": OTHER_DEVICE,
    "routing/megatron.py": OTHER_DEVICE_MEGATRON,
    "routing/replay/replay_pass.py": OTHER_DEVICE_MEGATRON,
}
"""By file with calls that only CUDA gets, the test that executes them.

Collectives over NCCL and sends between pipeline stages: the tests of the other device, which refuse what NCCL refuses.
Transformer Engine by signature: `test_learner_fused.py`. Broadcast pushes go over gloo with CUDA too
(`tests/integration/test_distributed_sync.py`). Streams, events and pinned memory are Megatron-Core's own: no file of
ours makes any. Copies that do not wait go to the device, never to the host.
"""


def test_the_list_is_whole() -> None:
    tops = ("moe_trm", "launch", "routing", "packages")
    files = [path for top in tops for path in (ROOT / top).rglob("*.py") if "build" not in path.relative_to(ROOT).parts]
    found = {str(path.relative_to(ROOT)) for path in files if re.search(SIGNS, path.read_text(encoding="utf-8"))}
    assert found == PLACES.keys()
    for test in PLACES.values():
        assert (ROOT / test).is_file()


def test_copies_that_do_not_wait_go_to_the_device() -> None:
    for place in PLACES:
        for target in re.findall(r"\.to\(([^()]*), non_blocking=True\)", (ROOT / place).read_text(encoding="utf-8")):
            assert target in ("device", "self._device"), place


class StrictCuda:
    """`torch.cuda` of a machine with devices, which has the real one's names and signatures.

    Attributes:
        calls: names and arguments, in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.state = torch.arange(16, dtype=torch.uint8)
        self.nccl = SimpleNamespace(version=bound(torch.cuda.nccl.version, lambda *_: (2, 29, 3)))
        self._answers: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "get_device_name": lambda index=None: f"device {index}",
            "get_rng_state": lambda *_: self.state.clone(),
            "set_rng_state": self._set_state,
            "set_device": lambda _device: None,
            "manual_seed": lambda _seed: None,
            "manual_seed_all": lambda seed: self._set_state(torch.full((16,), seed % 251, dtype=torch.uint8)),
            "_is_in_bad_fork": lambda: False,
        }

    def _set_state(self, new_state: torch.Tensor, *_device: Any) -> None:
        self.state = new_state.clone()

    def __getattr__(self, name: str) -> Any:
        real = getattr(REAL, name)
        answer = self._answers.get(name)
        if answer is None:
            return real

        def called(*args: Any, **options: Any) -> Any:
            self.calls.append((name, *args))
            return answer(*args, **options)

        return bound(real, called)


def bound(real: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with what `real` takes alone."""
    try:
        signature = inspect.signature(real)
    except ValueError:  # torch 2.14 has C functions there that say nothing of their arguments: they take none
        signature = inspect.Signature()

    def run(*args: Any, **options: Any) -> Any:
        signature.bind(*args, **options)
        return call(*args, **options)

    return run


REAL = torch.cuda


@pytest.fixture
def strict_cuda(monkeypatch: pytest.MonkeyPatch) -> StrictCuda:
    stand_in = StrictCuda()
    monkeypatch.setattr(torch, "cuda", stand_in)
    # The real one keeps the module that it first found, also for other tests.
    uncached = bound(torch.get_device_module, lambda device: getattr(torch, torch.device(device).type))
    monkeypatch.setattr(torch, "get_device_module", uncached)
    return stand_in


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backend of every group that is asked for, and its options."""
    asked: list[Any] = []
    init = bound(dist.init_process_group, lambda backend=None, **options: asked.append((backend, options)))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return asked


def test_the_stand_in_is_strict(strict_cuda: StrictCuda) -> None:
    cuda: Any = torch.cuda
    for wrong in (lambda: cuda.set_device(), lambda: cuda.get_rng_state("cuda", 1), lambda: cuda.nccl.version(1)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(AttributeError):
        cuda.no_such_name()


def megatron_build() -> Any:
    return pytest.importorskip("moe_trm.learner.megatron.build")


@pytest.mark.parametrize("module", [lambda: deepspeed_build, megatron_build])
def test_a_rank_takes_its_device_and_then_joins(
    module: Callable[[], Any], strict_cuda: StrictCuda, groups: list[Any]
) -> None:
    device = module()._start_process_group()
    assert device == torch.device("cuda", 1)
    assert ("set_device", device) in strict_cuda.calls
    assert groups == [("nccl", {})]


class Met(Exception):
    """The groups are there."""


def test_the_launcher_joins_by_nccl(
    strict_cuda: StrictCuda, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_seed: int) -> None:
        raise Met

    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(launched, "meet", lambda _host, _file: (store, 1, 2))
    monkeypatch.setattr(launched, "silence_known_notices", lambda: None)
    monkeypatch.setattr(torch, "manual_seed", stop)
    with pytest.raises(Met):
        launched.run(Config.model_validate({"model": {"checkpoint": "m"}}), None)  # type: ignore[arg-type]
    assert groups == [("nccl", {"store": store, "rank": 1, "world_size": 2})]


def megatron_state() -> Any:
    return pytest.importorskip("moe_trm.learner.megatron.state")


@pytest.mark.parametrize("module", [lambda: deepspeed_state, megatron_state])
def test_random_states_come_back(
    module: Callable[[], Any], strict_cuda: StrictCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, before = module(), torch.get_rng_state()
    if module is megatron_state:
        tracker = SimpleNamespace(get_states=lambda: {"model": torch.ones(3)}, set_states=lambda each: each["model"])
        monkeypatch.setattr(states, "_tracker", lambda: tracker)
    saved = states._random_states()
    strict_cuda.state = torch.zeros(16, dtype=torch.uint8)
    states._set_random_states(saved)
    assert torch.equal(strict_cuda.state, torch.arange(16, dtype=torch.uint8))
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_leaves_the_generators_of_the_device_as_they_were(
    strict_cuda: StrictCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.states = {"model": torch.arange(3, dtype=torch.uint8)}

        def get_states(self) -> dict[str, torch.Tensor]:
            return dict(self.states)

        def set_states(self, states: dict[str, torch.Tensor]) -> None:
            self.states = states

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    tracker = Tracker()
    noise = LayerNoise({}, 2, LayerNoiseConfig(sigma=0.1), 0, torch.device("cpu"), tracker)
    noise._device = torch.device("cuda", 1)
    before, named = strict_cuda.state.clone(), tracker.states
    with noise.perturbing():
        assert not torch.equal(strict_cuda.state, before)
        assert torch.equal(tracker.states["model"], strict_cuda.state)
    assert torch.equal(strict_cuda.state, before)
    assert tracker.states == named


def test_exact_runs_take_megatrons_batch_invariant_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing them asks CUDA for the number of its processors, so a module of their names stands for them."""
    exact = pytest.importorskip("moe_trm.learner.megatron.exact")
    asked: list[str] = []
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    kernels = SimpleNamespace(enable_batch_invariant_mode=lambda: asked.append(name))
    monkeypatch.setitem(sys.modules, name, kernels)
    exact.install(torch.device("cuda", 0))
    assert asked == [name]


def test_the_doctor_names_the_devices(strict_cuda: StrictCuda) -> None:
    check = environment._devices(Config.model_validate({"model": {"checkpoint": "m"}}).rollout)
    assert check.status == "ok"
    assert check.says.startswith("2 x device 0, device 1; CUDA")
    assert check.says.endswith("NCCL 2.29.3")


def test_the_own_policy_draws_on_the_device(strict_cuda: StrictCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = list[torch.device](), torch.Generator

    def made(device: torch.device) -> torch.Generator:
        asked.append(device)
        return real()

    monkeypatch.setattr(torch, "Generator", made)
    OwnPolicy("float32", 0, None)
    assert asked == [torch.device("cuda")]


def test_routers_multiply_without_transformer_engine(
    strict_cuda: StrictCuda, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-Core asks for a name that it only defines where Transformer Engine imports."""
    build = megatron_build()
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    tokens, weight = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(NameError):
        moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    build._start_process_group()
    assert torch.equal(moe_utils.router_gating_linear(tokens, weight, None, torch.float32), tokens @ weight.T)
