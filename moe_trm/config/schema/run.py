"""Length of a run, and what it leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moe_trm.config.schema.section import Count, Positive, Section, bare_switch


class TrainConfig(Section):
    """Length of the run and what it leaves behind."""

    steps: Positive = 40
    """Training steps: one rollout batch each."""
    eval_every: Count = 0
    """Training steps between evaluations on held-out prompts; 0: only before the first and after the last."""
    export: bool = True
    """Write the final weights as a Hugging Face checkpoint to `runs/NAME/checkpoints/final`."""
    export_form: Literal["plain", "published"] = "plain"
    """Form of every Hugging Face checkpoint that the run writes. `plain`: in `learner.dtype`. `published`: each tensor
    in the form of `model.checkpoint`, its dtype, FP8 or MXFP4; blocks that did not change keep their bits."""
    max_restarts: Count = 0
    """`moe-trm train`: restarts of learner ranks that died, from the newest checkpoint; 0: the run ends, and the same
    command goes on later. An error that can only repeat ends the run at once."""

    def evaluates_after(self, step: int) -> bool:
        """True where the run evaluates after training step `step`; 0: before the first."""
        return step in (0, self.steps) or bool(self.eval_every and step % self.eval_every == 0)


class CheckpointConfig(Section):
    """The saved state of a run, from which it continues after any end."""

    every: Count = 50
    """Training steps between checkpoints (model, optimizer, sample books, calibrated thresholds, random state), the
    last step included; 0: only when the run is asked to stop by Ctrl-C or SIGTERM."""
    keep: Positive = 2
    """Checkpoints to keep; older ones are removed once a newer one is complete."""
    dir: str | None = None
    """Folder that every learner rank sees; none: `runs/NAME/checkpoints`."""
    resume: str = "auto"
    """`auto`: go on from the newest checkpoint of this run whose checksums are right; begin anew where there is none.
    `never`: begin anew; what is there is set aside. Else the path of one checkpoint (`.../step-000100`)."""
    allow_changes: bool = False
    """Go on with settings that differ from the run's last start, which `settings.jsonl` then keeps. Place,
    processes and what a run shows may change without it."""
    export_every: Count = 0
    """Training steps between Hugging Face checkpoints of the weights alone (`hf-000100`), all
    of which are kept; 0: none."""

    def saves_after(self, step: int, last: int) -> bool:
        """True where a run of `last` steps saves its state after training step `step`."""
        return bool(self.every) and (step % self.every == 0 or step == last)


class RecordConfig(Section):
    """Recording of rollouts for exact repetition."""

    bundle: str | None = None
    """Folder to record every step into: rollouts, which `rollout.engine=bundle` gives back, and the scores of every
    update, which `moe-trm whatif` judges again. About as large as the routes. None: nothing is recorded."""


class ObserveConfig(Section):
    """Views of a run while it trains and afterwards. `metrics.jsonl` is always written."""

    sinks: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that get every metric too, e.g. `[tensorboard]`. Each needs its library:
    `pip install 'moe-trm[tensorboard]'`."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Loopback port at which Prometheus finds the newest value of every metric, as `moe_trm_...`; 0: none. Needs
    `pip install 'moe-trm[prometheus]'`."""
    project: str = "moe-trm"
    """Project or experiment that trackers file the run under."""
    panel: Annotated[Literal["auto", "on", "off"], BeforeValidator(bare_switch)] = "auto"
    """Live panel instead of one line per step; `auto`: on a terminal."""
    transcripts: Count = 10
    """Steps between transcripts of a few sampled rollouts under `RUN_DIR/transcripts`; 0: never. The first
    step is always one of them."""
    transcript_rollouts: Positive = 4
    """Rollouts in one transcript, of different prompts as far as the first rank has them."""
    report: bool = True
    """Write `RUN_DIR/report.html` when the run ends or is interrupted.
    `moe-trm report RUN_DIR` writes it at any time."""
