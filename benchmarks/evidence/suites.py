"""Comparisons of each suite of runs: arms, figures, and late steps. Fixed before the runs, but for marked ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """A number of a run.

    Attributes:
        name: its column.
        metrics: their sum. An evaluation counts after the last step, anything else by its mean over the late steps.
        by: who answered when the run had ended (`evaluations` of the file); None: the run measured it itself.
    """

    name: str
    metrics: tuple[str, ...]
    by: str | None = None

    @property
    def source(self) -> str:
        """The metrics, and who answered."""
        names = " + ".join(self.metrics)
        return names if self.by is None else f"{names}, final weights by {self.by}"


@dataclass(frozen=True)
class LengthSlope(Figure):
    """How the answers that are right grow: the least-squares slope over steps of sum(p L) / sum(p), tokens per step.

    Attributes:
        lengths: L, the mean tokens of the solutions of each metric's questions; the metric is p, the share solved.
    """

    lengths: tuple[float, ...] = ()

    @property
    def source(self) -> str:
        return "slope of the length of right answers (tokens per step)"


SAMPLED = Figure("sampled", ("eval/avg_at_1",))
GREEDY = Figure("greedy", ("eval/accuracy",))
UNROUNDED = Figure("unrounded", ("eval/avg_at_1",), by="sglang")
EXPORTED = Figure("exported", ("eval/avg_at_1",), by="learner")
"""The policy that a run leaves, with its own routes and without noise or rounding. `SAMPLED` is the engine's."""
SOLUTION_TOKENS: Mapping[str, float] = {
    "two": 20.0234375,
    "four": 56.2265625,
    "eight": 97.15625,
    "sixteen": 173.62890625,
}
"""Held-out sets by the least number of addends, with the mean tokens of their solutions and the end."""
OF_OCTAVES = {octave: Figure(octave, (f"eval/{octave}/avg_at_1",)) for octave in SOLUTION_TOKENS}
LONGEST, *SHORTER = reversed(OF_OCTAVES.values())
EXPORTED_LONGEST = Figure("exported_longest", LONGEST.metrics, by="learner")
RIGHT_LENGTH = LengthSlope(
    "right_length",
    tuple(f"eval/{octave}/avg_at_1" for octave in SOLUTION_TOKENS),
    lengths=tuple(SOLUTION_TOKENS.values()),
)
TOTAL_K3 = Figure("total_k3", ("total/k3_kl",))
ENGINE_K3 = Figure("engine_k3", ("engine/k3_kl",))
NATIVE_K3 = Figure("native_k3", ("probe/native_k3_kl",))
REPLAYED_K3 = Figure("replayed_k3", ("probe/replayed_k3_kl",))
UPDATE_K3 = Figure("update_k3", ("update/k3_kl",))
TAIL = Figure("tail", ("engine/rollout_is_high_fraction", "engine/rollout_is_low_fraction"))
"""Share of tokens whose ratio between the engines is above 2 or below 1/2."""
REWARD = Figure("reward", ("reward/mean",))
GRAD_NORM = Figure("grad_norm", ("optimizer/grad_norm",))
KEPT_ROWS = Figure("kept_rows", ("correction/kept_sequence_fraction",))
KEPT_TOKENS = Figure("kept_tokens", ("correction/kept_fraction",))

Gain = tuple[str, str]
"""The first arm's mean less the second's."""


@dataclass(frozen=True)
class Suite:
    """The comparisons of an experiment.

    Attributes:
        title: of the picture, which shows the first figure.
        late: first step of the means over late steps.
        against: by the arm that others are compared with, these; all others if there are none.
        compared: figures with paired differences.
        beside: figures whose means stand beside them.
        crossings: two gains, of which the second is compared with the first.
    """

    title: str
    late: int
    against: Mapping[str, tuple[str, ...]]
    compared: tuple[Figure, ...] = (SAMPLED, EXPORTED, GREEDY)
    beside: tuple[Figure, ...] = (TOTAL_K3, GRAD_NORM)
    crossings: tuple[tuple[Gain, Gain], ...] = field(default=())


