"""Names of the metrics that a run can write, from the code that writes them.

Pure functions are called on a worked example. Names that stand whole in the source are read there, from the places that
write. The rest are built from f-strings: `FAMILIES` has each of them, and what it can become.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from moe_trm import corrections, diagnostics, losses
from moe_trm.corrections.by_length import NUM_OCTAVES, LengthTracker, octave_name
from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.rule import BoundRule, RegisteredRule
from moe_trm.losses import LossInputs
from moe_trm.methods import summable
from moe_trm.methods.ratios import RATIO_NAMES
from moe_trm.observe.report.charts import SECTIONS
from moe_trm.ratios import LogRatios
from moe_trm.rollout.store.ledger import Ledger
from moe_trm.step.probe.flip_causes import MARGINS, POSITIONS

REPOSITORY = Path(__file__).resolve().parents[2]
READERS = (
    "report/",
    "experiment/",
    "doctor/",
    "quickstart/",
    "observe/lines.py",
    "observe/panel.py",
    "diagnostics/verdict",
)
"""Parts of `moe_trm` that name metrics only to read them."""
UNITS = {"tokens/s"}
NUMBER, WORD = r"\d+", "[a-z][a-z0-9_]*"
HOLES = (("<[a-z_]+>", "[^/]+"), (r"(?<=_)[iKP]$", NUMBER), (r"\\\*", ".+"))
"""Holes as pages write them, and what may fill each."""
ROWS, TOKENS = 4, 6


def exists(name: str) -> bool:
    """True when a run can write `name`.

    `<name>`, `*` and a last `_i`, `_K`, `_P` in it stand for anything that fits.
    """
    pattern = re.escape(name)
    for hole, filling in HOLES:
        pattern = re.sub(hole, filling.replace("\\", r"\\"), pattern)
    if pattern == re.escape(name):
        return name in names() or any(re.fullmatch(family, name) for family in families())
    samples = {family.replace(NUMBER, "1").replace(WORD, "example") for family in families()}
    return any(re.fullmatch(pattern, known) for known in names() | samples)


@cache
def names() -> frozenset[str]:
    """All names without a hole."""
    return frozenset({*_measured(), *_written(), *(name for name in _built() if not _has_hole(name))})


@cache
def families() -> frozenset[str]:
    """Regular expressions of the names with a number or a user's word in them: layers, ages, parts of a reward."""
    return frozenset(name for name in _built() if _has_hole(name))


@cache
def read() -> Mapping[str, str]:
    """Names and patterns with `*` that the code only reads, each with the file that does."""
    charts = (chart for section in SECTIONS for chart in section.chart)
    found = {name: "report/charts.toml" for chart in charts for name, _ in chart.metrics}
    for path, tree in _trees().items():
        strings = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        if path.startswith(READERS):
            found |= {text: path for text in strings - UNITS if re.fullmatch(r"[a-z_]+(/[a-z0-9_*]+)+", text)}
    return found


@cache
def folders() -> frozenset[str]:
    """The part before the first slash."""
    return frozenset(name.partition("/")[0] for name in names() | families())


@cache
def reasons() -> frozenset[str]:
    """The reasons for which a record can be rejected."""
    calls = {
        f"{whose}_{how}" for whose in ("reward", "rollout") for how in ("error", "timeout", "crash", "type", "nan")
    }
    # More reasons of `FunctionFailed`, which only a command line has.
    calls.add("rollout_output")
    routes = {f"route_{reason}" for reason in _first_arguments("RouteError")}
    return frozenset({*_first_arguments("RecordRejected"), "logprob_value", *calls, *routes})


def phases() -> frozenset[str]:
    """The timed parts of a step."""
    return frozenset(_first_arguments("phases.time"))


