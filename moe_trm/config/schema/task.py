"""The training task: the model, the prompts, the rewards, the held-out evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_trm.config.schema.section import Count, Positive, Section


class ModelConfig(Section):
    """The model that both engines start from."""

    checkpoint: str
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer. Both engines start from it."""


class TaskConfig(Section):
    """Prompts, rewards and held-out evaluation."""

    name: Literal["arithmetic", "jsonl", "gsm8k"] = "arithmetic"
    """Source of prompts and rewards: generated sums (`arithmetic`), prompts of your own from `task.prompts` (`jsonl`),
    or those of GSM8K (`gsm8k`)."""
    prompts: str | None = None
    """Training prompts (`jsonl`, `gsm8k`): a JSONL or `.parquet` file, or a Hugging Face data set as
    `hf:NAME[:SPLIT]` or `hf:NAME:CONFIGURATION:SPLIT`. A prompt is a text, or a list of chat messages; other fields
    reach the reward as extras."""
    eval_prompts: str | None = None
    """Held-out prompts, from the same kinds of source; none: no evaluation for tasks that read prompts."""
    prompt_field: str | None = None
    """Name of the field with the prompt; none: `prompt`, else `question`."""
    answer_field: str = "answer"
    """Name of the field with the expected answer, which only a reward function of your own can do without."""
    image_field: str | None = None
    """Name of the field with the pictures of a row (paths relative to the prompt file, or contents), whose places in
    the prompt are `<image>`; parts of messages may hold them, too. None: rows with pictures are refused. Qwen3-VL-MoE
    on the DeepSpeed learner with SGLang only (docs/pictures.md)."""
    eval_size: Count = 256
    """Held-out prompts per evaluation, of each set."""
    eval_sets: dict[str, str] = {}
    """Further held-out sets by name, from the same kinds of source as `task.eval_prompts`; their
    metrics are `eval/NAME/...`."""
    max_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """`arithmetic`: digits of the larger operand."""
    reward: str | None = None
    """Score of a finished answer. `exact`: 1 when the text after the last `#` is the expected one. `math_verify`: 1
    when it is mathematically equal. `package.module:function` or `path/to/file.py:function`: a function of your own
    (docs/tasks.md). None: `math_verify` for `gsm8k`, `exact` elsewhere."""
    reward_weights: dict[str, float] = {}
    """Weights of named rewards, where a reward function returns several; a name that is not listed has weight 1. The
    reward is their weighted sum."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that one call of a reward function may take. After that its sample is rejected
    (`reward_timeout`) and its process ended."""
    reward_processes: Positive = 2
    """Processes that run a reward function which is not async. Raise it when `time/wait_s` is spent on
    rewards and cores are free."""
    template: str | None = None
    """Text around a prompt read from a file, with `{prompt}` where it goes; none: `Question: {prompt}\\nAnswer:` for
    `gsm8k`, the prompt alone for `jsonl`."""
    chat: bool = False
    """Give prompts read from a file as the user's message of the tokenizer's chat template."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the tokenizer's chat template, e.g. `{enable_thinking: false}`, in every conversation of the run:
    prompts with `task.chat`, rollout functions and agents. Only variables that the template itself reads are taken. A
    request of an agent may set others."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards of each step, so that there is nothing to learn."""

    @property
    def reads_prompts(self) -> bool:
        """True when prompts come from `prompts`, not from the task itself."""
        return self.name != "arithmetic"

    @property
    def has_pictures(self) -> bool:
        """True when prompts may have pictures, so that the whole model is served and trained."""
        return self.image_field is not None

    @property
    def right_or_wrong(self) -> bool:
        """True when a reward is 1 or 0, so that a mean of rewards is a share of right answers."""
        return self.reward in (None, "exact", "math_verify")

    @property
    def has_evaluation(self) -> bool:
        """True when there are held-out prompts."""
        return self.eval_size > 0 and (not self.reads_prompts or bool(self.eval_prompts or self.eval_sets))


class EvalConfig(Section):
    """Measurements of an evaluation on held-out prompts beside the greedy answers. It changes nothing in training."""

    samples: Count = 0
    """Sampled answers to each held-out prompt, for `eval/avg_at_K` and `eval/pass_at_K` (`eval/best_at_K` of rewards
    that are not all 0 or 1); 0: the greedy answer alone."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the sampled answers."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of the sampled answers: the most probable ids up to this mass; 1: all."""
    max_new_tokens: Positive | None = None
    """Tokens of an answer at most; none: `rollout.max_new_tokens`."""
    keep_best: bool = True
    """Keep the weights of the best evaluation as a Hugging Face checkpoint in `runs/NAME/checkpoints/best`, from the
    first that beats the start."""
    best_metric: str | None = None
    """Metric that decides which evaluation is best, the highest value; e.g. `eval/pass_at_8`. None: `eval/accuracy`,
    and with a reward of your own (`task.reward`, a rollout function, an agent) `eval/reward`."""
