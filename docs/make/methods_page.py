"""Write docs/methods.md and the torch-free table of methods from the code: `python -m docs.make.methods_page`."""

from __future__ import annotations

import argparse
import inspect
import json
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from benchmarks import length_bias
from moe_trm import corrections, losses
from moe_trm.advantages import by_row as advantages
from moe_trm.advantages import by_token as token_advantages
from moe_trm.advantages.by_name import explained_variance
from moe_trm.advantages.zero_variance import entropy_shaped
from moe_trm.corrections import RegisteredRule
from moe_trm.diagnostics import (
    acceptance,
    bounds,
    certificate_estimate,
    divergences,
    gradient_noise,
    gradient_power,
    metrics,
)
from moe_trm.losses import aggregate, kl, off_policy
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.built_in import FILE
from moe_trm.methods.parameters import Parameter, declared
from moe_trm.observe.advice.verdict import verdict
from moe_trm.step.passes import interpolated
from moe_trm.step.recipe import FROM_ANCHORS

Method: TypeAlias = RegisteredRule | losses.Loss

PAGE = Path(__file__).parents[1] / "methods.md"

INTRO = """# Methods

Written by `python -m docs.make.methods_page` from the docstrings of the code; a test keeps it up to date.

**Policies.** `mu`: the rollout engine at the weights that sampled (`rollout_logprobs`). `pi_old`: the learner at the
same weights (`behavior_logprobs`). `pi_prox`: the learner when the step began (`proximal_logprobs`). `pi_theta`: the
learner now (`current_logprobs`).

**Ratios.** `engine` = pi_old / mu (written rho), `lag` = pi_prox / pi_old, `update` = pi_theta / pi_prox (written r),
`staleness` = lag x update, `merged` = engine x lag, `total` = pi_theta / mu (written w). Any method takes `ratio: NAME`
to read another one than its own.

**Shapes.** B rows, T tokens: log-probs, ratios, advantages, masks, weights and keep masks are `[B, T]`; row statistics
are `[B]`. Only sampled tokens count: prompts, tool outputs and padding change nothing. Statistics are float32 at least.

**Calibration.** Where `target_reject_rate` is possible, it takes the place of the thresholds: the rule measures for
`correction.calibration_steps` steps, and then rejects what would have been that share.

**Scores.** A rule on rows compares one number of the row with its threshold. `score` chooses the number, alike in every
rule that has it and on any ratio: `max` (the worst token), `mean`, `sum`, `ln` (the mean with weights that fall towards
the end of the row; needs `ln_delta`) or `ser` (the mean of abs(w - 1)). Rules on a band of ratios and the veto refuse
`ser`, which has no sign.

**By turn.** `scope: turn` among the thresholds of a rule on rows makes it judge each turn of a conversation as a row of
its own: one bad turn does not cost the others. Scores, lengths and target reject rates then belong to turns.
`correction/<rule>/kept_turn_fraction` is the share of turns that lost no token, and
`correction/<rule>/kept_turn_fraction/<turn>` is the share of first turns, of second turns and so on.

**By length.** One threshold is never neutral to length: maxima and sums reject long rows more, means short ones. With
`by_length: true` beside `target_reject_rate` each octave of length (8 to 15 tokens, 16 to 31, ...) has its own
threshold, linear in log2 length in between. It comes from a running buffer of the octave's latest scores and follows
the run. `correction/<rule>/rejected_length_<octave>` is the share that was rejected, and
`correction/<rule>/threshold_<name>_length_<octave>` the threshold. It costs:

- **A bound.** The threshold follows a slow drift, so a growing mismatch hides behind a constant share. Watch the
  thresholds, and put a rule with a fixed one beside it, such as `token_veto`. A batch that is suddenly broken is
  rejected whole. If it lasts, it becomes the usual after about 20 / `target_reject_rate` rows of an octave.
- **Rare lengths.** An octave is judged from 10 / `target_reject_rate` rows on. Until then its rows are kept and counted
  in `correction/<rule>/unjudged_fraction`. Nothing is borrowed from other octaves.
- **Time.** The rule is computed twice on each micro-batch. Once a step, two numbers of each row are gathered from all
  ranks, and some thousand are sorted.

It is for rules that reject rows. Rules on tokens and `seq_tis`, which only truncates, are refused. A rule of your own
takes part if it has `calibrate` and its thresholds may be tensors `[B]`.
"""

