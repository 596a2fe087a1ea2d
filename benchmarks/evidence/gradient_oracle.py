"""Direction of each correction: its gradient against the gradients of the learner's and the engine's own policy.

`python -m benchmarks.evidence.gradient_oracle [--cells FILE] [--checkpoints N] [--only-report] [--json FILE]
[--picture FILE]`. It adds each finished cell to `FILE`, and goes on where it was stopped, on another machine too.

Fixed before it ran, by this file. A checkpoint is the quickstart's start after 60 to 120 more supervised steps. An
engine gets its weights, and answers 16 prompts twice, by halves, with 8 answers each: in bfloat16, with weights of fp8
or int4 (and bfloat16 arithmetic), or in float32 with noise of 0.2 on its routers. That noise is fixed, or drawn anew
for each 64 answers. The learner is 0, 2 or 8 updates ahead, of 32 answers of its own each. Every arm then makes its
gradient of the same 256 answers. Six checkpoints, three distances and 256 answers were chosen by the time that one
pilot checkpoint took, which is not among them. Planned had been eight, five and 512. A second pilot ran all cells of
another checkpoint at a learning rate of 1e-4, and was looked at. There the learner went too far (k3 0.07 after 8
updates, where `phase_map.yaml` has 0.008 on average), and its gradients were small and noisy. So the rate was halved,
and the pooled cosine was added. Neither pilot counts.

- Primary: the cosine between the mean of that gradient and the gradient of the expected reward of the learner's own
  policy, with its own routes. The latter is estimated from 1,024 answers of that policy to the same prompts. Products
  are between halves, so that noise does not lower a cosine.
- Beside it: that cosine pooled over checkpoints, which small gradients do not upset (products and squared norms are
  summed first, each in units of the oracle's); the cosine to the gradient of the policy of the engine that answered,
  and the progress of a batch of 128 answers as a share of the progress on policy.
- Control: 256 answers of the learner's own policy, on another draw, give a cosine of 1.00 within 0.02 on average.
- Contrasts: R3 less no correction and R3 less `seq_tis`, means over the updates, and the slope of R3 less R2 by
  updates, for each engine; Student's t over checkpoints, and Holm for all 15. By themselves, likewise: each mask less
  random rows, all of which drop a fifth of the answers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM

from benchmarks.evidence import start
from benchmarks.evidence.oracle_answers import Answers, copy, engines, forward, problems, sample, served
from benchmarks.evidence.oracle_arms import (
    ARMS,
    MASKS,
    RANDOM,
    Gradients,
    Sampled,
    gradients,
    on_policy,
    policy_gradient,
    policy_loss,
    routes_of,
)
from benchmarks.evidence.pictured import axis, with_interval
from benchmarks.evidence.split_half import Halves, cosine, holm, inner, progress_share, student_p
from benchmarks.figure import Panel, document, lines
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.tools.experiment.tables import NOT_MEASURED
from moe_trm.tools.quickstart.trials import prepare_checkpoint
from routing.hf import HFReplayer
from routing.judge.flips import flips
from routing.record.sources import Native, Record, ReplayRecorded

CHECKPOINTS, UPDATES, NOISE = 6, (0, 2, 8), 0.2
PROMPTS, GROUP, ORACLE_GROUP, BATCH, MAX_NEW = 16, 8, 32, 64, 36
"""Prompts; answers to each in one half, of an arm and of the oracle; answers of a batch; most tokens of an answer."""
TRAINED = 128
"""Answers of the batch whose progress is compared."""
UPDATE_ANSWERS, RATE, BETAS, CLIP = 32, 5e-5, (0.9, 0.95), 1.0
"""Answers of an update of the learner, its learning rate and AdamW's decay rates, its limit on the gradient's norm."""
STEPS = (60, 90, 120)
"""Supervised steps of a checkpoint, in turn."""
ON_POLICY = "on_policy"
OUT, CELLS = Path("runs/gradient_oracle"), Path("benchmarks/evidence/results/gradient_oracle_cells.jsonl")
SHOWN = ("none", "R2", "R3", "TIS", "seq_TIS", "IcePop", "R3_TIS")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--cells", type=Path, default=CELLS, help=f"cells that are finished (default: {CELLS})")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the checkpoints (default: {OUT})")
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS, help=f"how many (default: {CHECKPOINTS})")
    parser.add_argument("--from-start", type=Path, default=Path("runs/quickstart-start"), help="the quickstart's start")
    parser.add_argument("--only-report", action="store_true", help="of the cells that are finished; run nothing")
    parser.add_argument("--picture", type=Path, help="write the figure here, as SVG")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not args.only_report:
        begin = prepare_checkpoint(args.from_start)
        for number in range(args.checkpoints):
            run(number, begin, args.out / f"checkpoint-{number}", args.cells)
    cells = read(args.cells)
    rows = [*summary(cells), *control(cells), *contrasts(cells)]
    report("Cosine to the gradient of the learner's own policy: means over checkpoints", rows, args.json)
    if args.picture:
        args.picture.write_text(draw(summary(cells)), encoding="utf-8")
    return 0


def read(cells: Path) -> list[dict[str, Any]]:
    """The finished cells."""
    return [json.loads(line) for line in cells.read_text(encoding="utf-8").splitlines()] if cells.exists() else []


def run(number: int, begin: Path, folder: Path, cells: Path) -> None:
    """Add the cells of a checkpoint that are not finished. `folder` has the checkpoint, made from `begin`."""
    finished = {(cell["engine"], cell["updates"]) for cell in read(cells) if cell["checkpoint"] == number}
    all_cells = [(name, ahead) for name in (ON_POLICY, *engines(NOISE, number)) for ahead in UPDATES]
    missing_cells = [cell for cell in all_cells if cell not in finished]
    if not missing_cells:
        return
    if not (folder / "warmup.json").exists():
        recipe = replace(start.RECIPE, max_digits=3)
        start.make(begin, folder, recipe, STEPS[number % len(STEPS)], seed=number + 20)
    first = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first.set_experts_implementation("grouped_mm")
    learners = updated(first, number)
    oracles = {ahead: on_policy(learner, own_answers(learner, ORACLE_GROUP, number, "oracle", ahead))
               for ahead, learner in learners.items()}  # fmt: skip
    for name, same in itertools.groupby(missing_cells, key=lambda cell: cell[0]):
        batches, engine, facts = ([], None, {}) if name == ON_POLICY else answered(first, name, number)
        for _, ahead in same:
            learner, key = learners[ahead], (number, name, ahead)
            if name == ON_POLICY:
                result = Gradients({name: on_policy(learner, own_answers(learner, GROUP, *key))}, {})
            else:
                result = gradients(learner, batches, moved=ahead > 0, seed=_seed(*key))
            cell = {"checkpoint": number, "engine": name, "updates": ahead, **facts}
            cell |= {f"{replay}_k3": value for replay, value in result.k3.items()}
            cell |= {"arms": {arm: judged(halves, oracles[ahead], engine) for arm, halves in result.arms.items()}}
            with cells.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cell) + "\n")
            print(f"checkpoint {number}, {name}, {ahead} updates ahead", flush=True)


def judged(arm: Halves, oracle: Halves, engine: Halves | None) -> dict[str, float]:
    """An arm's gradient beside the gradients of the learner's own policy and of the engine's."""
    figures = {"learner": cosine(arm, oracle), "progress": progress_share(arm, oracle, TRAINED)}
    figures |= {"square": inner(arm, arm) / inner(oracle, oracle), "along": inner(arm, oracle) / inner(oracle, oracle)}
    return figures if engine is None else figures | {"engine": cosine(arm, engine)}


