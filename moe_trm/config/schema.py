"""The configuration, as types. Every field says what it is, its unit and its range; YAML and `key=value` overrides fill it.

Importing this module imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


def _bare_off(value: object) -> object:
    """YAML 1.1 reads a bare `off` as false; the field's documented value is the word."""
    return "off" if value is False else value


def _bare_switch(value: object) -> object:
    """YAML 1.1 reads bare `on` and `off` as true and false; the field's documented values are the words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values are typed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The model that both engines start from."""

    checkpoint: str
    """Hugging Face checkpoint folder: config.json, safetensors, tokenizer. Both engines start from it."""


class TaskConfig(Section):
    """Prompts, rewards and held-out evaluation."""

    name: Literal["arithmetic", "jsonl", "gsm8k"] = "arithmetic"
    """Where prompts and rewards come from: sums that are made up (`arithmetic`), prompts of your own from the source in `task.prompts` (`jsonl`), or such of GSM8K (`gsm8k`)."""
    prompts: str | None = None
    """Training prompts (`jsonl`, `gsm8k`): a JSONL or `.parquet` file, or a Hugging Face data set as `hf:NAME[:SPLIT]` or `hf:NAME:CONFIGURATION:SPLIT`. A prompt is a text, or a list of chat messages; other fields reach the reward as extras."""
    eval_prompts: str | None = None
    """Held-out prompts, from the same kinds of source; none: no evaluation for tasks that read prompts."""
    prompt_field: str | None = None
    """Name of the field with the prompt; none: `prompt`, else `question`."""
    answer_field: str = "answer"
    """Name of the field with the expected answer, which only a reward function of your own can do without."""
    eval_size: Count = 256
    """Held-out prompts per evaluation, of each set."""
    eval_sets: dict[str, str] = {}
    """Further held-out sets by name, from the same kinds of source as `task.eval_prompts`; their metrics are `eval/NAME/...`."""
    max_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """`arithmetic`: digits of the larger operand."""
    reward: str | None = None
    """How a finished answer is scored. `exact`: 1 when the text after the last `#` is the expected one. `math_verify`: 1 when it is mathematically equal. `package.module:function` or `path/to/file.py:function`: a function of your own (docs/tasks.md). None: `math_verify` for `gsm8k`, `exact` elsewhere."""
    reward_weights: dict[str, float] = {}
    """Weights of named rewards, where a reward function returns several; a name that is not listed has weight 1. The reward is their weighted sum."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that one call of a reward function may take; after that its sample is rejected (`reward_timeout`) and its process ended."""
    reward_processes: Positive = 2
    """Processes that run a reward function which is not async. Raise it when `time/wait_s` is spent on rewards and cores are free."""
    template: str | None = None
    """Text around a prompt read from a file, with `{prompt}` where it goes; none: `Question: {prompt}\\nAnswer:` for `gsm8k`, the prompt alone for `jsonl`."""
    chat: bool = False
    """Give prompts read from a file as the user's message of the tokenizer's chat template."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards of each step, so that there is nothing to learn."""


class ServerConfig(Section):
    """The SGLang server that `launch.rollout` starts. Ignored when `rollout.url` points at a running one."""

    host: str = "127.0.0.1"
    """Address to bind to. Anything but loopback needs an API key, which is always set."""
    port: Annotated[int, Field(ge=0, le=65535)] = 30100
    """TCP port; 0: any free one (only with `moe-trm train`, which tells both sides)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the server computes; `auto`: CUDA where there is one."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Arithmetic of the rollout engine."""
    quantization: str | None = None
    """SGLang's `--quantization`, e.g. `fp8`: the engine rounds the weights it is sent, so that rollouts come from a policy of their own. `engine/*` then measures that policy against the learner's, with routes replayed; leave the corrections on. Needs CUDA and `sync.verify=false`: the engine's checksums are those of rounded weights. None: weights as they are sent."""
    max_total_tokens: Positive = 65536
    """KV cache size in tokens. Always set: the engine's own default may take all memory."""
    max_running_requests: Positive = 128
    """Requests that decode together; the rest wait in the server's queue."""
    chunked_prefill_size: Positive = 2048
    """Prompt tokens per prefill chunk."""
    tensor_parallel: Positive = 1
    """Devices that share the rollout model."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    """Seconds to wait until the server answers."""
    max_restarts: Count = 5
    """Times that a server which died or hangs is started again; after that it stays away."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A server whose door answers but which generated nothing for so many seconds counts as hung. Longer than a weight push takes."""
    extra_args: tuple[str, ...] = ()
    """Further `sglang.launch_server` arguments, as typed on its command line."""