SUITES: Mapping[str, Suite] = {
    "staleness": Suite(
        "Held-out success of sampled answers after the last step",
        late=12,
        # The last two were added when the runs were known.
        against={
            "none": (),
            "sync_R3": (),
            "TIS": (),
            "eta2_none": ("eta2_R3_TIS",),
            "eta4_none": ("eta4_R3_TIS",),
        },
    ),
    "router_noise": Suite(
        "Held-out success after the last step, answered by the noisy engine",
        late=71,
        # The lower rate was compared with R3, and joined to it, when it was known to end high.
        against={
            "none": (),
            "R3": ("R3_TIS", "R3_TRM_Max", "lower_rate"),
            "lower_rate": ("R3_lower_rate",),
            "each_push": ("each_push_R3",),
        },
        compared=(SAMPLED, EXPORTED, GREEDY, REWARD, ENGINE_K3),
        beside=(GRAD_NORM,),
    ),
    "router_noise_float32": Suite(
        "Held-out success after the last step, answered by the noisy engine in float32",
        late=71,
        against={"none": ()},
        compared=(SAMPLED, EXPORTED, GREEDY, REWARD, ENGINE_K3),
        beside=(GRAD_NORM,),
    ),
    "full_collapse": Suite(
        "Held-out success after 200 steps, answered by the noisy engine",
        late=191,
        against={"none": ()},
        compared=(SAMPLED, EXPORTED, GREEDY, REWARD, ENGINE_K3, TAIL),
        beside=(GRAD_NORM,),
    ),
    "published_dose": Suite(
        "Held-out success after 500 steps at the published share of flips",
        late=451,
        against={"none": (), "R3": ("no_noise",), "each_push": ("each_push_R3",)},
        compared=(SAMPLED, EXPORTED, GREEDY, REWARD, ENGINE_K3),
        beside=(GRAD_NORM,),
    ),
    "natural_rounding": Suite(
        "Held-out success of the exported policy after the last step",
        late=141,
        against={"float32": (), "rounded": ("rounded_R3", "each_push", "fixed"), "fixed": ("each_push",)},
        compared=(EXPORTED, SAMPLED, GREEDY, REWARD, ENGINE_K3),
        beside=(NATIVE_K3, REPLAYED_K3, GRAD_NORM),
    ),
    "answer_length": Suite(
        "Held-out success on the longest octave after the last step",
        late=81,
        against={"none": (), "random": (), "random_profile": ("TRM_Max",)},
        compared=(LONGEST, RIGHT_LENGTH, EXPORTED_LONGEST, *SHORTER),
        beside=(REWARD, TOTAL_K3, GRAD_NORM, KEPT_ROWS, KEPT_TOKENS),
    ),
    "losses": Suite(
        "Held-out success of sampled answers, by loss and age of the samples",
        late=31,
        against={
            "ppo_clip": ("gspo", "cispo", "minirl", "topr", "m2po"),
            "ppo_clip_4": ("gspo_4", "cispo_4", "minirl_4", "topr_4", "m2po_4", "vcpo_4", "decoupled_4", "ppo_clip"),
            **{f"{name}_4": (name,) for name in ("gspo", "cispo", "minirl", "topr", "m2po")},
        },
        compared=(SAMPLED, EXPORTED, GREEDY, REWARD),
        beside=(TOTAL_K3, GRAD_NORM),
    ),
    "top_p": Suite(
        "Held-out success by whether the sampling mask is kept",
        late=191,
        against={"off": ()},
        compared=(SAMPLED, EXPORTED, GREEDY, REWARD, ENGINE_K3),
        beside=(GRAD_NORM,),
    ),
    "dose": Suite(
        "Held-out success, answered by the engine that rounds",
        late=12,
        against={"float32": (), "int4": ("int4_R3_TIS",)},
        compared=(SAMPLED, UNROUNDED, GREEDY, ENGINE_K3, TAIL),
        beside=(GRAD_NORM,),
    ),
    "precision": Suite(
        "Held-out success of sampled answers after the last step",
        late=12,
        against={"float32": (), "bfloat16": ("float16",)},
        beside=(ENGINE_K3, GRAD_NORM),
    ),
    "decay": Suite(
        "Held-out success of sampled answers after the last step",
        late=12,
        against={"constant_3e-4": ("decay_3e-4",), "constant_1e-4": ("decay_1e-4",)},
        beside=(ENGINE_K3, UPDATE_K3, GRAD_NORM),
    ),
    "phase_map": Suite(
        "Held-out success by updates, replay and clip",
        late=7,
        against={
            "n1_none": ("n1_R3",),
            "n4_none": ("n4_R2", "n4_R3"),
            "n4_R2": ("n4_R3",),
            "n8_none": ("n8_R2", "n8_R3", "n8_none_noclip"),
            "n8_R2": ("n8_R3",),
            "n8_R3": ("n8_R3_noclip",),
        },
        compared=(SAMPLED, EXPORTED, GREEDY, ENGINE_K3, TAIL, UPDATE_K3),
        beside=(GRAD_NORM,),
        crossings=((("n4_R3", "n4_R2"), ("n8_R3", "n8_R2")),),
    ),
}
"""By the name of the experiment."""