def updated(first: Any, number: int) -> Mapping[int, Any]:
    """The learner by updates ahead: `AdamW` on minibatches of answers of `first`, with the loss of the arms."""
    prompts = problems(max(UPDATES) * UPDATE_ANSWERS // GROUP, f"oracle-updates-{number}")
    answers = sample(first, prompts, GROUP, MAX_NEW, _seed(number, "updates"))
    learner, learners = copy(first), {0: first}
    optimizer = torch.optim.AdamW(learner.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    for update, rows in enumerate(torch.split(torch.arange(len(answers.ids)), UPDATE_ANSWERS), start=1):
        part = answers.rows(rows)
        anchors = [HFReplayer(causal, max_local_flip_rate=1.0) for causal in (first, learner)]
        with torch.no_grad():
            old_logprobs, _ = forward(first, anchors[0], part, Native())
        current, _ = forward(learner, anchors[1], part, Native())
        optimizer.zero_grad()
        torch.autograd.backward(policy_loss(part, old_logprobs, current) / len(rows))
        torch.nn.utils.clip_grad_norm_(learner.parameters(), CLIP)
        optimizer.step()
        for replayer in anchors:
            replayer.detach()
        if update in UPDATES:
            learners[update] = copy(learner)
    return learners


def own_answers(causal: Any, group: int, number: int, name: str, ahead: int) -> list[tuple[int, Answers]]:
    """Answers of a policy to all prompts, twice, each batch with its half."""
    return [
        (half, sample(causal, prompts, group, MAX_NEW, _seed(number, name, ahead, place)))
        for place, (half, prompts) in enumerate(_prompt_batches(number, group))
    ]


def answered(first: Any, name: str, number: int) -> tuple[list[Sampled], Halves, dict[str, float]]:
    """Answers of an engine as the learner gets them, the gradient of its own policy, and facts about them."""
    batches, engine_gradients, flipped = [], [], []
    for place, (half, prompts) in enumerate(_prompt_batches(number, GROUP)):
        engine = served(first, engines(NOISE, number)[name].at(place))
        answers = sample(engine, prompts, GROUP, MAX_NEW, _seed(number, name, place))
        learner_side, engine_side = (HFReplayer(causal, max_local_flip_rate=1.0) for causal in (first, engine))
        with torch.no_grad():
            logprobs, of_engine = forward(engine, engine_side, answers, Record())
            native, of_learner = forward(first, learner_side, answers, Record())
            assert of_engine is not None
            assert of_learner is not None
            replayed, _ = forward(first, learner_side, answers, ReplayRecorded(of_engine))
        learner_side.report()
        for replayer in (learner_side, engine_side):
            replayer.detach()
        anchors = {"native": native, "R2": native, "R3": replayed}
        batches.append(Sampled(answers, half, logprobs, routes_of(of_learner, of_engine), anchors))
        engine_gradients.append(policy_gradient(engine.float(), answers))
        routes = [
            torch.stack([side.experts[layer] for layer in sorted(side.experts)], 1) for side in (of_learner, of_engine)
        ]
        flipped.append(flips(routes[0], routes[1], answers.valid.flatten()).token_layer_rate)
    first_half, second_half = (
        torch.stack([part for part, batch in zip(engine_gradients, batches, strict=True) if batch.half == half]).mean(0)
        for half in (0, 1)
    )
    facts = {"flipped": fmean(flipped), "reward": float(torch.cat([b.answers.rewards for b in batches]).mean())}
    return batches, Halves(first_half, second_half, sum(len(b.answers.ids) for b in batches)), facts


def _prompt_batches(number: int, group: int) -> Iterator[tuple[int, Sequence[Any]]]:
    """The prompts of each batch, with its half."""
    prompts, size = problems(PROMPTS, f"oracle-prompts-{number}"), BATCH // group
    for half in (0, 1):
        for place in range(0, PROMPTS, size):
            yield half, prompts[place : place + size]


def _seed(*parts: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def summary(cells: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Means over checkpoints with their intervals, by engine, updates and arm."""
    rows: list[Row] = []
    for name, ahead in itertools.product((ON_POLICY, *engines(NOISE, 0)), UPDATES):
        matches = [cell for cell in cells if (cell["engine"], cell["updates"]) == (name, ahead)]
        for arm in (ON_POLICY,) if name == ON_POLICY else ARMS:
            figures = [cell["arms"][arm] for cell in matches]
            cosines = [entry["learner"] for entry in figures if math.isfinite(entry["learner"])]
            if cosines:
                row: Row = {"engine": name, "updates": ahead, "arm": arm, "checkpoints": len(cosines)}
                row |= with_interval("to_learner", cosines)
                row["pooled"] = pooled(figures)
                row["to_engine"] = NOT_MEASURED if arm == ON_POLICY else fmean(entry["engine"] for entry in figures)
                rows.append(row | {"progress_share": fmean(entry["progress"] for entry in figures)})
    return rows


def pooled(figures: Sequence[Mapping[str, float]]) -> float:
    """The cosine to the learner's gradient over checkpoints; NaN where the squared norms are not above 0 in sum."""
    square = fmean(entry["square"] for entry in figures)
    return fmean(entry["along"] for entry in figures) / math.sqrt(square) if square > 0 else math.nan


def control(cells: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The cosine on policy, which must be 1: means over the updates of each checkpoint."""
    cosines: dict[int, list[float]] = {}
    for cell in cells:
        if cell["engine"] == ON_POLICY:
            cosines.setdefault(cell["checkpoint"], []).append(cell["arms"][ON_POLICY]["learner"])
    means = [fmean(values) for values in cosines.values()]
    return [{"control": ON_POLICY, "checkpoints": len(means), **with_interval("mean", means)}] if means else []


def contrasts(cells: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Differences of the cosine to the learner's gradient, over checkpoints with every cell of the engine."""
    families: tuple[list[Row], list[Row]] = ([], [])
    for name in engines(NOISE, 0):
        by_arm = [_by_arm(cells, name, number) for number in sorted({cell["checkpoint"] for cell in cells})]
        complete = [arms for arms in by_arm if arms is not None]
        if len(complete) < 2:
            continue
        for number, what, values in _differences(complete):
            row: Row = {"contrast": f"{name}: {what}", "checkpoints": len(values)}
            families[number].append(row | with_interval("mean", values) | {"p": student_p(values)})
    for family in families:
        corrected = holm({str(row["contrast"]): float(row["p"]) for row in family})
        for row in family:
            row["p_holm"] = corrected[str(row["contrast"])]
    return [row for family in families for row in family]


def _differences(complete: Sequence[Mapping[str, np.ndarray]]) -> Iterator[tuple[int, str, list[float]]]:
    """The family of a contrast, its name, and its value on each checkpoint."""
    for base in ("none", "seq_TIS"):
        yield 0, f"R3 - {base}", [float((arms["R3"] - arms[base]).mean()) for arms in complete]
    yield 0, "(R3 - R2) by updates", [float(np.polyfit(UPDATES, arms["R3"] - arms["R2"], 1)[0]) for arms in complete]
    for mask in MASKS:
        yield 1, f"{mask} - {RANDOM}", [float((arms[mask] - arms[RANDOM]).mean()) for arms in complete]


def _by_arm(cells: Sequence[Mapping[str, Any]], name: str, number: int) -> Mapping[str, np.ndarray] | None:
    """Cosines of a checkpoint by arm, in the order of the updates; None unless every cell is there and known."""
    by_update = {
        cell["updates"]: cell["arms"] for cell in cells if (cell["engine"], cell["checkpoint"]) == (name, number)
    }
    if set(by_update) != set(UPDATES):
        return None
    cosines = {arm: np.array([by_update[ahead][arm]["learner"] for ahead in UPDATES]) for arm in ARMS}
    return cosines if all(np.isfinite(values).all() for values in cosines.values()) else None


def draw(rows: Sequence[Row]) -> str:
    """SVG: by engine, the cosine to the learner's gradient over updates, of weights and replay, then of masks."""
    parts: list[str] = []
    groups = (SHOWN, ("none", *MASKS, RANDOM))
    for (down, arms), (right, name) in itertools.product(enumerate(groups), enumerate(engines(NOISE, 0))):
        points = [row for row in rows if row["engine"] == name]
        x0, y0 = 60 + 330 * right, 50 + 300 * down
        panel = Panel(x0, x0 + 190, len(UPDATES) + 0.5, 0, 1.3, top=y0, bottom=y0 + 200)
        parts += panel.frame(name, [(tick / 4, f"{tick / 4:.2f}") for tick in range(5)])
        parts += axis(panel, UPDATES, "updates ahead")
        parts += lines(panel, {arm: [float(row["to_learner"]) for row in points if row["arm"] == arm] for arm in arms})
    return document(parts, 60 + 330 * len(engines(NOISE, 0)), 50 + 300 * len(groups))


if __name__ == "__main__":
    sys.exit(main())
