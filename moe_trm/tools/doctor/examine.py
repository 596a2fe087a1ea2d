"""All checks of a configuration, in the order in which they can fail, and what they recommend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.start.bisect import bisect
from launch.start.checks import Check, Status, attempt
from launch.start.dry_run import try_task
from launch.start.preflight import check_launch, check_model_and_layout
from moe_trm.config import load_with_choices
from moe_trm.config.flat import flatten
from moe_trm.config.schema import (
    AgentConfig,
    Config,
    CorrectionConfig,
    ModelConfig,
    ReplayConfig,
    RolloutConfig,
    SyncConfig,
    TaskConfig,
)
from moe_trm.errors import MoeTrmError
from moe_trm.observe.advice.remedies import changes
from moe_trm.rollout.agents.continuity import cut, situations
from moe_trm.rollout.agents.template import ChatTemplate
from moe_trm.rollout.servers.backend import Served
from moe_trm.run_folder.run import Row
from moe_trm.step.objective import Objective
from moe_trm.step.probe.pooled import PooledTokens, pooled
from moe_trm.tasks.tokens import Tokens
from moe_trm.tools.doctor.causes import Finding, find_cause
from moe_trm.tools.doctor.environment import environment
from moe_trm.tools.doctor.probe import Probed, ProbeFailed, zero_update
from moe_trm.tools.doctor.rehearsal import MEMORY, SWITCHES, fast_switches, memory, rehearsal, without_gpu
from moe_trm.tools.doctor.served import attached, known_difference
from moe_trm.tools.plan.needs import needs

HARMLESS: dict[str, Status] = {"none": "ok", "precision": "ok", "quantization": "ok", "routing": "warn"}
"""Causes that a run may be started with; all others make its results wrong."""


@dataclass
class Examination:
    """The doctor's checks in order, the cause of the engines' mismatch (None when it was not measured), and the
    settings to change, as typed on the command line.
    """

    checks: list[Check] = field(default_factory=list)
    finding: Finding | None = None
    advice: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(check.status != "fail" for check in self.checks)


def examine(
    config_path: str,
    overrides: Sequence[str],
    config: Config,
    world_size: int,
    folder: Path,
    tell: Callable[[Check], None],
    *,
    probe: bool = True,
    bisecting: bool = False,
    kept: bool = True,
    absent: str = "",
) -> Examination:
    """Examine everything; each check is told as soon as it is made.

    The probe runs in `folder`, and only when nothing failed before it. `bisecting`: `bisect` in its place.
    `kept`: the folder is there afterwards. `absent`: the checkpoint that is not on this machine, where `config` has the
    published description of its model in its place.
    """
    examination = Examination()

    def add(check: Check) -> None:
        examination.checks.append(check)
        tell(check)

    for check in _before(config, world_size, absent):
        add(check)
    if not probe:
        anywhere, choices = load_with_choices(config_path, overrides)
        settled = "\n".join(f"{choice.key}: {choice}" for choice in choices)
        add(Check("what auto became", "ok", settled or "no setting is at auto"))
        for check in rehearsal(Served.of(config), config.learner, config.sync, world_size, folder, absent=bool(absent)):
            add(check)
        if config.learner.backend == "megatron":
            layouts = anywhere.batch.layout, config.batch.layout
            add(attempt(SWITCHES, lambda: fast_switches(config.learner, config.model.checkpoint, *layouts)))
        add(attempt(MEMORY, lambda: memory(needs(config, world_size, fused=without_gpu()))))
    if not probe or not examination.healthy:
        add(
            Check(
                "zero-update probe",
                "skip",
                "not asked for" if examination.healthy else "something above has to be repaired first",
            )
        )
        return examination
    if bisecting:
        add(attempt("bisect", lambda: bisect(config, folder)))
        return examination
    try:
        probed = zero_update(config_path, overrides, config, folder)
    except ProbeFailed as error:
        problem, log = str(error.got), f"the whole log: {error.where}"
        if not kept:  # no path that is gone when it is read
            problem, log = problem.replace(str(folder), "FOLDER"), "--keep FOLDER keeps the whole log and the server's"
        add(Check("zero-update probe", "fail", problem, log))
        return examination
    except MoeTrmError as error:
        add(Check("zero-update probe", "fail", error.what, error.fix))
        return examination
    examination.finding = find_cause(probed.measurements, config.rollout.rounds_weights)
    if not changes(examination.finding.config, flatten(config.dump())):
        examination.finding = replace(examination.finding, config="")
    for check in _after(config.rollout, config.keeps_masks, config.sync, config.replay, probed, examination.finding):
        add(check)
    examination.advice = _advice(config.replay, config.correction, examination.finding)
    return examination


def _before(config: Config, world_size: int, absent: str) -> Iterator[Check]:
    folder, keeps = config.model.checkpoint, config.checkpoint
    yield from environment(folder, config.rollout, config.learner, config.sync, keeps, config.run_dir)

    def launch() -> str:
        check_launch(config, world_size=world_size)
        return f"accepted for {_ranks(world_size)}"

    def task() -> str:
        try_task(config)
        return "its prompts are there, and its functions answer"

    if has_weights(config.model.checkpoint):
        yield attempt("checkpoint, layout, corrections, loss", launch)
        yield attempt("task", task)
    else:
        yield from without_weights(config, world_size, absent)
    if absent:
        return
    yield attempt("tokenizer", lambda: _tokenizer(config.model))
    yield from known_difference(config.rollout, config.model.checkpoint)
    yield from chat_template(config.rollout, config.model, config.agent, config.task)
    yield from attached(config.rollout, config.model.checkpoint)


def has_weights(checkpoint: str) -> bool:
    """True where a checkpoint folder has more than its description. A folder that is not there counts as one too."""
    folder = Path(checkpoint)
    return not (folder / "config.json").is_file() or any(folder.glob("*.safetensors"))


def without_weights(config: Config, world_size: int, absent: str = "") -> Iterator[Check]:
    """The judgement of config.json alone: can this learner train this model in this layout, and the mathematics.

    `absent`: see `examine`.
    """

    def layout() -> str:
        hf_config = check_model_and_layout(config, world_size)
        Objective(config)
        return f"{hf_config['architectures'][0]} accepted for {_ranks(world_size)}"

    yield attempt("layout", layout)
    if absent:
        release = Path(config.model.checkpoint).name
        says = f"{absent} is not on this machine: judged by the config.json of {release}"
        yield Check("weights", "skip", says)
        return
    fix = "copy the checkpoint's safetensors and tokenizer there before the run"
    yield Check("weights", "fail", f"{config.model.checkpoint} has config.json and no safetensors", fix)


def _ranks(world_size: int) -> str:
    return f"{world_size} learner rank{'s' if world_size > 1 else ''}"


def _tokenizer(model: ModelConfig) -> str:
    tokens = Tokens(model.checkpoint)
    return f"{tokens.vocab_size} ids, stops at {', '.join(map(str, tokens.stop_token_ids))}"


def _after(
    rollout: RolloutConfig, keeps_masks: bool, sync: SyncConfig, replay: ReplayConfig, probed: Probed, finding: Finding
) -> Iterator[Check]:
    seen, measurements = probed.metrics, probed.measurements
    yield _requests(seen, len(measurements))
    if rollout.traits.has_weights:
        yield _push(sync, rollout, seen)
    if "weights/decode_gap" in seen:
        yield _use(seen)
    yield Check(
        "replay",
        "ok" if seen.get("replay/applied_fraction") == 1.0 else "fail",
        f"{seen.get('replay/applied_fraction', 0):.0%} of token-layers used their recorded routes; "
        f"the live router would have chosen others on {seen.get('routing/local_flip_rate', 0):.2%}",
    )
    tokens = PooledTokens(measurements.group, measurements.native, measurements.replayed, measurements.flipped_layers)
    figures = pooled(tokens, num_layers=measurements.num_layers)
    cast = seen.get("probe/cast_k3_kl")
    rounded = "" if cast is None else f", of which rounding the weights to {rollout.server.dtype} makes {cast:.2g}"
    yield Check(
        "mismatch",
        "ok",
        f"k3 {figures['all/native_k3']} nats with own routes, "
        f"{figures['all/replayed_k3']} with the rollout's{rounded}; "
        f"{figures['layer_flip_rate'].value:.2%} of token-layers flip",
    )
    yield _truncation(rollout, keeps_masks, seen)
    status: Status = HARMLESS.get(finding.cause, "fail")
    if finding.cause == "routing" and replay.mode == "R3":
        status = "ok"
    yield Check(f"cause: {finding.cause}", status, finding.sentence, finding.config if status != "ok" else "")


def _push(sync: SyncConfig, rollout: RolloutConfig, seen: Row) -> Check:
    if sync.verify and seen.get("weights/unpredicted"):
        return Check("weight push", "warn", "proved by use alone: checksums of this server are not predicted")
    if sync.verify:
        return Check("weight push", "ok", "the engine's checksums are those of what the learner sent")
    if rollout.quantization is not None:
        rounds = f"cannot be verified: the engine rounds what it is sent (rollout.quantization={rollout.quantization})"
        return Check("weight push", "warn", rounds)
    return Check("weight push", "warn", "not verified", "sync.verify=true")


def _use(seen: Row) -> Check:
    """The proof by use. Where it fails, the probe's run does, and says why."""
    learner = seen.get("weights/learner_gap")
    scored = "" if learner is None else f", and its prefill differs from the learner by {learner:.2g}"
    says = f"decoding differs from the same engine's prefill by {seen['weights/decode_gap']:.2g} nats a token{scored}"
    return Check("proof by use", "ok", says)


