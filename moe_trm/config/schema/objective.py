"""From rewards to a gradient: advantages, corrections, the loss, the KL to a reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moe_trm.config.schema.method_name import AdvantageName, LossName, PresetName, RuleName
from moe_trm.config.schema.section import Positive, Section, bare_off


class AdvantageConfig(Section):
    """From rewards to advantages."""

    name: AdvantageName = "grpo"
    """Advantage estimator. `grpo`: reward minus group mean, over the group's standard deviation. `gdpo`: the
    same for each named reward by itself, weighted by `task.reward_weights` afterwards. `otb`: a baseline for each
    token, from the recorded distributions. `turn_grpo`: a baseline for each turn. `remax`: the reward minus that of a
    greedy answer to the same prompt, which is asked for beside the samples. The others are described in
    docs/methods.md."""
    normalize_std: bool = True
    """`grpo`, `pass_at_k`, `turn_grpo`: divide by the group's standard deviation; off: mean only, as in Dr.GRPO."""
    lone_sample: Literal["zero", "reward"] | None = None
    """Advantage of a sample that is alone in its group because the others were rejected. `zero`: it has nothing to be
    compared with. `reward`: its reward, as in verl. None: `reward` for `grpo`, `dr_grpo`, `gdpo`, `otb` and
    `turn_grpo`, else `zero`."""
    zero_variance_scale: Annotated[float, Field(ge=0)] = 0.0
    """Advantage per nat of entropy in groups whose samples all have the same reward, and so no other advantage
    (RL-ZVP): all right (reward above 0), a token gets this times its entropy; all wrong, minus this times what its
    entropy lacks to the highest of its row. Reads the recorded distributions (`sampling_mask.mode=keep`). 0: such
    groups train without effect. Try 0.1."""
    turn_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """`turn_grpo`: the return of a turn is the reward times this for each turn that follows. 1: every turn has the
    whole reward."""


class RuleConfig(Section):
    """One correction with its thresholds."""

    name: RuleName
    """A correction of docs/methods.md, e.g. `trm_max`, `icepop`, `opsm`; or a function of your own under `@rule`, as
    `path/to/file.py:function` or `package.module:function`. A path is relative to where the run is started."""
    thresholds: dict[str, float | str] = {}
    """Its thresholds by name; what is left out takes the rule's documented default. `scope: turn` beside them: a rule
    on rows judges each turn of a conversation by itself, so that one bad turn does not cost the others
    (`correction/<rule>/kept_turn_fraction`)."""
    target_reject_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of tokens to reject (of rows, for rules on rows), to truncate (`token_tis`, `seq_tis`) or to weigh down
    (`trm_soft`). The rule only measures during the first `correction.calibration_steps` steps. Then the threshold that
    would have given this share over them is chosen and frozen."""
    by_length: bool = False
    """With a `target_reject_rate` of a rule on rows: the threshold depends on the length of the row, so that each
    octave of length (8 to 15 tokens, 16 to 31, ...) has this share rejected. It follows the run instead of being
    frozen. An octave is judged from 10 / `target_reject_rate` rows on."""


class CorrectionConfig(Section):
    """Treatment of the remaining mismatch: reweight or reject tokens and sequences."""

    preset: PresetName | None = None
    """A known combination by its usual name. `decoupled_*`: rules on the merged ratio (engine and lag; without stale
    samples the engine ratio) under any loss that does not hold it already. `bypass_*`: rules and loss on the total
    ratio, and the preset's own loss."""
    rules: tuple[RuleConfig, ...] = ()
    """Applied together, after the preset's rules: weights multiply, keep masks are joined by AND, each is reported. A
    rule may stand here several times, on another `ratio` each; its metrics are then called
    `correction/NAME@RATIO/...`."""
    batch_normalize: Annotated[Literal["off", "token", "sequence"], BeforeValidator(bare_off)] = "off"
    """Divide the weights by their mean over the minibatch: over its tokens, or over its rows."""
    decide_after: Positive | None = None
    """Rules only measure during this many first steps, and act afterwards only if the mismatch was not small: mean k3
    KL above 0.05 or mean chi2 above 0.3, of the engine ratio where it is known. `correction/acts` says it. None: they
    act from the start. Some hundred are usual."""
    calibration_steps: Positive = 5
    """Steps over which rules with a `target_reject_rate` only measure."""


