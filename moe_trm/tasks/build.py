"""From configuration to a task."""

from __future__ import annotations

from collections.abc import Callable

from moe_trm.config.schema import TaskConfig
from moe_trm.errors import CheckpointError
from moe_trm.tasks.arithmetic import ArithmeticTask
from moe_trm.tasks.gsm8k import TEMPLATE, read_gsm8k
from moe_trm.tasks.jsonl import FileTask, read_examples
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.reward_math import MathVerify
from moe_trm.tasks.rewards import exact
from moe_trm.tasks.tokens import Tokens


def build_task(config: TaskConfig, checkpoint: str, seed: int) -> Task:
    """Files are read and checked here, before anything is started.

    Raises:
        ConfigError: a prompt file that is missing or has a bad line.
        CheckpointError: no checkpoint, or a tokenizer that does not fit the model or the task.
    """
    tokens = Tokens(checkpoint)
    if config.name == "arithmetic":
        task: Task = ArithmeticTask(tokens, seed=seed, max_digits=config.max_digits, eval_size=config.eval_size)
        probe = "0123456789+-=#,~b"
        if tokens.decode(tokens.encode(probe)).replace(" ", "") != probe:
            raise CheckpointError(
                "the tokenizer cannot write the arithmetic task",
                where=checkpoint,
                got=repr(tokens.decode(tokens.encode(probe))),
                expected=probe,
                fix="use a checkpoint made by moe_trm.quickstart, or another task",
            )
        return task
    read, template = (read_gsm8k, TEMPLATE) if config.name == "gsm8k" else (read_examples, "{prompt}")
    assert config.prompts is not None, "moe_trm.config.rules demands it"
    reward, close = _reward(config)
    return FileTask(
        tokens,
        read(config.prompts),
        read(config.eval_prompts)[: config.eval_size] if config.eval_prompts else (),
        seed=seed,
        template=config.template if config.template is not None else template,
        chat=config.chat,
        reward=reward,
        close=close,
    )


def _reward(config: TaskConfig) -> tuple[Callable[[str, str], float], Callable[[], None]]:
    if (config.reward or ("math_verify" if config.name == "gsm8k" else "exact")) == "math_verify":
        math_verify = MathVerify()
        return math_verify, math_verify.close
    return exact, lambda: None