def _requests(seen: Row, num_tokens: int) -> Check:
    issued, rejected = seen.get("ledger/issued", 0.0), seen.get("ledger/rejected", 0.0)
    reasons = {name.split("/")[-1]: n for name, n in seen.items() if name.startswith("records/rejected/")}
    rejected_text = "; rejected: " + ", ".join(f"{n:.0f} {reason}" for reason, n in reasons.items()) if reasons else ""
    return Check(
        "real requests",
        "ok" if not rejected else "warn",
        f"{issued:.0f} samples, {num_tokens} tokens with routes, log-probs and versions{rejected_text}",
        "docs/troubleshooting.md explains each reason" if rejected else "",
    )


def _truncation(rollout: RolloutConfig, keeps_masks: bool, seen: Row) -> Check:
    truncates = rollout.truncates
    if keeps_masks:
        mass = seen.get("probe/kept_mass_mean")
        return Check(
            "sampling mask",
            "ok",
            "recorded" + (f"; the kept ids hold {mass:.3f} of the learner's mass" if mass else ""),
        )
    return Check(
        "sampling mask",
        "warn" if truncates else "ok",
        "off, while sampling is truncated: ids that could not be sampled are scored"
        if truncates
        else "off, and nothing is truncated",
        "sampling_mask.mode=keep" if truncates else "",
    )


