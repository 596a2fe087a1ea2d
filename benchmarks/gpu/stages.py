"""The stages: their commands, their time limits and their needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["cuda", "cpu"]
CONFIG = Path(__file__).with_name("whole.yaml")
LAYERS = ("learner.transformer_engine=off", "learner.transformer_engine=on")
REHEARSED = (
    *("rollout.server.device=cpu", "rollout.server.dtype=float32", "learner.dtype=float32", "probe.tokens=256"),
    *("rollout.server.extra_args=[]", "rollout.server.max_total_tokens=8192", "rollout.prompts_per_step=4"),
    *("rollout.group_size=4", "rollout.max_new_tokens=16", "task.eval_size=16"),
)
"""Settings with which a CPU rehearses a run."""


@dataclass(frozen=True)
class Stage:
    """One measurement, a process of its own.

    Attributes:
        name: of its log, its figures and its run.
        answers: the question, for the page.
        limit_s: longest time; what usually takes half of it may begin where three fifths are left.
        words: `python WORDS...`.
        server: settings of the server that runs beside it; None: none is needed.
        fused: it needs Transformer Engine.
    """

    name: str
    answers: str
    limit_s: float
    words: tuple[str, ...]
    server: tuple[str, ...] | None = None
    fused: bool = False


def stages(folder: Path, device: Device) -> Iterator[Stage]:
    """All stages, the most valuable first. On a CPU only the stages that it can rehearse, made small."""
    cpu = device == "cpu"
    common = (f"run_dir={folder / 'runs'}", f"model.checkpoint={folder / 'model'}", *(REHEARSED if cpu else ()))

    def module(name: str, *words: str) -> tuple[str, ...]:
        return ("-m", f"benchmarks.gpu.{name}", *words)

    def run(
        name: str,
        answers: str,
        limit_s: float,
        steps: int,
        *settings: str,
        server: tuple[str, ...] = (),
        fused: bool = False,
    ) -> Stage:
        length = (f"train.steps={2 if cpu else steps}", f"train.eval_every={2 if cpu else steps}")
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "launch.train")
        words = (*torchrun, str(CONFIG), f"name={name}", *common, *length, *server, *settings, LAYERS[fused])
        return Stage(name, answers, limit_s, words, (*common, *server), fused)

    def cost(name: str, *, fused: bool = False) -> Stage:
        size = ("--rows", "2", "--length", "64", "--rounds", "2") if cpu else ()
        words = module("replay_cost", str(CONFIG), out(name), *size, *common, LAYERS[fused])
        return Stage(name, "the cost of R2, R3 and their proof, in pairs", 90, words, fused=fused)

    def out(name: str) -> str:
        return str(folder / "figures" / f"{name}.json")

    model, tiny = str(folder / "model"), ("--tiny",) if cpu else ()
    yield Stage("machine", "releases, and whether every part imports", 120, module("machine", out("machine")))
    random_model = module("model", model, out("random-model"), *tiny)
    yield Stage("random-model", "random weights, with which the server starts", 40, random_model)
    taught_model = module("model", model, out("model"), "--seconds", "5" if cpu else "60", *tiny)
    yield Stage("model", "a model that can almost add, made while the server loads", 120, taught_model, common)
    yield run("whole", "a whole run: R3, proofs, corrections, verified pushes", 300, 30)
    yield cost("replay-cost")
    unreplayed = ("replay.mode=none", "probe.every=1")
    yield run("own-routes", "how far the engines differ without replay", 120, 8, *unreplayed)
    yield run("broadcast", "the same pushes by broadcast", 120, 4, "sync.method=distributed")
    size = ("--gib", "0.01" if cpu else "1", "--rounds", "3", "--json", out("push-files"))
    yield Stage("push-files", "seconds per GB of a push by files", 60, ("-m", "benchmarks.weights", *size))
    if cpu:
        return
    yield run("whole-fused", "a whole run with Transformer Engine", 240, 20, fused=True)
    yield cost("replay-cost-fused", fused=True)
    repeats, colocated = ("rollout.server.deterministic=true",), ("rollout.colocate=true",)
    yield run("repeats", "how far they differ with batch-invariant kernels", 240, 6, *unreplayed, server=repeats)
    yield run("lent", "a server that lends its memory to the learner", 240, 6, server=colocated)
