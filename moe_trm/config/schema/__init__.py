"""The typed configuration. Every field documents its meaning, unit and range.

YAML and `key=value` overrides fill it.

Importing this package imports no torch.
"""

from __future__ import annotations

from typing import Any

from moe_trm.config.schema.agent import AgentConfig
from moe_trm.config.schema.learner import (
    DeepSpeedConfig,
    LayerNoiseConfig,
    LearnerConfig,
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterGroup,
    SyncConfig,
)
from moe_trm.config.schema.lora import LoraConfig
from moe_trm.config.schema.objective import (
    AdvantageConfig,
    CorrectionConfig,
    KlConfig,
    LossConfig,
    RuleConfig,
)
from moe_trm.config.schema.pipeline import (
    WITHOUT_ANCHOR_PASS,
    BatchConfig,
    PipelineConfig,
    Recovery,
)
from moe_trm.config.schema.replay import (
    ProbeConfig,
    ReplayConfig,
    ReplayMode,
    SamplingMaskConfig,
)
from moe_trm.config.schema.rollout import (
    RolloutConfig,
    ServerConfig,
)
from moe_trm.config.schema.run import (
    CheckpointConfig,
    ObserveConfig,
    RecordConfig,
    TrainConfig,
)
from moe_trm.config.schema.section import Count, Section
from moe_trm.config.schema.task import (
    EvalConfig,
    ModelConfig,
    TaskConfig,
)
from moe_trm.methods.advantages import ADVANTAGES

__all__ = [
    "WITHOUT_ANCHOR_PASS",
    "AdvantageConfig",
    "AgentConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "DeepSpeedConfig",
    "EvalConfig",
    "KlConfig",
    "LayerNoiseConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "LossScaleConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterGroup",
    "PipelineConfig",
    "ProbeConfig",
    "RecordConfig",
    "Recovery",
    "ReplayConfig",
    "ReplayMode",
    "RolloutConfig",
    "RuleConfig",
    "SamplingMaskConfig",
    "ServerConfig",
    "SyncConfig",
    "TaskConfig",
    "TrainConfig",
]


class Config(Section):
    """Everything a run needs to know."""

    name: str = "run"
    """Run name: results go to `run_dir/name`."""
    run_dir: str = "runs"
    """Folder that holds the run folders; relative to the working directory."""
    seed: Count = 0
    """Seeds data order, minibatch order and every learner rank."""
    exact: bool = False
    """Rollout and learner compute alike to the last bit, and every step proves it before it trains: the log-probs of
    all sampled tokens, and all routes. The first token that differs stops the run, with the layer and operation in
    which the engines differ. Slower (docs/precision.md)."""
    model: ModelConfig
    """The checkpoint."""
    task: TaskConfig = TaskConfig()
    """Prompts, rewards and evaluation."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    agent: AgentConfig = AgentConfig()
    """Address of the policy for an agent."""
    sampling_mask: SamplingMaskConfig = SamplingMaskConfig()
    """Scoring over the sampled support."""
    replay: ReplayConfig = ReplayConfig()
    """Routing replay."""
    probe: ProbeConfig = ProbeConfig()
    """Measuring with native and replayed routes."""
    batch: BatchConfig = BatchConfig()
    """Selection of the samples that are trained."""
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

    @property
    def keeps_masks(self) -> bool:
        """True where tokens are scored over the kept ids: `sampling_mask.mode`, settled or not."""
        if self.sampling_mask.mode != "auto":
            return self.sampling_mask.mode == "keep"
        exact = any(rule.thresholds.get("divergence") == "exact" for rule in self.correction.rules)
        reads = ADVANTAGES[self.advantage.name].reads_support or self.advantage.zero_variance_scale > 0
        return self.rollout.truncates or exact or reads

    @property
    def parts(self) -> int:
        """Parts that a step's samples come in: its minibatches with `pipeline.stream`, else one."""
        return self.learner.minibatches if self.pipeline.stream else 1

    def dump(self) -> dict[str, Any]:
        """The resolved configuration as plain data, without secrets."""
        data = self.model_dump(mode="json")
        data["rollout"]["api_key"] = None
        return data
