"""One recorded batch under two layouts of the learner, and the first operation in which they differ.

Each layout is started in turn on ranks of this machine (`layout_rank`), from the same checkpoint. What one operation
does wrong, all after it have too: forwards from the embedding to the output, backwards from the output to the
embedding. So the first one is the cause. Shape letters: T tokens of a row, D width.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from launch.start.bisect import BOUNDS, Difference, verdict
from launch.start.checks import Check
from launch.start.places import check_gpus
from launch.start.preflight import check_model_and_layout, load_here, smallest_world
from launch.threads import SINGLE_THREAD
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.models.hf_config import read_hf_config
from moe_trm.recording.bundle import BundleReader
from moe_trm.runtime.gloo import LOOPBACK
from moe_trm.runtime.owned_process import OwnedProcess
from moe_trm.runtime.python import run_module
from moe_trm.tools.doctor.layout_rank import rows_of
from moe_trm.tools.doctor.probe import NEUTRAL, ProbeFailed, last_error

RANKS = "ranks"
"""Word of a layout that is no setting: how many ranks it has, where more than the fewest."""
CHANGEABLE = ("learner.", "batch.layout=")
FLIPS = {"float32": 0.005, "float16": 0.05, "bfloat16": 0.05}
"""Share of a layer's tokens whose routers may choose others by rounding, by the coarser arithmetic."""
GRADIENTS = 5.0
"""Times the bound of hidden states that gradients may differ by: each has rounded twice as often."""
SLIGHT = 1e-3
"""A tensor's gradient is compared with this share of the largest of its layer where it is smaller."""
POLL_S = 0.1
FIX = "Compare this operation in the two layouts; what comes before it agrees."


@dataclass(frozen=True)
class LayoutRun:
    """A layout of the learner: its words on the command line, its configuration, and its ranks."""

    words: str
    overrides: tuple[str, ...]
    config: Config
    ranks: int

    @classmethod
    def of(cls, config_path: str, overrides: Sequence[str], words: str) -> LayoutRun:
        """Raises `ConfigError` or `CheckpointError` where these ranks cannot train this model."""
        settings, ranks = [], None
        for word in shlex.split(words):
            key, _, value = word.partition("=")
            if key == RANKS and value.isdigit():
                ranks = int(value)
            elif word.startswith(CHANGEABLE) and value:
                settings.append(word)
            else:
                raise ConfigError(
                    "a layout changes settings of the learner alone",
                    where="--layouts",
                    got=word,
                    expected="words such as learner.parallel.expert=2, learner.backend=deepspeed or ranks=2",
                )
        all_overrides = (*overrides, *NEUTRAL, "record={}", *settings)
        config, _ = load_here(config_path, all_overrides)
        fewest = smallest_world(config.learner.parallel)
        ranks = fewest if ranks is None else ranks
        if ranks < 1 or ranks % fewest:
            raise ConfigError(
                "a layout has whole copies of the model",
                where=f"--layouts {words!r}",
                got=f"{ranks} ranks",
                expected=f"a multiple of {fewest}",
            )
        check_model_and_layout(config, ranks)
        check_gpus(config.rollout, 0, ranks)
        return cls(words, all_overrides, config, ranks)


Start = Callable[[LayoutRun, Sequence[str], Path], None]