def _advice(replay: ReplayConfig, correction: CorrectionConfig, finding: Finding) -> list[str]:
    advice = [finding.config] if finding.config else []
    routed = finding.figures["native_k3"] > 2 * finding.figures["replayed_k3"] > 0
    if routed and replay.mode == "none" and finding.cause in HARMLESS:
        advice.append("replay.mode=R3")
    if finding.cause in HARMLESS and not correction.rules and correction.preset is None:
        advice.append("correction.rules=[{name: trm_max, target_reject_rate: 0.01}]")
    return list(dict.fromkeys(advice))


NAME = "chat template"


def chat_template(rollout: RolloutConfig, model: ModelConfig, agent: AgentConfig, task: TaskConfig) -> Iterator[Check]:
    """The check of a run with an agent; none elsewhere."""
    if rollout.agent is not None:
        yield attempt(NAME, lambda: look(model, agent, task))


def look(model: ModelConfig, agent: AgentConfig, task: TaskConfig) -> Check:
    """Each situation in which ids go on, and each in which a branch is cut. Raises `CheckpointError`."""
    tokens = Tokens(model.checkpoint, task.chat_template_kwargs)
    if not tokens.has_chat_template:
        return Check(NAME, "skip", "the tokenizer has none; completions go on behind the sampled ids without it")
    thinks = agent.reasoning_parser is not None
    all_situations = situations(ChatTemplate(tokens), tools=agent.tool_parser is not None, thinks=thinks)
    going = "goes on behind the sampled ids at " + ", ".join(
        situation.name for situation in all_situations if not situation.why
    )
    lines = [f"begins another branch at {situation.name}: {situation.why}" for situation in cut(all_situations)]
    return Check(
        NAME,
        "warn" if lines else "ok",
        "\n".join([going, *lines] if len(lines) < len(all_situations) else lines),
        "agent/cut counts such branches, and agent.rows says what of them is trained (docs/agents.md)" if lines else "",
    )