@cache
def _families() -> Mapping[str, Sequence[str]]:
    """f-strings of the source and the names, or regular expressions of names, that they make."""
    causes, sets = ("engine", "staleness"), ("eval/", f"eval/{WORD}/")
    answers: tuple[str, ...] = (
        "prompts",
        "accuracy",
        "accuracy_se",
        "reward",
        "reward_se",
        "length_mean",
        "finished_fraction",
        "answered_fraction",
    )
    answers += (f"avg_at_{NUMBER}", f"pass_at_{NUMBER}", f"best_at_{NUMBER}")
    lows, margins = (1, *(edge + 1 for edge in POSITIONS)), pairwise([0, *MARGINS, "up"])
    return {
        "correction/{rule}/threshold_{name}": [
            f"correction/{name}/threshold_{threshold}"
            for name in corrections.names()
            for threshold in corrections.get(name).calibrated
        ],
        "correction/{self.item.name}/threshold_{name}_length_{octave_name(octave)}": [
            f"correction/{name}/threshold_{threshold}_length_{octave_name(octave)}"
            for name in corrections.names()
            if corrections.get(name).scope == "sequence"
            for threshold in corrections.get(name).calibrated
            for octave in range(NUM_OCTAVES)
        ],
        "eval/{name}/": [f"{each}{answer}" for each in sets for answer in answers],
        "rejected/{reason}": [f"{each}rejected/{reason}" for each in sets for reason in reasons()],
        "loss/{name}": ["loss/penalty"],
        "probe/{share}_k3_kl": [f"probe/{share}_k3_kl" for share in ("quantization", "cast", "arithmetic")],
        "probe/{share}_k3_kl_se": [f"probe/{share}_k3_kl_se" for share in ("quantization", "cast", "arithmetic")],
        "queue/age/{age}": [f"queue/age/{NUMBER}"],
        "records/dropped/{reason}": [f"records/dropped/{reason}" for reason in ("age", "overlong", "zero_variance")],
        "records/rejected/{reason}": [f"records/rejected/{reason}" for reason in reasons()],
        "reference/{name}_kl": ["reference/k1_kl", "reference/k3_kl"],
        "rejected_rows/{rejection.reason}": [f"agent/rejected_rows/{reason}" for reason in reasons()],
        "reward/{name}": [f"{each}reward/{WORD}" for each in sets],
        "reward/{name}/mean": [f"reward/{WORD}/mean"],
        "rollout/age_share/{age}": [f"rollout/age_share/{NUMBER}"],
        "routing/close/layer_{layer}": [f"routing/close/layer_{NUMBER}"],
        "routing/flips/engine/margin_{least}_{most}": [f"routing/flips/engine/margin_{a}_{b}" for a, b in margins],
        "routing/flips/engine/position_{low}_{high or 'up'}": [
            f"routing/flips/engine/position_{low}_{high}" for low, high in zip(lows, (*POSITIONS, "up"), strict=True)
        ],
        "routing/flips/{cause}": [f"routing/flips/{cause}" for cause in causes],
        "routing/flips/{cause}/layer_{layer}": [f"routing/flips/{cause}/layer_{NUMBER}" for cause in causes],
        "routing/local_flip_rate/layer_{layer}": [f"routing/local_flip_rate/layer_{NUMBER}"],
        "routing/positions/lost_share/layer_{layer}": [f"routing/positions/lost_share/layer_{NUMBER}"],
        "time/{name}_s": [f"time/{phase}_s" for phase in phases()],
    }


def _built() -> Iterator[str]:
    templates = set(_templates())
    for template, made in _families().items():
        assert template in templates, f"the source has no f-string {template}"
        yield from made


def _has_hole(name: str) -> bool:
    return NUMBER in name or WORD in name


def _measured() -> Iterator[str]:
    """The metrics of diagnostics, corrections, losses and the books for a batch of which everything is known."""
    evidence = _example(split=True)
    rules = [_bound(corrections.get(name)) for name in corrections.names()]
    correction = corrections.compose(rules, whole_minibatch=True)(evidence)
    several = corrections.compose([replace(rules[0], ratio=ratio) for ratio in RATIO_NAMES])(evidence)
    yield from summable.finalize(several.metrics)
    by_length = [_bound(corrections.get(name)) for name in corrections.names() if _takes_lengths(name)]
    following = [one.following(LengthTracker(0.1, one.rule.num_statistics).thresholds) for one in by_length]
    judged = corrections.compose(following)(evidence)
    by_turn = [replace(bound, by_turn=True) for bound in rules if bound.rule.scope == "sequence"]
    # Names of turns that this batch has none of are left out by `finalize`.
    yield from (key.partition(":")[0] for key in corrections.compose(by_turn)(evidence).metrics)
    # Finished metrics leave out the octaves that this batch has no rows of.
    yield from (key.partition(":")[0] for key in judged.metrics if "_length_" in key or "unjudged" in key)
    found = summable.finalize({**correction.metrics, **diagnostics.divergences(evidence)})
    yield from {**found, **diagnostics.certificate_estimate(found)}
    # Finished metrics leave out the shares of rows that this batch has none of.
    yield from (key.partition(":")[0] for key in diagnostics.acceptance(evidence, correction))
    for one in (evidence, _example(split=False)):
        yield from summable.finalize(diagnostics.metrics(one))
        by_server = diagnostics.by_server(one, (0,) * ROWS)
        for figures in (diagnostics.by_turn(one), diagnostics.by_place(one), diagnostics.by_age(one, 0), by_server):
            yield from (key.partition(":")[0] for key in figures)
    inputs = _inputs(evidence)
    for loss in map(losses.get, losses.names()):
        yield from summable.finalize(loss(inputs).metrics)
    yield from summable.finalize(losses.get("ppo_clip")(inputs, dual_clip=3.0).metrics)
    yield from summable.finalize(losses.get("turn_ppo")(inputs, normalize="row").metrics)
    yield from Ledger().metrics()