@dataclass(frozen=True)
class LayoutValues:
    """The tensors of all ranks of a layout, by name; see `layout_rank` for the names."""

    files: Mapping[str, Sequence[Path]]

    @classmethod
    def read(cls, folder: Path) -> LayoutValues:
        files: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            with safe_open(path, "pt") as opened:
                names = opened.keys()
                for name in names:
                    files.setdefault(name, []).append(path)
        return cls(files)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as all its ranks have it together."""
        joined: Tensor | None = None
        for path in self.files[name]:
            with safe_open(path, "pt") as opened:
                part = opened.get_tensor(name)
            elsewhere = part.isnan() if part.is_floating_point() else part < 0
            joined = part if joined is None else torch.where(elsewhere, joined, part)
        assert joined is not None
        return joined

    def under(self, *parts: str) -> list[str]:
        """Names that begin with these parts."""
        prefix = "/".join(parts) + "/"
        return [name for name in self.files if name.startswith(prefix)]


def compare_layouts(
    config_path: str,
    overrides: Sequence[str],
    layouts: Sequence[str],
    rows: int,
    folder: Path,
    tell: Callable[[Check], None],
    start: Start | None = None,
) -> list[Check]:
    """Measure both layouts on the first rows of a recording, and compare them. `start`: in place of `start_ranks`.

    Raises:
        ConfigError: a layout that cannot be, two equal ones, or no recording.
        BundleError: a recording that is damaged.
        ProbeFailed: a rank failed.
    """
    config, _ = load_here(config_path, overrides)
    bundle = _bundle(config.rollout.bundle or config.record.bundle)
    first, second = runs = [LayoutRun.of(config_path, overrides, words) for words in layouts]
    if (first.config, first.ranks) == (second.config, second.ranks):
        raise ConfigError("the two layouts are equal", where="--layouts", got=first.words, expected="another one")
    step = next(iter(BundleReader(str(bundle)).steps()))
    together = math.lcm(first.ranks, second.ranks)
    number = len(rows_of(bundle, step, rows)) // together * together
    if not number:
        raise ConfigError(
            "too few rows for every rank to have one",
            where=f"step {step} of {bundle}",
            got=len(rows_of(bundle, step, rows)),
            expected=f"at least {together}, and --rows at least as many",
        )
    values = []
    for place, run in enumerate(runs):
        started, out = time.perf_counter(), folder / f"layout-{place}"
        (start or start_ranks)(run, arguments_of(config_path, bundle, step, number, out), out)
        seconds = time.perf_counter() - started
        tell(Check(f"layout {run.words}", "ok", f"{number} rows on {run.ranks} ranks in {seconds:.0f} s"))
        values.append(LayoutValues.read(out))
    dtype = max((run.config.learner.dtype for run in runs), key=[*BOUNDS].index)
    checks = judge_layouts(
        values[0], values[1], dtype, int(read_hf_config(first.config.model.checkpoint)["num_hidden_layers"])
    )
    for check in checks:
        tell(check)
    return checks


def _bundle(named: str | None) -> Path:
    if named and BundleReader(named).steps():
        return Path(named)
    raise ConfigError(
        "two layouts are compared on recorded rows, and there are none",
        where="config keys rollout.bundle, record.bundle",
        got=f"no step in {named}" if named else "neither is set",
        expected="a folder that a run of this model recorded",
        fix="Record a step: moe-trm train CONFIG train.steps=1 optimizer.lr=0 record.bundle=FOLDER. "
        "Then give record.bundle=FOLDER here too.",
    )


def arguments_of(config_path: str, bundle: Path, step: int, rows: int, out: Path) -> list[str]:
    """Of `layout_rank`, before the overrides."""
    return [config_path, str(bundle), str(step), str(rows), str(out)]


def start_ranks(run: LayoutRun, arguments: Sequence[str], out: Path) -> None:
    """The ranks of a layout, until all have ended. Raises `ProbeFailed` with the last words of one that failed."""
    out.mkdir(mode=0o700, parents=True)
    size = {"WORLD_SIZE": str(run.ranks), "LOCAL_WORLD_SIZE": str(run.ranks)}
    logs = [out / f"rank-{rank}.log" for rank in range(run.ranks)]
    with ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = run_module("moe_trm.tools.doctor.layout_rank", *arguments, *run.overrides)
            environment = {**LOOPBACK, **os.environ, **SINGLE_THREAD, **size, **place}
            output = stack.enter_context(log.open("wb"))
            processes.append(stack.enter_context(OwnedProcess(words, environment, output=output, errors=output)))
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            time.sleep(POLL_S)
    failed = [log for status, log in zip(statuses, logs, strict=True) if status]
    if failed:
        last = last_error(failed[0].read_text(errors="replace")).replace(str(out), "FOLDER")
        raise ProbeFailed("a rank of this layout failed", where=f"--layouts {run.words!r}", got=last)


def judge_layouts(first: LayoutValues, second: LayoutValues, dtype: str, num_layers: int) -> list[Check]:
    """Forward passes, routes, log-probs and gradients of the two layouts."""
    bound = BOUNDS[dtype]
    forward = _named(verdict(forward_differences(first, second, bound, num_layers), bound), "forward pass")
    checks = [forward, _scores(first, second), _routes(first, second, FLIPS[dtype])]
    if not first.under("gradient") or not second.under("gradient"):
        return [
            *checks,
            Check("gradients", "skip", "not compared: a layout made no step, as its loss scale was too high"),
        ]
    backward = _named(verdict(gradient_differences(first, second), GRADIENTS * bound), "gradients")
    if forward.status == "fail":
        backward = Check("gradients", "skip", f"not judged, as the forward passes differ: {backward.says}")
    return [*checks, backward]


def _named(check: Check, name: str) -> Check:
    return Check(name, check.status, check.says.replace("hidden states", "values"), FIX if check.fix else "")


def forward_differences(
    first: LayoutValues, second: LayoutValues, bound: float, num_layers: int
) -> Iterator[Difference]:
    """From the embedding to the log-probs, of the row that differs most. An MLP is told by its router."""
    parts = ("input norm", "attention", "post-attention norm", "MLP")
    layered = [f"layer {layer}: {part}" for layer in range(num_layers) for part in parts]
    for name in ("embedding", *layered, "final norm"):
        difference = _worst_row(first, second, f"state/{name}", name)
        if difference is None:
            continue
        layer = name.removeprefix("layer ").split(":")[0]
        if name.endswith("MLP") and not difference.relative <= bound and first.under("experts", layer):
            margins = _margins(first, second, layer)
            part = "router" if margins > GRADIENTS * bound else "experts"
            difference = Difference(f"layer {layer}: {part}", difference.relative)
        yield difference
    output = _worst_row(first, second, "logprobs", "output")
    if output is not None:
        yield output


def _worst_row(first: LayoutValues, second: LayoutValues, prefix: str, name: str) -> Difference | None:
    """None where a layout has no such state, as of a norm that is fused with what follows."""
    rows = set(first.under(prefix)) & set(second.under(prefix))
    return max(
        (Difference(name, _relative(first[row], second[row])) for row in sorted(rows)),
        key=lambda difference: math.inf if math.isnan(difference.relative) else difference.relative,
        default=None,
    )


def _relative(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """`|a - b| / |b|`; 0 where both are zero."""
    gap = float(torch.linalg.vector_norm(value.double() - reference.double()))
    size = max(float(torch.linalg.vector_norm(reference.double())), floor)
    return gap / size if size else (math.inf if gap else 0.0)


def _margins(first: LayoutValues, second: LayoutValues, layer: str) -> float:
    """Median distance of a layer's router margins, by their median: flips before it move few. 0 without margins."""
    names = set(first.under("margins", layer)) & set(second.under("margins", layer))
    if not names:
        return 0.0
    ours, theirs = (torch.cat([values[name] for name in sorted(names)]).double() for values in (first, second))
    return float((ours - theirs).abs().median() / theirs.abs().median())