class RolloutConfig(Section):
    """Who samples, and how."""

    engine: Literal["sglang", "bundle"] = "sglang"
    """`sglang`: a real server. `bundle`: recorded responses, so that a run can be repeated bit for bit."""
    url: str | None = None
    """Address of a running server, e.g. http://127.0.0.1:30100; none: the one described in `rollout.server`."""
    urls: tuple[str, ...] = ()
    """Addresses of several running servers, in place of `rollout.url`. Each sample goes to the one with the fewest in flight; all get every weight push; one that fails is left out until it has caught up."""
    api_key: str | None = None
    """Key of the server. None: taken from the environment variable MOE_TRM_API_KEY, else made for this run."""
    bundle: str | None = None
    """`engine=bundle`: folder written by `record.bundle`."""
    bundle_delay_s: Annotated[float, Field(ge=0)] = 0.0
    """`engine=bundle`: seconds until each recorded answer is given, to see how a pipeline overlaps without an engine."""
    server: ServerConfig = ServerConfig()
    """The server to start."""
    prompts_per_step: Positive = 16
    """Prompts per training step."""
    group_size: Positive = 8
    """Samples per prompt (the group that advantages compare)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by this before sampling and before scoring."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the most probable ids up to this mass; 1: all."""
    top_k: Positive | None = None
    """Kept ids at most; none: the vocabulary size, capped at the engine's limit of 4,096 when masks are recorded."""
    min_p: Fraction = 0.0
    """Ids less probable than this fraction of the most probable one are not sampled; 0: no bound."""
    max_new_tokens: Positive = 48
    """Tokens sampled at most for one answer (of a rollout function: for one turn); what is not finished by then counts as unfinished."""
    function: str | None = None
    """`package.module:function` or `path/to/file.py:function`: an async function of your own that makes a sample of several turns, e.g. with tools (docs/tasks.md); none: one answer to the prompt."""
    function_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that one call of `rollout.function` may take, waiting for the engine included; after that its sample is rejected (`rollout_timeout`)."""
    max_turns: Positive = 8
    """Answers in one sample at most, for `rollout.function`; a sample that wants more counts as unfinished."""
    max_tokens: Positive | None = None
    """Tokens of one sample at most, prompt and appended text included, for `rollout.function`; none: what the model's positions allow."""
    colocate: bool = False
    """The engine shares its GPUs with the learner: while the learner works, the engine's weights and KV cache leave device memory; they come back with the next weight push. Needs `pipeline.mode=sync`, and with `rollout.url` servers started with `--enable-memory-saver`. On CPU the engine takes the same steps but frees nothing."""
    concurrency: Positive = 128
    """Requests in flight."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Limit for one request, queueing included."""
    max_attempts: Positive = 3
    """Tries per request when the connection fails or the server answers 5xx; after that the server is looked at, and the sample asked for again."""
    recovery_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time without any working server, in seconds, before the run is given up. A restart takes as long as loading the model."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of every server of the run."""
        return self.urls or (self.url or f"http://{self.server.host}:{self.server.port}",)

    @property
    def attached(self) -> bool:
        """Whether the servers are started by somebody else."""
        return bool(self.urls or self.url)


