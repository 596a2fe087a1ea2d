"""Cases of the verdict about what samples claim: the weights that they were sampled by, and their routes."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from moe_trm.observe.advice.verdict_types import Verdict, pick

DOUBTED_LABELS = 0.05
"""Share of answers whose label another version contradicts."""
WORSE_ROUTES, LEAST_K3 = 2.0, 1e-4
"""Replayed over native mismatch that right routes never have, and the replayed one from which it is looked at."""


def claims(seen: Mapping[str, float]) -> Verdict | None:
    """Labels or routes that the learner's own scores contradict."""
    return labels(seen) or routes(seen)


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


def routes(seen: Mapping[str, float]) -> Verdict | None:
    """Replayed routes explain fresh samples worse than the learner's own, so they are not those that sampled."""
    names = ("probe/native_k3_kl", "probe/replayed_k3_kl", "probe/routing_share_se")
    native, replayed, error = (seen.get(name, 0.0) for name in names)
    if not native or replayed <= LEAST_K3 or seen.get("rollout/age_max"):
        return None
    if replayed / native - 2 * error <= WORSE_ROUTES:
        return None
    text = (
        f"With the replayed routes the mismatch is {replayed / native:.0f} times what it is with the learner's own (k3 "
        f"{replayed:.2g} instead of {native:.2g}): they are not the routes that sampled these tokens. They may be of "
        "older weights, or of other tokens. Measure the engine's route recording with moe-trm doctor."
    )
    return Verdict("routes", text, pick(seen, *names), "")