TOKENS = "element-wise on the micro-batch; nothing is sent between ranks."
ROWS = "one sum or maximum over each row of the micro-batch; nothing is sent between ranks."
GATHERED = "a few numbers of each sampled token are gathered from all ranks once for each update"
AGAIN = "; every update of a step but the first needs one more forward pass without gradient."
NEEDED = {
    "entropy": " The entropy takes one more pass of the output layer over the vocabulary.",
    "reference": " The reference takes a pass of its own, as with a KL term.",
    "routers": " Routers compute their logits twice, and the anchor's scores are kept in the meantime.",
}

WIDTH = 118
WHEN = {
    "corrections": """\
Listed in `correction.rules`, or by `correction.preset`. In short: reweight (`*_tis`, `icepop`) when the mismatch is
small and unbiased gradients matter; reject tokens (`token_*`, `icepop`) against isolated outliers; reject rows by a
mean (`trm_avg`, `ser`, `ln_trm`, `geometric_mask`, `seq_mean_*`) against drift; by a maximum (`trm_max`, `token_veto`,
`seq_max_*`) for guarantees on every token; `opsm` against old negative rows; `m2po` under heavy staleness. Rules with
`target_reject_rate` choose their threshold themselves. A rule may be listed on several ratios, each with its own
thresholds: its metrics are then called after both, as in `correction/trm_max@staleness/kept_fraction`. Look at
`acceptance/length_*` before you trust any of them.""",
    "losses": """\
Chosen by `loss.name`, parameters in `loss.parameters`. "Contains" names the ratio that the gradient depends on: a rule
that weighs by any part of it is refused at launch, since it would be counted twice. In short: `ppo_clip` unless there
is a reason; sequence ratios (`gspo`, `gmpo`) for long MoE answers; detached weights (`cispo`, `minirl`, `topr`) where
clipped tokens should still learn; `vespo`, `m2po_clip`, `oapl` for old data. Those marked *experimental* have no
established published form.""",
    "advantages": """\
Chosen by `advantage.name`. In short: `grpo` by default; `dr_grpo` and `rloo` without the bias of the standard
deviation; `opo` when lengths differ much; `opob` for old samples; `otb` for a baseline of each token; `turn_grpo`
for one of each turn; `reinforce_plus_plus` or `remax` without groups; `pass_at_k` for best-of-k objectives.""",
}


def page() -> str:
    """The whole page."""
    parts = [
        INTRO,
        "## Corrections\n",
        WHEN["corrections"] + "\n",
        *(_correction(name) for name in corrections.names()),
        _presets(),
        "## Losses\n",
        WHEN["losses"] + "\n",
        *(_loss(name) for name in losses.names()),
        *_functions("Aggregation", [aggregate]),
        "## Advantages\n",
        WHEN["advantages"] + "\n",
        f"Usable by name: {', '.join(f'`{name}`' for name in ADVANTAGES)}.\n",
        *_functions("", _of_module(advantages) + _of_module(token_advantages) + [entropy_shaped]),
        *_functions("KL to a reference", [kl.kl_estimate, kl.importance_corrected_k3, kl.AdaptiveKL, kl.rollout_kl]),
        *_functions("Tools for old data", [*_of_module(off_policy), interpolated]),
        *_functions("Diagnostics", [metrics, acceptance, gradient_power, gradient_noise, explained_variance]),
        *_functions("", [divergences, certificate_estimate, verdict]),
        *_functions("Bounds", _of_module(bounds)),
        _length_bias(),
    ]
    return "\n".join(_narrow(line) for line in "\n".join(parts).split("\n"))


def table() -> str:
    """The corrections and losses of the packages as JSON, one on a line, as `moe_trm.methods` reads them."""
    kinds = {"corrections": _declared(corrections, RegisteredRule), "losses": _declared(losses, losses.Loss)}
    parts = [
        f'"{kind}": {{\n' + ",\n".join(f'"{name}": {json.dumps(entries[name])}' for name in sorted(entries)) + "\n}"
        for kind, entries in kinds.items()
    ]
    return "{" + ",\n".join(parts) + "}\n"


