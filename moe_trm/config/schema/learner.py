"""The engine that trains, and how its weights reach the rollout engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moe_trm.config.schema.lora import LoraConfig
from moe_trm.config.schema.section import Count, Decay, Positive, Section, bare_off, bare_switch


class ParameterGroup(Section):
    """Settings of some parameters."""

    match: str
    """Regular expression searched for in Hugging Face parameter names, e.g. `mlp\\.gate` (the routers) or
    `embed_tokens`. The first group that matches counts."""
    lr_multiplier: Annotated[float, Field(ge=0)] = 1.0
    """Their learning rate, as a multiple of the others'."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their weight decay; none: `optimizer.weight_decay` on matrices, 0 elsewhere."""


class OptimizerConfig(Section):
    """AdamW with linear warm-up and a schedule."""

    lr: Annotated[float, Field(ge=0)] = 1e-4
    """Learning rate after warm-up; 0 trains nothing (a control experiment)."""
    warmup_steps: Count = 3
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up. `constant`; `linear` or `cosine`: down to `optimizer.min_lr`; `wsd`: constant,
    then linear down at the end."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """The rate at which the schedule ends; at most `optimizer.lr`."""
    decay_steps: Positive | None = None
    """Optimizer steps, warm-up included, until `optimizer.min_lr`; none: all of the run
    (steps x minibatches x epochs)."""
    final_steps: Positive | None = None
    """`wsd`: optimizer steps on the way down; none: a tenth of `optimizer.decay_steps`."""
    ess_scale: Annotated[Literal["off", "sqrt", "linear"], BeforeValidator(bare_off)] = "off"
    """Scale a step's learning rate by the effective sample size of its rows, `min(1, (sum w)^2 / (N sum w^2))`,
    with w the ratio of policy to rollout. `sqrt`: by its root (VCPO with AdamW); `linear`: by itself. Worth
    trying with stale rollouts."""
    surge_limit: Annotated[float, Field(gt=1)] | None = None
    """Halve the learning rate, down to a tenth, when answers are longer than this times those of
    `optimizer.surge_window` steps ago; none: never. Try 1.2."""
    surge_window: Positive = 100
    """Training steps to look back, and to wait between two halvings."""
    alignment_limit: Annotated[float, Field(gt=0, le=1)] | None = None
    """Limit on the cosine c between the gradients of two consecutive updates (`optimizer/grad_cosine`). Where c is
    larger, the part along the gradient before is multiplied by limit / c, and the rest stays (GAC). The cosine becomes
    limit / sqrt(1 - c^2 + limit^2): with a limit of 0.1, 0.9 becomes 0.22 and 0.99 becomes 0.58. 1: measured alone;
    none: not measured. Costs a copy of the gradient, also in checkpoints. Try 1, then 0.1 where stale samples lift the
    cosine."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with another learning rate or weight decay."""
    extra: dict[str, bool | int | float | str] = {}
    """Further options of Megatron-Core's optimizer by their own names, e.g. `{log_num_zeros_in_grad: true}`."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's denominator offset."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""


class ParallelConfig(Section):
    """Parallel layout of the learner's ranks.

    Ranks beyond the product of `tensor`, `pipeline` and `context` are data parallel. Experts are shared over all ranks
    of a stage.
    """

    tensor: Positive = 1
    """Ranks that share each matrix and, between matrices, each sequence (sequence parallelism, which MoE layers need).
    A divisor of the key/value heads."""
    pipeline: Positive = 1
    """Ranks that share the layers. A divisor of their number, or with one of the settings below any number."""
    virtual_pipeline: Positive | None = None
    """Model chunks per pipeline rank, which shorten the wait at both ends of a minibatch; none: one, or as many as
    `pipeline_layout` has."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline rank; the others share the rest evenly. With the 61 layers of DeepSeek-V3,
    16 here leave 15 for each of three more ranks. Megatron's `num_layers_in_first_pipeline_stage`."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline rank, likewise. Megatron's `num_layers_in_last_pipeline_stage`."""
    account_for_embedding: bool = False
    """The embedding takes the place of a layer on the first rank. Megatron's
    `account_for_embedding_in_pipeline_split`."""
    account_for_loss: bool = False
    """The output layer and the loss take the place of a layer on the last rank. With both, the 46 layers of
    GLM-4.5-Air are 11, 12, 12 and 11. Megatron's `account_for_loss_in_pipeline_split`."""
    pipeline_layout: str | None = None
    """Every stage by itself, in Megatron's letters: `E` embedding, `t` a layer, `L` loss, `|` the end of a stage;
    `t*15` and `(tt|)*3` repeat. `Et*15|t*16|t*15|t*15L` is DeepSeek-V3 on four ranks. Stages go to the ranks in turn:
    twice as many stages as ranks are two virtual ones on each. Instead of the four settings above."""
    context: Positive = 1
    """Ranks that share each sequence, for long ones. On CUDA it needs Transformer Engine."""
    expert: Positive = 1
    """Ranks that share the experts. A divisor of their number; the first to raise for a mixture of experts."""
    expert_tensor: Positive = 1
    """Ranks that share each expert's matrices: `tensor`, or a divisor of it."""


class DeepSpeedConfig(Section):
    """`learner.backend=deepspeed`: how ZeRO spreads the training state over the ranks, all of them data parallel."""

    zero_stage: Literal[1, 2, 3] = 2
    """Sharded state: 1 optimizer state, 2 also gradients, 3 also weights. Raise it until the model fits;
    every stage computes the same."""


