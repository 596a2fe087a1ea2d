"""`moe-trm whatif RECORDING`: what every preset and loss would have kept of a recorded run, computed on a CPU."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from moe_trm import corrections
from moe_trm import losses as registry
from moe_trm.config.schema import CorrectionConfig, LossConfig, RuleConfig
from moe_trm.errors import ConfigError
from moe_trm.methods.losses import LOSSES
from moe_trm.methods.presets import PRESETS
from moe_trm.observe.advice.verdict_mismatch import quadrant
from moe_trm.tools.whatif.curve import bars, picture
from moe_trm.tools.whatif.judge import Candidate, RuleOutcome, judge
from moe_trm.tools.whatif.recording import Recording, load
from moe_trm.tools.whatif.sweep import EXAMPLE, Sweep, parse_sweep

AS_TRAINED = "as trained"
_COLUMNS = (
    ("tokens kept", "correction/kept_fraction"),
    ("rows kept", "correction/kept_sequence_fraction"),
    ("weight ess", "correction/weight_eff_sample_size"),
    ("tokens trained", "gradient/trained_fraction"),
    ("grad weight", "gradient/weight_mean"),
    ("grad ess", "gradient/eff_sample_size"),
)
_SGA = (
    ("bias tv", "gradient/bias_tv"),
    ("variance chi2", "gradient/variance_chi2"),
    ("tokens trained", "gradient/trained_fraction"),
)
"""The columns of `--sga`: bias and variance of the gradient apart."""
CELL = 8
"""Characters of a column; its title takes two lines."""
LEAST_NAME = 12
"""Characters that names get at least, however narrow the terminal."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm whatif`."""
    parser.add_argument(
        "recording",
        type=Path,
        help="bundle folder (record.bundle), folder of a run that recorded one, or a dump of slime, miles or verl",
    )
    parser.add_argument("--sweep", metavar="RULE.THRESHOLD=LOW:HIGH[:N]", help=f"a threshold over a range: {EXAMPLE}")
    parser.add_argument(
        "--picture", type=Path, help="SVG of the sweep's curve (default: RECORDING/whatif-RULE.THRESHOLD.svg)"
    )
    parser.add_argument(
        "--rules", action="append", metavar="YAML", help="as correction.rules; may be given several times"
    )
    parser.add_argument("--preset", nargs="+", choices=list(PRESETS), metavar="NAME", help="default: all presets")
    parser.add_argument(
        "--loss", nargs="+", metavar="NAME", help="as loss.name, path/to/file.py:function too; default: all losses"
    )
    parser.add_argument(
        "--sga", action="store_true", help="bias and variance of each candidate's gradient apart, least bias first"
    )
    parser.add_argument("--json", type=Path, help="write everything here, step by step")


