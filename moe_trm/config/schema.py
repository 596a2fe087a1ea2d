"""The configuration, as types. Every field says what it is, its unit and its range; YAML and `key=value` overrides fill it.

Importing this module imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    checkpoint: str
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer. Both engines start from it."""


class TaskConfig(Section):
    name: Literal["arithmetic", "jsonl", "gsm8k"] = "arithmetic"
    """Where prompts and rewards come from."""
    prompts: str | None = None
    """JSONL file of training prompts (`jsonl`, `gsm8k`): one object a line with `prompt` (or `question`) and `answer`."""
    eval_prompts: str | None = None
    """JSONL file of held-out prompts; none: no evaluation for tasks that read files."""
    eval_size: Count = 256
    """Held-out prompts per evaluation."""
    max_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """`arithmetic`: digits of the larger operand."""
    reward: Literal["exact", "math_verify"] = "exact"
    """How an answer is compared: the text after the last `#`, or mathematical equality. Wrong is 0, right is 1."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards of each step, so that there is nothing to learn."""


class ServerConfig(Section):
    """The SGLang server that `launch.rollout` starts. Ignored when `rollout.url` points at a running one."""

    host: str = "127.0.0.1"
    """Address to bind to. Anything but loopback needs an API key, which is always set."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30100
    """TCP port; 0: any free one (only with `moe-trm train`, which tells both sides)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Arithmetic of the rollout engine."""
    max_total_tokens: Positive = 65536
    """KV cache size in tokens. Always set: the engine's own default may take all memory."""
    max_running_requests: Positive = 128
    chunked_prefill_size: Positive = 2048
    tensor_parallel: Positive = 1
    startup_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    extra_args: tuple[str, ...] = ()
    """Further `sglang.launch_server` arguments, as typed on its command line."""


class RolloutConfig(Section):
    engine: Literal["sglang", "bundle"] = "sglang"
    """`sglang`: a real server. `bundle`: recorded responses, so that a run can be repeated bit for bit."""
    url: str | None = None
    """Address of a running server, e.g. http://127.0.0.1:30100; none: the one described in `rollout.server`."""
    api_key: str | None = None
    """Key of the server. None: taken from the environment variable MOE_TRM_API_KEY, else made for this run."""
    bundle: str | None = None
    """`engine=bundle`: folder written by `record.bundle`."""
    server: ServerConfig = ServerConfig()
    prompts_per_step: Positive = 16
    group_size: Positive = 8
    """Samples per prompt (the group that advantages compare)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int | None = None
    """Kept ids at most; none: the vocabulary size, capped at the engine's limit of 4,096 when masks are recorded."""
    min_p: Fraction = 0.0
    max_new_tokens: Positive = 48
    concurrency: Positive = 128
    """Requests in flight."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Limit for one request, queueing included."""
    max_attempts: Positive = 3
    """Tries per request when the connection fails or the server answers 5xx."""


class SamplingMaskConfig(Section):
    mode: Literal["off", "keep"] = "keep"
    """`keep`: score every token over the ids that top-k, top-p and min-p kept at rollout. `off`: over the whole vocabulary."""


class ReplayConfig(Section):
    mode: Literal["none", "R2", "R3", "auto"] = "R3"
    """Whose expert routes the learner uses: its own (`none`), those of the proximal pass (`R2`), the rollout's (`R3`), or chosen from off-policiness (`auto`)."""
    max_local_flip_rate: Fraction = 0.3
    """The run stops when replayed expert sets differ from the live router's own choice more often than this: a sign of misaligned rows."""


class ProbeConfig(Section):
    every: Count = 10
    """Steps between probes, which score one batch with native and with replayed routes; 0: never."""
    save: bool = False
    """Keep the per-token probe arrays under `runs/NAME/probe/` for pooled statistics."""


class AdvantageConfig(Section):
    name: Literal["grpo"] = "grpo"
    """Advantage estimator. `grpo`: reward minus group mean, over the group's standard deviation."""
    normalize_std: bool = True
    """Divide by the group's standard deviation; off: mean only, as in Dr.GRPO."""


class RuleConfig(Section):
    name: str
    """A registered correction, e.g. `trm_max`, `icepop`, `opsm`."""
    thresholds: dict[str, float] = {}
    """Its thresholds by name; what is left out takes the rule's documented default."""


class CorrectionConfig(Section):
    rules: tuple[RuleConfig, ...] = ()
    """Applied together: weights multiply, keep masks are joined by AND, each is reported."""


class LossConfig(Section):
    name: Literal["ppo_clip"] = "ppo_clip"
    """Policy objective on `log_update`. With corrections on the engine ratio, `ppo_clip` is decoupled PPO."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages; none: unbounded, as in plain PPO."""
    aggregation: Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become one number; denominators are those of the batch before correction."""


class OptimizerConfig(Section):
    lr: Annotated[float, Field(ge=0)] = 1e-4
    warmup_steps: Count = 3
    """Optimizer steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class ParallelConfig(Section):
    tensor: Positive = 1
    pipeline: Positive = 1
    virtual_pipeline: Positive | None = None
    context: Positive = 1
    expert: Positive = 1
    expert_tensor: Positive = 1


class LearnerConfig(Section):
    backend: Literal["megatron"] = "megatron"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the learner; master weights and log-probs are float32 either way."""
    parallel: ParallelConfig = ParallelConfig()
    minibatches: Positive = 2
    """Optimizer steps per training step (N, the off-policiness within a step)."""
    micro_batch_rows: Positive = 32
    """Sequences forwarded together on one rank."""
    recompute: Literal["none", "full"] = "none"
    """Activation recomputation."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""


class SyncConfig(Section):
    method: Literal["disk", "distributed"] = "disk"
    """`disk`: versioned safetensors in `sync.dir`. `distributed`: broadcast from the owning ranks into the engine."""
    dir: str | None = None
    """Folder for pushes; none: shared memory where it exists, else the run directory."""
    verify: bool = True
    """Compare the engine's checksum of every loaded tensor with what the learner meant to send."""


class TrainConfig(Section):
    steps: Positive = 40
    """Training steps: one rollout batch each."""
    eval_every: Count = 0
    """Training steps between greedy evaluations on held-out prompts; 0: only before the first and after the last."""
    export: bool = True
    """Write the final weights as a Hugging Face checkpoint to `runs/NAME/checkpoints/final`."""


class RecordConfig(Section):
    bundle: str | None = None
    """Folder to record every step's rollouts into; `rollout.engine=bundle` reads it."""


class Config(Section):
    name: str = "run"
    """Run name: results go to `run_dir/name`."""
    run_dir: str = "runs"
    seed: int = 0
    """Seeds data order, minibatch order and every learner rank."""
    model: ModelConfig
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampling_mask: SamplingMaskConfig = SamplingMaskConfig()
    replay: ReplayConfig = ReplayConfig()
    probe: ProbeConfig = ProbeConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    correction: CorrectionConfig = CorrectionConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    sync: SyncConfig = SyncConfig()
    train: TrainConfig = TrainConfig()
    record: RecordConfig = RecordConfig()

    def dump(self) -> dict[str, Any]:
        """The resolved configuration as plain data, without secrets."""
        data = self.model_dump(mode="json")
        data["rollout"]["api_key"] = None
        return data