def _scores(first: LayoutValues, second: LayoutValues) -> Check:
    """The size of the difference in the log-probs; the forward pass judges it."""
    gaps = [(first[name] - second[name]).abs() for name in first.under("logprobs")]
    all_gaps = torch.cat([gap[gap > 0] if gap.any() else gap[:1] for gap in gaps]).double()
    words = f"log-probs differ by {float(all_gaps.mean()):.1e} nats in the mean, {float(all_gaps.max()):.1e} at most"
    return Check("scores", "ok", words)


def _routes(first: LayoutValues, second: LayoutValues, bound: float) -> Check:
    """The share of tokens, by layer, for which the layouts' own routers choose other experts."""
    rates: dict[int, float] = {}
    for layer in sorted({int(name.split("/")[1]) for name in first.under("experts")}):
        flips = [_flips(first[name], second[name]) for name in first.under("experts", str(layer))]
        rates[layer] = float(torch.cat(flips).double().mean())
    if not rates:
        return Check("routes", "skip", "the model has no routers")
    beyond = next((layer for layer, rate in rates.items() if rate > bound), None)
    if beyond is None:
        return Check("routes", "ok", f"routers choose others for at most {max(rates.values()):.2%} of a layer's tokens")
    words = (
        f"layer {beyond}: the router chooses others for {rates[beyond]:.2%} of the tokens, the first beyond {bound:.1%}"
    )
    return Check("routes", "fail", words, FIX)


def _flips(ours_TK: Tensor, theirs_TK: Tensor) -> Tensor:
    return (ours_TK.sort(-1).values != theirs_TK.sort(-1).values).any(-1)


def gradient_differences(first: LayoutValues, second: LayoutValues) -> Iterator[Difference]:
    """From the output to the embedding, of each layer the tensor that differs most."""
    by_layer: dict[float, list[str]] = {}
    for name in sorted(set(first.under("gradient")) | set(second.under("gradient"))):
        by_layer.setdefault(_depth(name), []).append(name)
    for depth in sorted(by_layer, reverse=True):
        names = by_layer[depth]
        lacking = [name for name in names if name not in first.files or name not in second.files]
        if lacking:
            yield Difference(lacking[0].removeprefix("gradient/"), math.inf)
            continue
        floor = SLIGHT * max(float(torch.linalg.vector_norm(second[name].double())) for name in names)
        yield max(
            (Difference(name.removeprefix("gradient/"), _relative(first[name], second[name], floor)) for name in names),
            key=lambda difference: math.inf if math.isnan(difference.relative) else difference.relative,
        )


def _depth(name: str) -> float:
    """The place of a tensor on the way forwards."""
    if match := re.search(r"layers\.(\d+)\.", name):
        return float(match[1])
    return -1.0 if "embed" in name else math.inf