class SamplingMaskConfig(Section):
    """Whether the learner scores tokens over the support that the rollout really sampled from."""

    mode: Annotated[Literal["off", "keep"], BeforeValidator(_bare_off)] = "keep"
    """`keep`: score every token over the ids that top-k, top-p and min-p kept at rollout. `off`: over the whole vocabulary."""
    violation: Literal["reject", "union", "drop"] = "reject"
    """A sampled token outside its own mask: `reject` the sample, score the `union` of mask and token, or `drop` the token from training. Always counted."""


class ReplayConfig(Section):
    """Whose expert routes the learner uses."""

    mode: Literal["none", "R2", "R3", "auto"] = "R3"
    """Whose expert routes the learner uses: its own (`none`), those of the proximal pass (`R2`), the rollout's (`R3`), or chosen from off-policiness (`auto`)."""
    max_local_flip_rate: Fraction = 0.3
    """The run stops when replayed expert sets differ from the live router's own choice more often than this: a sign of misaligned rows."""
    missing: Literal["reject", "native"] = "reject"
    """Samples with tokens that have no trustworthy routes, because weights changed while they were generated: `reject` them, or keep them and leave those tokens to the learner's own routers, counted as `replay/native_fraction`."""


class ProbeConfig(Section):
    """Measurement of what routing alone contributes to the mismatch."""

    every: Count = 10
    """Steps between probes, which score one batch with native and with replayed routes; 0: never."""
    save: bool = False
    """Keep the per-token probe arrays under `runs/NAME/probe/` for pooled statistics."""


class BatchConfig(Section):
    """Which valid samples are trained."""

    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups whose samples all have the same reward, and so no advantage: train them for nothing, or `drop` them and issue other prompts in their place (dynamic sampling). Worth trying when `reward/zero_variance_groups` is high."""
    overlong: Literal["keep", "drop", "mask"] = "keep"
    """Samples cut off at `rollout.max_new_tokens`: train them as they were rewarded (`keep`), `drop` them before their group is compared, or `mask` them: they count in the group's mean and in the denominators, but their own advantage is 0."""
    refill_limit: Annotated[float, Field(ge=1)] = 3.0
    """Prompts issued for one step at most, as a multiple of `rollout.prompts_per_step`; when that is reached the step trains what it has. 1: nothing is refilled."""


Recovery = Literal["same", "snapshot", "interpolate", "merged", "bypass"]
"""What is known of the weights that sampled: they are the learner's (`same`), or `pipeline.behavior`."""


class PipelineConfig(Section):
    """How generation and training overlap."""

    mode: Literal["sync", "one_step", "async"] = "sync"
    """`sync`: sample, train, push, in turn; every token is on-policy at the start of its step. `one_step`: the next step's batch is sampled while this one trains, one version behind. `async`: sampling runs on, up to `pipeline.max_staleness` versions behind."""
    max_staleness: Count | None = None
    """Bound on the age of every trained token (eta): the learner's version minus the one that sampled it. Older groups are dropped and counted. None: 0 for `sync`, 1 for `one_step`, 2 for `async`. Larger hides longer answers and costs off-policiness; 1 to 4 is usual."""

    partial: Literal["wait", "interrupt"] = "wait"
    """What a weight push does to samples that are being generated: `wait` for them, or `interrupt` them and continue each with the new weights from where it was. Interrupted samples span versions; every token keeps its own, and the routes of the weights that sampled it. Pays where answers differ much in length."""

    behavior: Literal["snapshot", "interpolate", "merged", "bypass"] = "snapshot"
    """How log-probs under older weights are recovered. `snapshot`: by a pass under each version that sampled, kept in host memory; engine mismatch and lag are known apart. `merged`: not at all; the two are one ratio. `interpolate` (A-3PO): no anchor pass either, the anchor lies between rollout and current, nearer to current the older the token. `bypass`: the rollout's own log-probs are the anchor. No effect with `mode=sync`."""
    snapshot_gib: Annotated[float, Field(gt=0)] = 64.0
    """`behavior=snapshot`: host memory for weights on one rank, GiB. They take `max_staleness` + 1 times the rank's share of the weights; the run stops before its first update if that is more."""

    @property
    def recovery(self) -> Recovery:
        """`behavior` where samples may be stale, else `same`."""
        return self.behavior if self.staleness_limit else "same"

    @property
    def staleness_limit(self) -> int:
        """`max_staleness`, or the mode's default."""
        return (
            self.max_staleness if self.max_staleness is not None else {"sync": 0, "one_step": 1, "async": 2}[self.mode]
        )