class LossConfig(Section):
    """The policy objective."""

    name: LossName | None = None
    """Policy objective, described in docs/methods.md; or a function of your own under `@loss`, as
    `path/to/file.py:function` or `package.module:function`. None: the preset's loss, else `ppo_clip`, which with
    corrections on the merged ratio is decoupled PPO."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The ratio is clipped below at 1 minus this; none: the loss's own default (`ppo_clip`: 0.2)."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above at 1 plus this; none: the loss's own default (`ppo_clip`: 0.2)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages; none: unbounded, as in plain PPO."""
    parameters: dict[str, bool | float | str] = {}
    """Further parameters of the loss by name, and `ratio`: the log-ratio it reads, if not its usual one."""
    aggregation: (
        Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
        | None
    ) = None
    """Aggregation of token losses into one number; none: as in the loss's published form (`ppo_clip`: token-mean).
    Denominators count the batch before correction."""
    rollout_kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of a soft KL to the policy that sampled, (log of current / rollout)^2 / 2 on every sampled token
    whatever corrections reject; 0: none. Try 0.002, which is prime-rl's `kl_tau` of 0.001."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Bonus per nat of the policy's entropy, over the whole vocabulary whatever the sampling mask; 0: none. Costs one
    more pass of the output layer over the vocabulary. Try 0.001."""
    router_aux_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the routers' load-balancing loss, with its value for each row as in Switch Transformer and
    DeepSeek-V3: E times the sum over experts of the share of choices times the mean score, averaged over the rows of
    the minibatch and added up over layers. An even load has 1 in each layer. All forwarded tokens count, also those of
    prompts. Choices are those of the live router, under replay too (docs/routes.md). 0: none, whatever
    `router_aux_loss_coef` of config.json. Try 0.001."""
    router_z_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the routers' z-loss: the mean square of the logsumexp of their logits, over the tokens of each
    row, likewise averaged and added up; 0: none. Try 0.001."""
    measure_entropy: bool = False
    """Measure the entropy (`policy/entropy`) without rewarding it; the same cost."""

    @property
    def router_coefs(self) -> dict[str, float]:
        """The coefficients of the routers' own losses by key, where there are any."""
        coefs = {f"loss.{name}": getattr(self, name) for name in ("router_aux_coef", "router_z_coef")}
        return {key: coef for key, coef in coefs.items() if coef}

    @property
    def clips(self) -> dict[str, float]:
        """The parameters of the loss that have keys of their own, where these are set."""
        clip_values = {name: getattr(self, name) for name in ("clip_low", "clip_high", "dual_clip")}
        return {name: value for name, value in clip_values.items() if value is not None}


class KlConfig(Section):
    """KL to the reference policy: the checkpoint that the run started from, kept frozen in host memory, or a teacher on
    servers of its own.
    """

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL, per nat; 0: no reference is kept or scored. Try 0.001."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+", "k3_is"] = "k3+"
    """Estimate of each token's KL. In the loss `k2`, `k1+` and `k3+` have the right gradient on-policy;
    `k3_is` (weighted by the differentiated ratio) has it off-policy too. In the reward only values count; of
    these `k1` and `k3` are unbiased."""
    where: Literal["loss", "reward", "advantage"] = "loss"
    """`loss`: a separate term beside the policy loss, on every sampled token whatever corrections reject. `reward`:
    each sample's reward is lowered by the KL of its tokens before groups are compared. `advantage`: the advantage of
    each token is lowered by its own KL (`estimator: k1`), after groups were compared. With `kl.teacher` and a reward of
    0 that is distillation on policy."""
    teacher: tuple[str, ...] = ()
    """Addresses of SGLang servers whose model is the reference, in place of the start checkpoint: any model with the
    policy's token ids. It scores every sample once, at temperature 1 over the whole vocabulary, and is asked with the
    run's key (`rollout.api_key` or MOE_TRM_API_KEY)."""
    ratio: Literal["total", "update"] = "total"
    """`k3_is`: the ratio that weighs it. `total`: current / rollout, so that the gradient is right off-policy too.
    `update`: current / proximal, as the unbiased KL of slime and miles; right if engines agree and no sample is
    stale."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """`k3_is`: its weight is at most 1 plus this, for several updates in a step; none: unclipped, as its exact gradient
    needs."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive`: the coefficient follows the measured KL towards `kl.target`, by at most 20% of
    samples / `kl.horizon` a step."""
    target: Annotated[float, Field(gt=0)] = 0.1
    """`adaptive`: mean KL per token to steer to, in nats."""
    horizon: Annotated[float, Field(gt=0)] = 10000.0
    """`adaptive`: samples over which the coefficient may change by a fifth."""

    @property
    def before_updates(self) -> bool:
        """True when the KL is part of rewards or advantages, and so of the policy at the step's start."""
        return self.coef > 0 and self.where != "loss"