class LossScaleConfig(Section):
    """Loss scale of `learner.dtype=float16`.

    The loss is multiplied before backward, and gradients are divided after it, so that small ones do not round to zero.
    This changes no gradient in range. A step whose gradients overflow is skipped (`optimizer/skipped`), and the scale
    is halved.
    """

    initial: Positive = 65536
    """Scale of the first step, a power of two. Lower it when the first steps are skipped:
    their rollouts train nothing."""
    growth_steps: Positive = 200
    """The scale doubles after so many applied steps in a row."""


class LayerNoiseConfig(Section):
    """Learned noise in updates (ALP): N(0, sigma^2) on the input of every decoder layer, with a sigma for each of them.

    Only updates are perturbed, so `update/first_nonzero_fraction` is not 0. The perturbed policy is the numerator of
    current / rollout, so it needs a preset `bypass_*`. Try 1e-3, or a hundredth of what hidden states usually are.
    """

    sigma: Annotated[float, Field(ge=0)] = 0.0
    """Sigma of every layer at the start; 0: no noise. Their mean is `optimizer/layer_noise`."""
    sigma_lr: Annotated[float, Field(ge=0)] = 5e-4
    """Learning rate of log sigma, by an Adam of its own, without warm-up, schedule or clipping; 0: sigma stays."""


class LearnerConfig(Section):
    """The engine that trains."""

    backend: Literal["megatron", "deepspeed"] = "megatron"
    """The training engine: `megatron` (Megatron-Core, converted weights), or `deepspeed` (ZeRO over the
    model as transformers has it)."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """Settings of DeepSpeed."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Arithmetic of the learner. Master weights, gradient sums, routers and log-probs are always float32. `float16`
    here and in `rollout.server.dtype` rounds eight times finer than bfloat16 on both sides. Its range is narrow: try it
    with models whose activations stay below 65504."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Scale that keeps float16 gradients in range."""
    transformer_engine: Annotated[Literal["auto", "on", "off"], BeforeValidator(bare_switch)] = "auto"
    """Megatron's layers: Transformer Engine's, with one grouped product over all experts (`on`), or plain ones (`off`).
    `auto`: Transformer Engine's where there are CUDA and a working installation. On CPU there are only plain ones."""
    fp8: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"
    """8-bit products of the layers' matrices, by the source of their scales: earlier passes (`delayed`), the present
    tensor (`tensorwise`), its blocks of 128 (`blockwise`; Hopper) or of 32 (`mxfp8`; Blackwell). Needs Transformer
    Engine and `learner.dtype=bfloat16`. Weights, routers, embeddings and the output layer stay as they are. It adds to
    the engine mismatch, unless the rollout rounds alike (`rollout.quantization`). With `delayed` a forward depends on
    those before it, so `update/first_nonzero_fraction` is not 0."""
    fp8_bfloat16_layers: Count = 1
    """Layers at each end of the model that `learner.fp8` leaves in bfloat16; with `delayed` there are none."""
    parallel: ParallelConfig = ParallelConfig()
    """Sizes of the learner's parallel groups."""
    minibatches: Positive = 2
    """Optimizer steps per training step (N, the off-policiness within a step)."""
    epochs: Positive = 1
    """Times that the updates go over the rollout batch, in the same minibatches; more makes them more off-policy."""
    micro_batch_rows: Positive | None = None
    """Sequences forwarded together on one rank; none: 32, unless `learner.micro_batch_tokens` is set."""
    micro_batch_tokens: Positive | None = None
    """Tokens forwarded together on one rank, padding included. Rows are packed by length and shared so that
    ranks get similar numbers. Not together with `learner.micro_batch_rows`. Try the largest that memory
    allows; no sequence may be longer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again instead of keeping: none, those inside the MLP and MoE layers
    (`selective`), or those of every layer (`full`: least memory, about a third more time)."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory and step there: slower, for models that do not fit otherwise. On
    Megatron-Core by its hybrid Adam, with float32 weights, moments and gradients in pinned memory. Without CUDA it
    changes nothing."""
    round_like_rollout: bool = False
    """Every pass computes with the weights as a push rounds them: `rollout.fake_quantization`, then the cast to
    `rollout.server.dtype`. Gradients are those at the rounded weights, and change the exact ones (straight-through). So
    the rollout's policy is the learner's, and its rounding is no mismatch (QaRL). Each pass takes two copies of the
    weights through host memory."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters, trained in place of the weights."""
    layer_noise: LayerNoiseConfig = LayerNoiseConfig()
    """Noise on the inputs of layers in updates."""
    freeze_router: bool = False
    """Leave the routers' weights as the checkpoint has them; everything else trains. Selection biases of experts
    (DeepSeek's kind) are never trained. Worth trying when `routing/native_flip_rate` grows during the run."""
    freeze_vision: bool = True
    """With `task.image_field`: leave the vision tower as the checkpoint has it. Pushes then leave it out, and exports
    have its bits."""


class SyncConfig(Section):
    """Transfer of new weights to the rollout engine."""

    method: Literal["auto", "disk", "distributed"] = "auto"
    """`disk`: versioned safetensors in `sync.dir`. `distributed`: broadcast from the owning ranks into the engine.
    `auto` becomes one of them on loading: `distributed` where one server is on another machine and `sync.dir` is not
    set, else `disk`."""
    dir: str | None = None
    """Folder for pushes; none: shared memory where it exists, else the run directory."""
    verify: bool = True
    """Compare the engine's checksum of every loaded tensor with what the learner meant to send."""
    prove_every: Annotated[int, Field(ge=0)] = 10
    """Prove pushes by use as well: the first three of a run and every N-th after them; 1: every push, 0: none. Each
    server decodes a few fixed texts. The log-probs of what it decoded are compared with its own prefill of the same
    tokens, and its prefill of the texts with the learner's scores (docs/pipeline.md)."""
