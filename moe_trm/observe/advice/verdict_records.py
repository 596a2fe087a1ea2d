"""Cases of the verdict about what samples claim: the weights that they were sampled by, and their routes."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from moe_trm.observe.advice.verdict_types import REPEATS, Verdict, pick

DOUBTED_LABELS = 0.05
"""Share of answers whose label another version contradicts."""
WORSE_ROUTES, LEAST_K3 = 2.0, 1e-4
"""Replayed over native mismatch that right routes never have, and the replayed one from which it is looked at."""
PROBED = ("probe/native_k3_kl", "probe/replayed_k3_kl", "probe/routing_share_se")


def labels(seen: Mapping[str, float]) -> Verdict | None:
    """Weights of another version explain what was sampled better than those of its label."""
    share = seen.get("weights/labels_doubted", 0.0)
    if share <= DOUBTED_LABELS:
        return None
    by_age = {name: seen[name] for name in fnmatch.filter(seen, "ages/labels_doubted/*")}
    worst = max(by_age, key=lambda name: by_age[name])
    text = (
        f"{share:.0%} of the answers were not sampled by the weights of their label: those of another version explain "
        f"their log-probs better, most of all at age {worst.rpartition('/')[2]} ({by_age[worst]:.0%}). A server went "
        "on with older weights, or labels are wrong: look into rollout.log, and start the servers again."
    )
    return Verdict("labels", text, {"weights/labels_doubted": share, worst: by_age[worst]}, "")


def routes(history: Sequence[Mapping[str, float]]) -> Verdict | None:
    """Replayed routes explain fresh samples worse than the learner's own, so they are not those that sampled.

    In the last `REPEATS` probes of fresh samples, or in all there are: one has few tokens.
    """
    probes = [step for step in history if "probe/native_k3_kl" in step and not step.get("rollout/age_max")][-REPEATS:]
    if not probes or history[-1].get("rollout/age_max") or not all(map(_are_worse, probes)):
        return None
    native, replayed = (probes[-1][name] for name in PROBED[:2])
    text = (
        f"With the replayed routes the mismatch is {replayed / native:.0f} times what it is with the learner's own (k3 "
        f"{replayed:.2g} instead of {native:.2g}): they are not the routes that sampled these tokens. They may be of "
        "older weights, or of other tokens. Measure the engine's route recording with moe-trm doctor."
    )
    return Verdict("routes", text, pick(probes[-1], *PROBED), "")


def _are_worse(probe: Mapping[str, float]) -> bool:
    native, replayed, error = (probe.get(name, 0.0) for name in PROBED)
    return native > 0 and replayed > LEAST_K3 and replayed / native - 2 * error > WORSE_ROUTES
