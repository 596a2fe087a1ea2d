"""A sentence for every part of a rise, and the cause where the evidence names one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launch.start.checks import Check
from moe_trm.step.probe.pooled import Interval
from moe_trm.tools.growth.split import Rise, RisePart

Facts = Mapping[str, tuple[float, float]]
MOST = 0.5
"""Share of the rise from which a part is its cause."""
TITLES = {"k3": "k3", "tail": "tail beyond 2", "flips": "flip rate"}

SENTENCES = {
    ("texts", "length"): "the texts are {longer}: {length} tokens",
    ("texts", "position"): "the tokens stand {later}: after {position} tokens",
    ("texts", "entropy"): "the texts are {uncertain} under the same weights: entropy {entropy} nats",
    ("texts", "content"): "the texts differ otherwise",
    ("weights", "routing"): "on the same texts {more} experts flip: {weights/flips} of token-layers{closing}",
    ("weights", "output"): "the output amplifies rounding {stronger}: k3 of one rounding of the last hidden state "
    "{weights/unit}, entropy {weights/entropy} nats",
    ("weights", "rounding"): "rounding before the output is another: root mean square of the residual stream "
    "{weights/scale}",
    ("weights", "numerics"): "on the same texts and routes the engines round differently",
    ("weights", "margins"): "router margins {closed} on the same texts{closing}",
    ("weights", "noise"): "the rate of flips at the same margins is another: root mean square of the residual stream "
    "{weights/scale}",
    ("interaction", ""): "the new weights act otherwise on the new texts than on the old",
    ("push", ""): "what sampled is not what the checkpoint serves: recorded log-probs and routes differ from those of "
    "a server with its weights",
    ("staleness", ""): "tokens of older weights: {stale} of them",
    ("scoring", ""): "the run's learner scores are not those that its learner gives at the checkpoint again",
}
WAYS = {
    "longer": ("length", "longer", "shorter", "as long"),
    "later": ("position", "later", "earlier", "at the same places"),
    "uncertain": ("entropy", "less certain", "more certain", "as certain"),
    "more": ("weights/flips", "more", "fewer", "as many"),
    "stronger": ("weights/unit", "more", "less", "as much"),
    "closed": ("weights/close", "closed", "opened", "are as they were"),
}
"""Words by a fact: where it rose, where it fell, and where it did neither."""
CAUSES = {
    "texts": "of other texts",
    "weights": "of other weights",
    "interaction": "the new weights meet the new texts",
    "push": "the servers do not sample from what they were sent",
    "staleness": "samples are older",
    "scoring": "the learner's scores in the run are wrong",
}
FIXES = {
    "push": "sync.verify=true and sync.prove_every=1: the first push that is not served stops the run",
    "staleness": "a smaller pipeline.max_age, or correction.rules on `lag`",
    "scoring": "look for an index or a layout that changed: `moe-trm doctor CONFIG` scores the same tokens twice",
    "routing": "replay.mode=R3",
    "margins": "replay.mode=R3",
}


def checks_of(rises: Sequence[Rise], facts: Facts, absent: Sequence[str]) -> Iterator[Check]:
    """A line for each figure, with its parts, and which could not be measured."""
    for rise in rises:
        cause = cause_of(rise)
        lines = [f"{_plain(rise.then)} then, {_plain(rise.now)} now: {_change(rise.total)}."]
        lines += [_line(part, facts) for part in rise.parts if part.size.value or part.size.low or part.size.high]
        if absent:
            lines.append(f"not measured: {', '.join(absent)}")
        title = TITLES[rise.figure]
        if cause is None:
            yield Check(
                title, "ok" if rise.total.low <= 0 else "warn", "\n".join([lines[0] + _without(rise), *lines[1:]])
            )
            continue
        lines[0] = f"{lines[0]} It grows because {because(cause, facts)}"
        yield Check(title, "warn", "\n".join(lines), FIXES.get(cause.detail, FIXES.get(cause.name, "")))


def cause_of(rise: Rise) -> RisePart | None:
    """The part that makes the rise; its detail is the largest there. None: it did not rise, or no part is it.

    Rise and part have to be above zero with their intervals, and the part at least half of the rise. Of texts and of
    weights counts what they make beside both states of the other: what the interaction takes back is no cause.
    Neither is what no trait of the texts explains: with heavy tails, two draws of the same texts differ by as much.
    """
    if rise.total.low <= 0:
        return None
    sums = {name: sum(part.size.value for part in rise.parts if part.name == name) for name in CAUSES}
    for name in ("texts", "weights"):
        sums[name] += min(0.0, sums["interaction"])
    name = max(sums, key=lambda part: sums[part])
    if sums[name] < MOST * rise.total.value:
        return None
    largest = max((part for part in rise.parts if part.name == name), key=lambda part: part.size.value)
    return largest if largest.size.low > 0 and largest.detail != "content" else None


def because(part: RisePart, facts: Facts) -> str:
    """The cause in words."""
    detail = _sentence(part, facts)
    return f"{CAUSES[part.name]}: {detail}."


def _line(part: RisePart, facts: Facts) -> str:
    name = f"{part.name}, {part.detail}" if part.detail else part.name
    return f"{_change(part.size):>36}  {name}: {_sentence(part, facts)}"


def _sentence(part: RisePart, facts: Facts) -> str:
    words = {name: f"{then:.3g} to {now:.3g}" for name, (then, now) in facts.items()}
    for word, (name, up, down, same) in WAYS.items():
        then, now = facts.get(name, (0.0, 0.0))
        words[word] = up if now > then else down if now < then else same
    words["closing"] = ""
    if "weights/close" in facts:
        limit = facts["weights/margin_limit"][0]
        words["closing"] = f", margins below {limit:.0e} (nine in ten flips) {words['weights/close']} of token-layers"
    return SENTENCES[part.name, part.detail].format_map(words)


def _without(rise: Rise) -> str:
    if rise.total.low <= 0:
        return " It did not grow beyond what other samples of prompts would show."
    return " No part alone makes most of it."


def _plain(interval: Interval) -> str:
    return f"{interval.value:.3g}"


def _change(interval: Interval) -> str:
    return f"{interval.value:+.3g} [{interval.low:+.3g}, {interval.high:+.3g}]"
