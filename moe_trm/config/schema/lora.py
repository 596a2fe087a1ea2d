"""Low-rank adapters of the learner's matrices."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moe_trm.config.schema.section import Count, Section


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained in place of the model's weights.

    A matrix W becomes W + (alpha / rank) B A. Every pass computes with the sum, and the rollout engine gets it.
    """

    rank: Count = 0
    """Rank of A and B; 0: no adapters, the weights themselves train. Try 16 or 32, with ten times the learning rate of
    full training. With adapters the weights of the checkpoint stay as they are."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The change of a matrix is this, divided by the rank, times B A."""
    targets: tuple[str, ...] = ("attention", "experts")
    """Matrices with an adapter: `attention`, `experts` (routed and shared ones), `router`, or names of modules as in
    peft's `target_modules`, e.g. `q_proj` or `mlp.shared_experts.up_proj`. Embeddings, norms and biases have none."""
    adapter: str | None = None
    """Folder of an adapter in peft's form to start from; none: A is random and B is zero, so that the run starts from
    the checkpoint's own policy."""

    @property
    def scale(self) -> float:
        """Factor of the product B A. Only of a rank above 0."""
        return self.alpha / self.rank