def run(args: argparse.Namespace) -> int:
    """Score the candidates, print the table, write the JSON. Raises `BundleError`, `ConfigError`."""
    torch.set_num_threads(1)
    recording = load(args.recording)
    sweep = parse_sweep(args.sweep) if args.sweep else None
    selected = candidates(recording, args.rules or (), args.preset or (), args.loss or (), sweep)
    outcomes = [_judge(candidate, recording) for candidate in selected]
    print(table(recording, outcomes, shutil.get_terminal_size().columns, sga=args.sga))
    if sweep is not None:
        swept = outcomes[-len(sweep.values) :]
        name = f"whatif-{Path(sweep.rule).name.replace(':', '.')}.{sweep.threshold}.svg"
        drawn = args.picture or (args.recording if args.recording.is_dir() else args.recording.parent) / name
        drawn.write_text(picture(sweep, swept), encoding="utf-8")
        print(f"\n{bars(sweep, swept)}\n\n{sweep.telling(recording.config.correction)}; picture: {drawn}")
    if args.json:
        document = {
            "recording": recording.source,
            "sweep": None if sweep is None else asdict(sweep),
            "steps": list(recording.steps),
            "candidates": [asdict(outcome) for outcome in outcomes],
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def candidates(
    recording: Recording,
    rules: Sequence[str],
    presets: Sequence[str],
    losses: Sequence[str],
    sweep: Sweep | None = None,
) -> list[Candidate]:
    """The candidates: the recorded configuration first, then those asked for, or every preset and every loss.

    A preset is tried with the recorded loss, a loss with the recorded correction. Those of `sweep` come last. Raises
    `ConfigError` for rules that cannot be read, or a loss or rule that does not exist or cannot be loaded.
    """
    config = recording.config
    listed = [Candidate(AS_TRAINED if recording.trained else "defaults", config.correction, config.loss)]
    if not (rules or presets or losses or sweep):
        presets, losses = tuple(PRESETS), tuple(LOSSES)
    for text in rules:
        listed.append(
            Candidate(f"rules {text}", _without_preset(config.correction, rules=_parse_rules(text)), config.loss)
        )
    for name in presets:
        loss = LossConfig(aggregation=config.loss.aggregation) if PRESETS[name].bypass else config.loss
        listed.append(Candidate(f"preset {name}", CorrectionConfig.model_validate({"preset": name}), loss))
    for name in losses:
        registry.get(name)
        correction = config.correction
        if correction.preset is not None and PRESETS[correction.preset].bypass:
            correction = _without_preset(config.correction, rules=config.correction.rules)
        listed.append(Candidate(f"loss {name}", correction, LossConfig.model_validate({"name": name})))
    return listed + (sweep.candidates(config.correction, config.loss) if sweep is not None else [])


def table(recording: Recording, outcomes: Sequence[RuleOutcome], columns: int = 80, *, sga: bool = False) -> str:
    """The outcomes as text, and what the recording itself says. `sga`: by the bias and the variance they leave.

    No line is longer than `columns`: a name that does not fit has its figures below it.
    """
    first, shown = outcomes[0], _SGA if sga else _COLUMNS
    if sga:
        outcomes = sorted(
            outcomes, key=lambda rule_outcome: (rule_outcome.pooled or {}).get("gradient/bias_tv", math.inf)
        )
    room = max(LEAST_NAME, columns - CELL * len(shown))
    width = min(room, max(len(outcome.name) for outcome in outcomes))
    wrap = partial(textwrap.wrap, width=max(LEAST_NAME, columns), break_on_hyphens=False)
    steps = f"{recording.source}, steps {min(recording.steps)} to {max(recording.steps)}; means over all tokens"
    lines = [*wrap(steps), ""]
    for word in (0, 1):
        lines.append(" " * width + "".join(f"{title.split()[word]:>{CELL}}" for title, _ in shown))
    for outcome in outcomes:
        if outcome.pooled is None:
            lines += wrap(f"{outcome.name:<{width}}  cannot: {outcome.refused}", subsequent_indent="    ")
            continue
        *above, name = wrap(outcome.name, width=width) or [""]
        lines += above
        cells = [outcome.pooled.get(key) for _, key in shown]
        lines.append(f"{name:<{width}}" + "".join(f"{_cell(value):>{CELL}}" for value in cells))
        if outcome.uncalibrated:
            lines += wrap(outcome.uncalibrated, initial_indent="  ", subsequent_indent="  ")
    if sga and first.pooled is not None:
        lines += ["", *wrap(f"{first.name}: {quadrant(first.pooled)}")]
    elif first.histogram:
        widest = min(50, max(10, columns - 20))
        lines += ["", f"effective gradient weights, {first.name}:"]
        lines += [
            f"  {label:>8} {share:7.2%} {'#' * round(widest * share)}" for label, share in first.histogram.items()
        ]
    return "\n".join([*lines, "", *wrap(f"verdict: {first.verdict or first.refused}")])


def _cell(value: float | None) -> str:
    """A figure of at most seven characters, or a dash."""
    if value is None:
        return "-"
    if abs(value) < 1e4:
        return f"{value:.4f}" if abs(value) < 9.99 else f"{value:.4g}"
    text = f"{value:.1e}"
    return text if len(text) < CELL else f"{value:.0e}"


def _judge(candidate: Candidate, recording: Recording) -> RuleOutcome:
    needs = registry.get(candidate.loss.name).needs if candidate.loss.name else ()
    if "groups" in needs and not recording.grouped:
        return RuleOutcome(
            candidate.name, refused="it compares the samples of a prompt, and the dump does not say which these are"
        )
    return judge(candidate, recording.config, recording.steps)


def _without_preset(correction: CorrectionConfig, *, rules: tuple[RuleConfig, ...]) -> CorrectionConfig:
    return correction.model_copy(update={"preset": None, "rules": rules})


def _mistake(error: yaml.YAMLError | ValidationError) -> str:
    """YAML's own words and place, or every field that is wrong."""
    if isinstance(error, yaml.YAMLError):
        return str(error)
    fields = (
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
        for problem in error.errors(include_url=False)
    )
    return "\n".join(fields)


def _parse_rules(text: str) -> tuple[RuleConfig, ...]:
    try:
        data = yaml.safe_load(text)
        rules = TypeAdapter(tuple[RuleConfig, ...]).validate_python(data if isinstance(data, list) else [data])
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(
            "these are no rules",
            where="--rules",
            got=f"{text}\n{textwrap.indent(_mistake(error), ' ' * 12)}",
            expected="as in correction.rules, e.g. '[{name: trm_max, thresholds: {max_kl: 0.5}}, {name: icepop}]'",
        ) from error
    for rule in rules:
        corrections.get(rule.name)
    return rules