def _takes_lengths(name: str) -> bool:
    rule = corrections.get(name)
    return rule.scope == "sequence" and bool(rule.calibrated) and rule.rejects


def _example(*, split: bool) -> Evidence:
    gen = torch.Generator().manual_seed(0)
    rollout = -torch.rand(ROWS, TOKENS, generator=gen)
    behavior, current = rollout + 0.01, rollout + torch.rand(ROWS, TOKENS, generator=gen) / 10
    mask, rows = torch.ones(ROWS, TOKENS, dtype=torch.bool), torch.arange(ROWS)
    return Evidence(
        LogRatios(rollout, behavior if split else None, current, mask, None if split else behavior),
        advantages=(rows - 1.5)[:, None].expand(ROWS, TOKENS),
        turn_ids=(torch.arange(TOKENS) // 3).expand(ROWS, TOKENS),
        versions=torch.zeros(ROWS, TOKENS),
        exact_kl=torch.full((ROWS, TOKENS), 0.01),
        rewards=(rows % 2).float(),
        group_means=torch.full((len(rows),), 0.5),
    )


def _bound(rule: RegisteredRule) -> BoundRule:
    """The rule with thresholds that need make no sense: only the names of its metrics are looked at."""
    return BoundRule(rule, rule.ratio, {**rule.defaults, **dict.fromkeys(rule.required, 0.5)})


def _inputs(evidence: Evidence) -> LossInputs:
    mask = evidence.mask
    return LossInputs(
        evidence.ratios,
        evidence.ratios.total,
        evidence.advantages,
        weights=mask.float(),
        keep=mask,
        turn_ids=evidence.turn_ids,
        rewards=evidence.rewards,
        group_ids=torch.arange(ROWS) // 2,
        entropy=torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(0)),
        router_shift=torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(1)),
        reference_logprobs=evidence.ratios.rollout_logprobs,
    )


@cache
def _trees() -> Mapping[str, ast.Module]:
    """The source by path: within `moe_trm`, and `routing/...`."""
    own, routing = REPOSITORY / "moe_trm", REPOSITORY / "routing"
    paths = {str(path.relative_to(own)): path for path in sorted(own.rglob("*.py"))}
    paths |= {f"routing/{path.name}": path for path in sorted(routing.glob("*.py"))}
    assert len(paths) > 100, f"{own} is not the package"
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}


@cache
def _nodes() -> tuple[ast.AST, ...]:
    """Every node of the files that write metrics."""
    return tuple(n for name, tree in _trees().items() if not name.startswith(READERS) for n in ast.walk(tree))


def _written() -> Iterator[str]:
    """Strings with a slash where something is written: keys of a dictionary, targets, first arguments of `summable`."""
    for node in _nodes():
        places: Sequence[ast.expr | None] = ()
        if isinstance(node, ast.Dict):
            places = node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            places = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("summable."):
            places = node.args[:1]
        for place in places:
            if isinstance(place, ast.Constant) and re.fullmatch(rf"{WORD}(/[a-z0-9_]+)+", str(place.value)):
                yield str(place.value)


def _first_arguments(function: str) -> set[str]:
    """Strings that the source gives `function` as first argument."""
    first = [
        node.args[0]
        for node in _nodes()
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(function)
    ]
    found = {each.value for each in first if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    assert found, f"nothing calls {function} with a string"
    return found


def _templates() -> Iterator[str]:
    """Every f-string of the source, its holes in braces."""
    for node in _nodes():
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else ast.literal_eval(part)
                for part in node.values
            )
