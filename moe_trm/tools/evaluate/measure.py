"""An evaluation from beginning to end: engine, proof of its weights, answers, results."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from moe_trm.config.engines import LEARNER
from moe_trm.config.schema import Config
from moe_trm.config.task_rules import greedy_metric
from moe_trm.errors import ConfigError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.rollout.build import build_engine, build_sampler, sampling_params
from moe_trm.rollout.credentials import api_key_for
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.evaluation import Answer, Evaluator, SetAnswers
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import start_server
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.manifest import TensorEntry, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.tasks.build import build_task
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import reward_input
from moe_trm.tools.evaluate.own_policy import OwnPolicy

BARE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "replay": {"mode": "none"},
        "probe": {"every": 0},
        "sampling_mask": {"mode": "off"},
        "pipeline": {"mode": "sync", "partial": "wait"},
        "sync": {"method": "disk"},
    }
)
"""Settings that leave out what only training needs of an engine: routes, masks, pushes that interrupt."""


@dataclass(frozen=True)
class Evaluation:
    """Results.

    Attributes:
        metrics: as a run's, `eval/...`.
        intervals: 95% interval of the mean reward of the greedy answers of each set, over its prompts.
        answers: of each set: prompt, expected answer, and every answer with its reward.
        dtype: arithmetic of the policy that answered.
    """

    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    answers: Mapping[str, list[dict[str, Any]]]
    dtype: str


def evaluate(config: Config, weights: Path, by: str, scratch: Path, log: Path) -> Evaluation:
    """Measure the policy of a Hugging Face folder. Of `config` the task, the evaluation and the rollout side are read.

    `by` names the configured engine (its servers, or one that is started), or is `LEARNER`: transformers, in
    `learner.dtype`. `scratch` is for the weights in the engine's dtype, `log` for the output of a started server.

    Raises:
        ConfigError: nothing to evaluate on.
        CheckpointError, EngineError, SyncError: the weights cannot be loaded, or served as they are.
    """
    if not config.task.has_evaluation:
        raise ConfigError(
            "there are no held-out prompts to evaluate on",
            where="config keys task.eval_prompts, task.eval_sets, task.eval_size",
            got="none",
            expected="at least one prompt",
            fix="Give --prompts FILE.",
        )
    if by == LEARNER and config.task.has_pictures:
        raise ConfigError(
            "the learner's own policy answers prompts of text alone here",
            where="config key task.image_field",
            got=config.task.image_field,
            expected="an evaluation by the engine, which is given pictures",
        )
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in BARE.items()}
    config = config.model_copy(update=sections)
    dtype = config.learner.dtype if by == LEARNER else config.rollout.server.dtype
    with _served(config, by, log) as (attached, key):
        return asyncio.run(_evaluate(attached, weights, by, scratch, dtype, key))


@contextmanager
def _served(config: Config, by: str, log: Path) -> Iterator[tuple[Config, str | None]]:
    """The configuration with the address of its server, and that one's key. A server that is started ends here."""
    if by == LEARNER or not config.rollout.starts_server:
        yield config, api_key_for(config.rollout)
        return
    key = api_key_for(config.rollout) or secrets.token_hex(16)
    server = start_server(Served.of(config), log, key)
    try:
        rollout = config.rollout.model_copy(update={"url": server.url})
        yield config.model_copy(update={"rollout": rollout}), key
    finally:
        server.stop()


async def _evaluate(
    config: Config, weights: Path, by: str, scratch: Path, dtype: str, api_key: str | None
) -> Evaluation:
    task = build_task(config.task, config.model.checkpoint, config.seed)
    params = sampling_params(config.rollout, config.keeps_masks, task.tokens.vocab_size, task.tokens.stop_token_ids)
    engine: RolloutEngine = (
        OwnPolicy(dtype, config.seed, task.tokens.max_positions) if by == LEARNER else build_engine(config, api_key)
    )
    try:
        await task.start()
        sampler = await build_sampler(config.rollout, config.agent, engine, task, params, keep_changed=False)
        try:
            await engine.start()
            await engine.load_weights(push_of(weights, dtype, scratch))
            sets = task.eval_sets()
            evaluator = Evaluator(
                config.eval,
                sampler,
                sets,
                params,
                greedy_metric=greedy_metric(config.task, config.rollout),
                concurrency=config.rollout.concurrency,
            )
            metrics: dict[str, float] = {}
            intervals: dict[str, tuple[float, float]] = {}
            answers_by_set: dict[str, list[dict[str, Any]]] = {}
            for name, prompts in sets.items():
                answers = await evaluator.answers(prompts)
                metrics |= evaluator.summary(name, answers)
                prefix = f"eval/{name}/" if name else "eval/"
                name_of_mean, rewards = evaluator.greedy_rewards(answers)
                if (interval := _interval(rewards)) is not None:
                    intervals[f"{prefix}{name_of_mean}"] = interval
                answers_by_set[name] = _answer_rows(task, answers)
        finally:
            await sampler.close()
    finally:
        await task.close()
        await engine.close()
    return Evaluation(metrics, intervals, answers_by_set, dtype)


def _interval(rewards: Sequence[float]) -> tuple[float, float] | None:
    """Mean of the rewards plus and minus 1.96 standard errors; None of fewer than two."""
    if len(rewards) < 2:
        return None
    mean, reach = float(np.mean(rewards)), 1.96 * float(np.std(rewards, ddof=1)) / math.sqrt(len(rewards))
    return mean - reach, mean + reach


def _answer_rows(task: Task, answers: SetAnswers) -> list[dict[str, Any]]:
    """Questions and answers, prompt by prompt."""

    def answer_row(answer: Answer, number: int) -> dict[str, Any]:
        if isinstance(answer, str):
            return {"rejected": answer}
        text = reward_input(task, answers.prompts[number], answer).completion
        return {"text": text, "reward": answer.reward, "tokens": answer.num_sampled, "ended": answer.finish_reason}

    return [
        {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text,
            "answer": prompt.answer,
            "greedy": answer_row(answers.greedy[number], number),
            "sampled": [answer_row(sample_answers[number], number) for sample_answers in answers.samples],
        }
        for number, prompt in enumerate(answers.prompts)
    ]


VERSION = 1


def push_of(weights: Path, dtype: str, scratch: Path) -> WeightPush:
    """The tensors of the folder `weights` in the engine's dtype, written to `scratch`, file by file.

    Raises:
        CheckpointError: a folder without weights, or with damaged ones.
    """
    checkpoint, folder = HfCheckpoint(weights), scratch / f"v{VERSION:06d}"
    names: dict[str, list[str]] = defaultdict(list)
    for name in sorted(checkpoint.names):
        names[checkpoint.file_of(name)].append(name)
    entries: list[TensorEntry] = []
    for number, of_file in enumerate(names.values()):
        tensors = ((name, checkpoint.read(name)) for name in of_file)
        entries += write_shard(folder / f"model-{number:05d}.safetensors", tensors, Rounding(dtype))
    return finish_push(str(folder), tuple(entries), VERSION, str(weights))