class AdvantageConfig(Section):
    """From rewards to advantages."""

    name: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "gpg",
        "gdpo",
        "pass_at_k",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ] = "grpo"
    """Advantage estimator. `grpo`: reward minus group mean, over the group's standard deviation. `gdpo`: the same for each named reward by itself, weighted by `task.reward_weights` afterwards. The others are described in docs/methods.md."""
    normalize_std: bool = True
    """`grpo`, `pass_at_k`: divide by the group's standard deviation; off: mean only, as in Dr.GRPO."""


class RuleConfig(Section):
    """One correction with its thresholds."""

    name: str
    """A registered correction, e.g. `trm_max`, `icepop`, `opsm`."""
    thresholds: dict[str, float | str] = {}
    """Its thresholds by name; what is left out takes the rule's documented default."""
    target_reject_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Choose the threshold that would have rejected this share of tokens (or rows, for rules on rows), or truncated it (`token_tis`, `seq_tis`), over the first `correction.calibration_steps` steps, during which the rule only measures; then it is frozen."""


Preset = Literal[
    "disabled",
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
]


class CorrectionConfig(Section):
    """What to do about the mismatch that is left: reweight or reject tokens and sequences."""

    preset: Preset | None = None
    """A known combination by its usual name. `decoupled_*`: rules on the engine ratio under any loss. `bypass_*`: rules and loss on the total ratio, and the preset's own loss."""
    rules: tuple[RuleConfig, ...] = ()
    """Applied together, after those of the preset: weights multiply, keep masks are joined by AND, each is reported."""
    batch_normalize: Annotated[Literal["off", "token", "sequence"], BeforeValidator(_bare_off)] = "off"
    """Divide the weights by their mean over the minibatch: over its tokens, or over its rows."""
    calibration_steps: Positive = 5
    """Steps over which rules with a `target_reject_rate` only measure."""


Loss = Literal[
    "aspo",
    "capped_ratio",
    "cispo",
    "clip_cov",
    "ctpo",
    "dispo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "espo",
    "gmpo",
    "gpg",
    "gspo",
    "gspo_token",
    "ipo_tv",
    "kl_cov",
    "m2po_clip",
    "minirl",
    "minpro",
    "oapl",
    "ppo_clip",
    "quatro",
    "r2vpo",
    "reinforce",
    "sapo",
    "tbpo",
    "topr",
    "turn_ppo",
    "unclipped",
    "vespo",
]


class LossConfig(Section):
    """The policy objective."""

    name: Loss | None = None
    """Policy objective, described in docs/methods.md; none: that of the preset, else `ppo_clip`, which with corrections on the engine ratio is decoupled PPO."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The ratio is clipped below at 1 minus this; none: the loss's own default (`ppo_clip`: 0.2)."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above at 1 plus this; none: the loss's own default (`ppo_clip`: 0.2)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages; none: unbounded, as in plain PPO."""
    parameters: dict[str, float | str] = {}
    """Further parameters of the loss by name, and `ratio`: the log-ratio it reads, if not its usual one."""
    aggregation: (
        Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
        | None
    ) = None
    """How token losses become one number; none: as in the loss's published form (`ppo_clip`: token-mean). Denominators are those of the batch before correction."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Bonus per nat of the policy's entropy, which is that over the whole vocabulary whatever the sampling mask; 0: none. Costs one more pass of the output layer over the vocabulary. Try 0.001."""
    measure_entropy: bool = False
    """Measure the entropy (`policy/entropy`) without rewarding it; the same cost."""


