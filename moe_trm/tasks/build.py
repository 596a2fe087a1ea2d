"""From configuration to a task."""

from __future__ import annotations

from moe_trm.config.schema import TaskConfig
from moe_trm.errors import CheckpointError
from moe_trm.tasks.arithmetic import ArithmeticTask
from moe_trm.tasks.examples import Example, Fields, read_examples
from moe_trm.tasks.file_task import FileTask
from moe_trm.tasks.gsm8k import TEMPLATE, read_gsm8k
from moe_trm.tasks.picture_rows import PictureRows
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.reward_function import FunctionReward
from moe_trm.tasks.rewards import exact_reward
from moe_trm.tasks.scorer import ComparisonReward, Scorer
from moe_trm.tasks.tokens import Tokens

MATH_VERIFY = "moe_trm.tasks.math_reward:math_verify"


def build_task(config: TaskConfig, checkpoint: str, seed: int) -> Task:
    """Files are read and checked here, before anything is started.

    Raises:
        ConfigError: a prompt file that is missing or has a bad row.
        CheckpointError: no checkpoint, or a tokenizer that does not fit the model or the task.
    """
    tokens = Tokens(checkpoint, config.chat_template_kwargs)
    scorer = _scorer(config)
    if config.name == "arithmetic":
        _check_characters(tokens, checkpoint)
        return ArithmeticTask(
            tokens,
            scorer,
            seed=seed,
            max_digits=config.max_digits,
            eval_size=config.eval_size,
            reward_weights=config.reward_weights,
        )
    assert config.prompts is not None, "moe_trm.config.task_rules demands it"
    held_out = ({"": config.eval_prompts} if config.eval_prompts else {}) | config.eval_sets
    template = TEMPLATE if config.name == "gsm8k" else "{prompt}"
    pictures = PictureRows(config.image_field, checkpoint) if config.image_field is not None else None
    return FileTask(
        tokens,
        scorer,
        _examples(config, config.prompts, pictures),
        {name: _examples(config, source, pictures)[: config.eval_size] for name, source in held_out.items()},
        seed=seed,
        template=config.template if config.template is not None else template,
        chat=config.chat,
        reward_weights=config.reward_weights,
        pictures=pictures.tokens if pictures is not None else None,
    )


def _examples(config: TaskConfig, source: str, pictures: PictureRows | None) -> list[Example]:
    if config.name == "gsm8k":
        return read_gsm8k(source)
    own_reward = config.reward is not None and ":" in config.reward
    return read_examples(source, Fields(config.prompt_field, config.answer_field, not own_reward, pictures))


def _scorer(config: TaskConfig) -> Scorer:
    name = config.reward or ("math_verify" if config.name == "gsm8k" else "exact")
    if name == "exact":
        return ComparisonReward(exact_reward)
    return FunctionReward(
        MATH_VERIFY if name == "math_verify" else name,
        timeout_s=config.reward_timeout_s,
        processes=config.reward_processes,
    )


def _check_characters(tokens: Tokens, checkpoint: str) -> None:
    probe = "0123456789+-=#,~b"
    if tokens.decode(tokens.encode(probe)).replace(" ", "") != probe:
        raise CheckpointError(
            "the tokenizer cannot write the arithmetic task",
            where=checkpoint,
            got=repr(tokens.decode(tokens.encode(probe))),
            expected=probe,
            fix="use a checkpoint made by moe_trm.tools.quickstart, or another task",
        )
