"""The audit: a sample of rows, their scores under the plain model, and an answer to each question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from launch.start.checks import Check
from moe_trm.errors import BundleError, ConfigError, RecordRejected
from moe_trm.tools.audit.audit_answer import AuditAnswer
from moe_trm.tools.audit.dump import OPTIONAL, AuditDump
from moe_trm.tools.audit.logprob_causes import (
    ENGINES,
    EngineVerdict,
    engine_answers,
    share_answer,
    shares,
    support_answer,
    verdict,
    which_answer,
)
from moe_trm.tools.audit.mask_causes import mask_answer
from moe_trm.tools.audit.power import row_power, rows_needed
from moe_trm.tools.audit.reference import ReferenceModel, RowScores
from moe_trm.tools.audit.remedies import remedies_of
from moe_trm.tools.audit.route_causes import route_answers, route_faults, stale_routes


@dataclass(frozen=True)
class AuditOptions:
    """Facts that the dump does not hold, and how surely a fault has to be found.

    Attributes:
        temperature, top_p: of sampling, where the dump does not have them.
        share, power: a fault in this share of the rows is in the sample with this chance.
        rows: size of the sample in place of what follows from the two.
        seed: of the sample.
    """

    temperature: float | None = None
    top_p: float | None = None
    share: float = 0.03
    power: float = 0.99
    rows: int | None = None
    seed: int = 0

    def checked(self) -> AuditOptions:
        """Itself. Raises `ConfigError` for values that mean nothing."""
        ranges = {
            "--temperature": self.temperature is None or self.temperature > 0,
            "--top-p": self.top_p is None or 0 < self.top_p <= 1,
            "--share": 0 < self.share < 1,
            "--power": 0 < self.power < 1,
            "--rows": self.rows is None or self.rows > 0,
        }
        for name, legal in ranges.items():
            if not legal:
                raise ConfigError("a value out of range", where=name, expected="above 0; shares and --power below 1")
        return self


@dataclass(frozen=True)
class Audit:
    """Everything that an audit found.

    Attributes:
        source, framework, checkpoint: what was examined.
        rows, sample: rows of the dump, and how many were scored.
        power: chance that the sample has a row of a fault in `share` of them.
        rejected: rows that could not be judged, by reason.
        lacking: rows without a field.
        answers: in the order of the questions.
    """

    source: str
    framework: str
    checkpoint: str
    rows: int
    sample: int
    share: float
    power: float
    rejected: dict[str, int]
    lacking: dict[str, int]
    answers: list[AuditAnswer] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(answer.status != "fail" for answer in self.answers)


def examine_dump(
    dump: AuditDump, source: str, model: ReferenceModel, options: AuditOptions, tell: Callable[[Check], None]
) -> Audit:
    """Score a sample of the dump and answer every question that it can answer; each answer is told at once.

    Raises:
        ConfigError: options out of range, or another temperature than the dump's.
        BundleError: no row fits the model.
    """
    options = options.checked()
    temperatures = {row.temperature for row in dump.rows if row.temperature is not None}
    if options.temperature is not None and temperatures - {options.temperature}:
        raise ConfigError("the dump has another temperature", where="--temperature", got=options.temperature,
                          expected=sorted(temperatures))  # fmt: skip
    number = min(options.rows or rows_needed(len(dump.rows), options.share, options.power), len(dump.rows))
    order = np.sort(np.random.default_rng(options.seed).permutation(len(dump.rows))[:number])
    rejected = Counter(dump.rejected)
    scores, last = list[RowScores](), None
    for place in order.tolist():
        row = dump.rows[place]
        try:
            temperature = options.temperature if row.temperature is None else row.temperature
            scores.append(model.score(row, temperature, options.top_p))
        except RecordRejected as error:
            rejected[error.reason] += 1
            last = error
    if not scores:
        raise BundleError("no row of the sample fits this checkpoint", where=source, got=last)
    lacking = dump.lacking()
    if options.temperature is not None:
        lacking.pop("temperature", None)
    power = row_power(len(scores), len(dump.rows), options.share)
    audit = Audit(source, dump.framework, str(model.folder), len(dump.rows), len(scores), options.share, power,
                  dict(rejected), lacking)  # fmt: skip
    for answer in [
        *_coverage(audit),
        *_answers(scores, dump.framework, len(dump.rows), options.share, model.num_experts),
    ]:
        audit.answers.append(answer)
        tell(answer.check)
    return audit


def _coverage(audit: Audit) -> list[AuditAnswer]:
    """Rows that could not be judged, and questions that stay open."""
    scored = f"{audit.sample} of {audit.rows} rows scored."
    answers = [AuditAnswer("rows", "none", "ok", scored, figures={"power": audit.power})]
    if audit.rejected:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(audit.rejected.items()))
        answers[0] = AuditAnswer("rows", "rejected", "warn", f"{scored} Not judged: {reasons}.",
                            "docs/healthy.md says what each row needs")  # fmt: skip
    for name, count in audit.lacking.items():
        title, question = OPTIONAL[name]
        everywhere = "The dump has none" if count == audit.rows else f"{count} of {audit.rows} rows have none"
        answers.append(AuditAnswer(title, "open", "skip", f"{everywhere}. Open: {question}."))
    return answers


def _answers(
    scores: Sequence[RowScores], framework: str, rows: int, share: float, num_experts: int
) -> list[AuditAnswer]:
    fix = remedies_of(framework)
    faults = route_faults(scores, num_experts)
    faults += stale_routes(scores, {fault.row for fault in faults})
    faulty = {fault.row for fault in faults}
    answers = route_answers(scores, faults, num_experts, rows, share, fix)
    masks = mask_answer(scores, rows, share, fix)
    answers += [masks] if masks is not None else []
    names = () if masks is None else masks.rows
    unmasked = {number for number, row in enumerate(scores) if row.row.name in names}
    verdicts = dict[str, EngineVerdict]()
    for engine in ENGINES:
        engine_verdict = verdict(scores, engine, faulty, unmasked, num_experts)
        if engine_verdict is not None:
            verdicts[engine] = engine_verdict
            answers += engine_answers(scores, engine_verdict, rows, share, fix)
    if len(unmasked) == len(scores):
        words = "The masks are not the sampler's, so it is not known which ids log-probs are over."
        answers.append(AuditAnswer("log-probs", "open", "skip", words))
    if (rollout := verdicts.get("rollout")) is not None:
        trainer = verdicts.get("trainer")
        support = support_answer(rollout, trainer, masks=masks is not None, fix=fix)
        answers += [support] if support is not None else []
        figures = shares(scores, rollout)
        answers += [share_answer(figures)] if figures else []
        answers += [which_answer(rollout, trainer)] if trainer is not None else []
    return [_with_advantages(scores, answer) for answer in answers]


def _with_advantages(scores: Sequence[RowScores], answer: AuditAnswer) -> AuditAnswer:
    """The answer with the share of the absolute advantage that the affected rows carry."""
    sizes = {row.row.name: float(np.abs(row.row.advantages).sum()) for row in scores if row.row.advantages is not None}
    total = sum(sizes.values())
    if not answer.rows or len(sizes) < len(scores) or not total:
        return answer
    carried = sum(sizes[name] for name in answer.rows) / total
    words = f"{answer.sentence} These rows carry {carried:.0%} of the absolute advantage."
    return replace(answer, sentence=words, figures={**answer.figures, "advantage_share": carried})