class KlConfig(Section):
    """KL to the reference policy: the checkpoint that the run started from, kept frozen in host memory."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL, per nat; 0: no reference is kept or scored. Try 0.001."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+", "k3_is"] = "k3+"
    """Estimate of each token's KL. In the loss `k2`, `k1+` and `k3+` have the right gradient on-policy, `k3_is` (weighted by the differentiated ratio) off-policy too; in the reward only values count, of which `k1` and `k3` are unbiased."""
    where: Literal["loss", "reward"] = "loss"
    """`loss`: a term of its own beside the policy loss, on every sampled token whatever corrections reject. `reward`: each sample's reward is lowered by the KL of its tokens before groups are compared."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: the coefficient follows the measured KL towards `kl.target`, by at most 20% of samples / `kl.horizon` a step."""
    target: Annotated[float, Field(gt=0)] = 0.1
    """`adaptive`: mean KL per token to steer to, in nats."""
    horizon: Annotated[float, Field(gt=0)] = 10000.0
    """`adaptive`: samples over which the coefficient may change by a fifth."""


class ParameterGroup(Section):
    """Settings of some parameters."""

    match: str
    """Regular expression searched for in Hugging Face parameter names, e.g. `mlp\\.gate` (the routers) or `embed_tokens`. The first group that matches counts."""
    lr_multiplier: Annotated[float, Field(ge=0)] = 1.0
    """Their learning rate is this times that of the others."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their weight decay; none: `optimizer.weight_decay` on matrices, 0 elsewhere."""


class OptimizerConfig(Section):
    """AdamW with linear warm-up and a schedule."""

    lr: Annotated[float, Field(ge=0)] = 1e-4
    """Learning rate after warm-up; 0 trains nothing (a control experiment)."""
    warmup_steps: Count = 3
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The learning rate after warm-up: `constant`, down to `optimizer.min_lr` on a line or a cosine, or `wsd`: constant, and down on a line at the end."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where the schedule ends; at most `optimizer.lr`."""
    decay_steps: Positive | None = None
    """Optimizer steps, warm-up included, until `optimizer.min_lr`; none: all of the run (steps x minibatches x epochs)."""
    final_steps: Positive | None = None
    """`wsd`: optimizer steps on the way down; none: a tenth of `optimizer.decay_steps`."""
    ess_scale: Annotated[Literal["off", "sqrt", "linear"], BeforeValidator(_bare_off)] = "off"
    """Lower a step's learning rate by the effective sample size of its rows, `min(1, (sum w)^2 / (N sum w^2))`, w the ratio of policy to rollout: its root (VCPO with AdamW), or itself (`linear`). Worth trying with stale rollouts."""
    surge_limit: Annotated[float, Field(gt=1)] | None = None
    """Halve the learning rate, down to a tenth, when answers are longer than this times those of `optimizer.surge_window` steps ago; none: never. Try 1.2."""
    surge_window: Positive = 100
    """Training steps to look back, and to wait between two halvings."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with another learning rate or weight decay."""
    extra: dict[str, bool | int | float | str] = {}
    """Further options of Megatron-Core's optimizer by their own names, e.g. `{use_precision_aware_optimizer: true}`."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's denominator offset."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""


class ParallelConfig(Section):
    """How the learner's ranks share the model. What the product of `tensor`, `pipeline` and `context` leaves over is data parallel; experts are shared over all ranks of a stage."""

    tensor: Positive = 1
    """Ranks that share each matrix and, between matrices, each sequence (sequence parallelism, which MoE layers need). A divisor of the key/value heads."""
    pipeline: Positive = 1
    """Ranks that share the layers. A divisor of their number."""
    virtual_pipeline: Positive | None = None
    """Model chunks per pipeline rank, which shorten the wait at both ends of a minibatch; none: one."""
    context: Positive = 1
    """Ranks that share each sequence, for long ones. On CUDA it needs Transformer Engine."""
    expert: Positive = 1
    """Ranks that share the experts. A divisor of their number; the first to raise for a mixture of experts."""
    expert_tensor: Positive = 1
    """Ranks that share each expert's matrices: `tensor`, or a divisor of it."""