def _declared(package: ModuleType, kind: type[Method]) -> dict[str, dict[str, object]]:
    """Facts of every method of the package's modules, by name; facts that have their default are left out."""
    facts_by_name: dict[str, dict[str, object]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        for method in vars(import_module(f"{package.__name__}.{info.name}")).values():
            if isinstance(method, kind) and method.function.__module__.endswith(f".{info.name}"):
                facts: dict[str, object] = {"module": info.name, "ratio": method.ratio, "scope": method.scope}
                optional: dict[str, object] = (
                    {"weighs": method.weighs, "weight": method.defaults.get("weight")}
                    if isinstance(method, RegisteredRule)
                    else {"needs": method.needs, "holds": "" if method.holds == "own" else method.holds}
                )
                facts_by_name[method.name] = {**facts, **{key: value for key, value in optional.items() if value}}
    return facts_by_name


def _narrow(line: str) -> str:
    """A line of prose in lines of the width of the other pages; rows of tables stay whole."""
    if len(line) <= WIDTH or line.startswith("|"):
        return line
    return textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def _correction(name: str) -> str:
    rule = corrections.get(name)
    reads = "`target_reject_rate` possible" if rule.calibrate else "thresholds by value only"
    facts = [f"reads `{rule.ratio}`", f"scope `{rule.scope}`", reads]
    moves = rule.ratio not in FROM_ANCHORS
    return _entry(name, facts, rule.function, _cost(rule.scope, moves=moves))


def _loss(name: str) -> str:
    objective = losses.get(name)
    facts = [f"on `{objective.ratio}`", f"scope `{objective.scope}`", f"aggregation `{objective.aggregation}`"]
    facts.append("contains no ratio" if objective.holds == "none" else f"contains `{_held(objective)}`")
    cost = _cost(objective.scope, moves=True) + "".join(NEEDED.get(need, "") for need in objective.needs)
    return _entry(name, facts + (["*experimental*"] if objective.experimental else []), objective.function, cost)


def _held(objective: losses.Loss) -> str:
    return "total" if objective.holds == "total" else objective.ratio


def _cost(scope: str, *, moves: bool) -> str:
    """Cost of a method of that scope. `moves`: it reads a ratio that changes with every update."""
    if scope == "batch":
        return GATHERED + (AGAIN if moves else "")
    return ROWS if scope == "sequence" else TOKENS


def _entry(name: str, facts: list[str], function: Callable[..., Any], cost: str) -> str:
    required, defaults = declared(function)
    values = [f"`{key}` (no default)" for key in required] + [f"`{k}` = {_shown(v)}" for k, v in defaults.items()]
    parameters = f"Parameters: {', '.join(values)}.\n\n" if values else ""
    return f"### `{name}`\n\n{', '.join(facts)}.\n\n{parameters}{_text(function)}\n\n**Cost:** {cost}\n"


def _functions(title: str, functions: list[Any]) -> Iterator[str]:
    if title:
        yield f"## {title}\n"
    for function in functions:
        yield f"### `{function.__name__}`\n\n{_text(function)}\n"


def _of_module(module: Any) -> list[Any]:
    return [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _presets() -> str:
    lines = ["## Presets\n", "| preset | rules | loss |", "|---|---|---|"]
    for name, preset in corrections.presets.items():
        rules = "; ".join(f"`{rule}` {_thresholds(thresholds)}" for rule, thresholds in preset.rules) or "none"
        loss = f"`{preset.loss[0]}` {_thresholds(preset.loss[1])}" if preset.loss else "any"
        lines.append(f"| `{name}` | {rules} | {loss.strip()} |")
    return "\n".join([*lines, ""])


def _thresholds(values: Any) -> str:
    return ", ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _length_bias() -> str:
    lines = [
        "## Length bias\n",
        "On independent noise no length deserves to be rejected more than another. The table has the rejected rows",
        f"in percent by number of tokens, at thresholds that reject {length_bias.REJECTED:.0%} of all rows. The slope",
        "is in percentage points per doubling of length, with its 95% interval (binomial counts at the calibrated",
        "threshold): `python -m benchmarks.length_bias`.\n",
        "![left: with one threshold up to 64% of the long or 35% of the short rows are rejected; right: with by_length "
        "10% of each octave](length_bias.svg)\n",
        "| rule | slope | " + " | ".join(str(length) for length in length_bias.LENGTHS) + " |",
        "|---|---|" + "---|" * len(length_bias.LENGTHS),
    ]
    for slope in length_bias.slopes():
        rates = " | ".join(f"{rate:.1f}" for rate in slope.rates)
        lines.append(f"| `{slope.rule}` | {slope.slope:+.1f} ({slope.low:+.1f} to {slope.high:+.1f}) | {rates} |")
    lines.append(
        "\nMaxima and sums reject long rows more. Means reject short rows more, because their spread shrinks with\n"
        "length. With `by_length` every octave is rejected alike, while the noise doubles too. The figures of every\n"
        "rule are in `benchmarks/RESULTS.md`.\n"
    )
    return "\n".join(lines)


def _text(function: Any) -> str:
    text = inspect.getdoc(function) or ""
    text = re.sub(r"^When: ", "**When:** ", text, flags=re.MULTILINE)
    return re.sub(r"^(Args|Raises|Attributes):$", r"**\1:**\n", text, flags=re.MULTILINE)


def _shown(value: Parameter) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m docs.make.methods_page", description=__doc__).parse_args()
    FILE.write_text(table(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