class DeepSpeedConfig(Section):
    """`learner.backend=deepspeed`: how ZeRO spreads the training state over the ranks, all of them data parallel."""

    zero_stage: Literal[1, 2, 3] = 2
    """What is sharded: 1 optimizer state, 2 also gradients, 3 also weights. Raise it until the model fits; every stage computes the same."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory and step there; for models that do not fit otherwise."""


class LearnerConfig(Section):
    """The engine that trains."""

    backend: Literal["megatron", "deepspeed"] = "megatron"
    """The training engine: `megatron` (Megatron-Core, converted weights), or `deepspeed` (ZeRO over the model as transformers has it)."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """Settings of DeepSpeed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the learner; master weights and log-probs are float32 either way. float16 is not offered: its gradients would need loss scaling."""
    parallel: ParallelConfig = ParallelConfig()
    """Sizes of the learner's parallel groups."""
    minibatches: Positive = 2
    """Optimizer steps per training step (N, the off-policiness within a step)."""
    epochs: Positive = 1
    """Times that the updates go over the rollout batch, in the same minibatches; more makes them more off-policy."""
    micro_batch_rows: Positive | None = None
    """Sequences forwarded together on one rank; none: 32, unless `learner.micro_batch_tokens` is set."""
    micro_batch_tokens: Positive | None = None
    """Tokens forwarded together on one rank, padding included: rows are packed by length and shared so that ranks get like numbers. Not together with `learner.micro_batch_rows`. Try the largest that memory allows; no sequence may be longer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: nothing, the inside of the MLP and MoE layers (`selective`), or every layer (`full`: least memory, about a third more time)."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    freeze_router: bool = False
    """Leave the routers' weights as the checkpoint has them; everything else trains. Selection biases of experts (DeepSeek's kind) are never trained. Worth trying when `routing/native_flip_rate` grows during the run."""


class SyncConfig(Section):
    """How new weights reach the rollout engine."""

    method: Literal["disk", "distributed"] = "disk"
    """`disk`: versioned safetensors in `sync.dir`. `distributed`: broadcast from the owning ranks into the engine."""
    dir: str | None = None
    """Folder for pushes; none: shared memory where it exists, else the run directory."""
    verify: bool = True
    """Compare the engine's checksum of every loaded tensor with what the learner meant to send."""


class EvalConfig(Section):
    """What an evaluation on held-out prompts measures beside the greedy accuracy. It changes nothing in training."""

    samples: Count = 0
    """Sampled answers to each held-out prompt, for `eval/avg_at_K` and `eval/pass_at_K`; 0: the greedy answer alone."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the sampled answers."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the sampled answers: the most probable ids up to this mass; 1: all."""
    max_new_tokens: Positive | None = None
    """Tokens of an answer at most; none: `rollout.max_new_tokens`."""
    keep_best: bool = True
    """Keep the weights of the best evaluation as a Hugging Face checkpoint in `runs/NAME/checkpoints/best`, from the first that beats the start."""
    best_metric: str = "eval/accuracy"
    """What is best: the metric that an evaluation has to raise, e.g. `eval/pass_at_8`."""


class TrainConfig(Section):
    """Length of the run and what it leaves behind."""

    steps: Positive = 40
    """Training steps: one rollout batch each."""
    eval_every: Count = 0
    """Training steps between evaluations on held-out prompts; 0: only before the first and after the last."""
    export: bool = True
    """Write the final weights as a Hugging Face checkpoint to `runs/NAME/checkpoints/final`."""
    max_restarts: Count = 0
    """`moe-trm train`: how often learner ranks that died are started again, from the newest checkpoint; 0: the run ends, and the same command goes on later."""


class CheckpointConfig(Section):
    """What a run keeps of itself, so that it can go on after whatever ended it."""

    every: Count = 50
    """Training steps between checkpoints (model, optimizer, sample books, calibrated thresholds, random state), the last step included; 0: only when the run is asked to stop by Ctrl-C or SIGTERM."""
    keep: Positive = 2
    """Checkpoints to keep; older ones are removed once a newer one is complete."""
    dir: str | None = None
    """Folder that every learner rank sees; none: `runs/NAME/checkpoints`."""
    resume: str = "auto"
    """`auto`: go on from the newest checkpoint of this run whose checksums are right, begin anew where there is none. `never`: begin anew; what is there is set aside. Else the path of one checkpoint (`.../step-000100`)."""
    export_every: Count = 0
    """Training steps between Hugging Face checkpoints of the weights alone (`hf-000100`), all of which are kept; 0: none."""


class RecordConfig(Section):
    """Recording of rollouts for exact repetition."""

    bundle: str | None = None
    """Folder to record every step into: rollouts, which `rollout.engine=bundle` gives back, and the scores of every update, which `moe-trm whatif` judges again. About as large as the routes. None: nothing is recorded."""


class ObserveConfig(Section):
    """What one sees of a run while it trains and afterwards. `metrics.jsonl` is always written."""

    sinks: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that get every metric too, e.g. `[tensorboard]`. Each needs its library: `pip install 'moe-trm[tensorboard]'`."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Loopback port at which Prometheus finds the newest value of every metric, as `moe_trm_...`; 0: none. Needs `pip install 'moe-trm[prometheus]'`."""
    project: str = "moe-trm"
    """Project or experiment that trackers file the run under."""
    panel: Annotated[Literal["auto", "on", "off"], BeforeValidator(_bare_switch)] = "auto"
    """Live panel instead of one line per step; `auto`: on a terminal."""
    transcripts: Count = 10
    """Steps between transcripts of a few sampled rollouts under `RUN_DIR/transcripts`; 0: never. The first step is always one of them."""
    transcript_rollouts: Positive = 4
    """Rollouts in one transcript, of different prompts as far as the first rank has them."""
    report: bool = True
    """Write `RUN_DIR/report.html` when the run ends or is interrupted. `moe-trm report RUN_DIR` writes it at any time."""


class Config(Section):
    """Everything a run needs to know."""

    name: str = "run"
    """Run name: results go to `run_dir/name`."""
    run_dir: str = "runs"
    """Folder that holds the run folders; relative to the working directory."""
    seed: Count = 0
    """Seeds data order, minibatch order and every learner rank."""
    model: ModelConfig
    """The checkpoint."""
    task: TaskConfig = TaskConfig()
    """Prompts, rewards and evaluation."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    sampling_mask: SamplingMaskConfig = SamplingMaskConfig()
    """Scoring over the sampled support."""
    replay: ReplayConfig = ReplayConfig()
    """Routing replay."""
    probe: ProbeConfig = ProbeConfig()
    """Measuring with native and replayed routes."""
    batch: BatchConfig = BatchConfig()
    """Which samples are trained."""
    pipeline: PipelineConfig = PipelineConfig()
    """Overlap of generation and training."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimator."""
    correction: CorrectionConfig = CorrectionConfig()
    """Corrections of the remaining mismatch."""
    loss: LossConfig = LossConfig()
    """Policy objective."""
    kl: KlConfig = KlConfig()
    """KL to the reference policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    learner: LearnerConfig = LearnerConfig()
    """Training engine."""
    sync: SyncConfig = SyncConfig()
    """Weight transfer to the rollout engine."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out prompts."""
    train: TrainConfig = TrainConfig()
    """Length of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and where to go on from."""
    record: RecordConfig = RecordConfig()
    """Recording for exact repetition."""
    observe: ObserveConfig = ObserveConfig()
    """Watching a run."""

    def dump(self) -> dict[str, Any]:
        """The resolved configuration as plain data, without secrets."""
        data = self.model_dump(mode="json")
        data["rollout"]["api_key"] = None
        return data
