"""The nineteen combinations of corrections and loss that users of other frameworks know by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

RuleSpec = tuple[str, Mapping[str, float | str]]


@dataclass(frozen=True)
class Preset:
    """Corrections and loss that belong together.

    Attributes:
        bypass: two policies instead of three: rules and loss read the total ratio, recomputed in every update, and the
            proximal policy plays no part. Otherwise rules read the merged ratio (proximal / rollout, which is the
            engine ratio where no sample is stale), and the loss clips the update.
        rules: `(name, thresholds)` of each correction; thresholds name the ratio, `merged` or `total`.
        loss: `(name, parameters)`, or None where any loss fits.
    """

    bypass: bool
    rules: tuple[RuleSpec, ...]
    loss: RuleSpec | None


TOKEN_IS: RuleSpec = ("token_tis", {"cap": 2.0})
SEQ_IS: RuleSpec = ("seq_tis", {"cap": 2.0})
TOKEN_BAND: RuleSpec = ("icepop", {"low": 0.5, "high": 5.0})
SEQ_RS: RuleSpec = ("seq_sum_k1", {"low": 0.5, "high": 2.0})
GEO_RS: RuleSpec = ("seq_mean_k1", {"low": 0.999, "high": 1.001})
K3_RS: RuleSpec = ("seq_mean_k3", {"upper": 0.01})


def _decoupled(*rules: RuleSpec) -> Preset:
    return Preset(bypass=False, rules=_on("merged", rules), loss=None)


def _bypass(loss: str, *rules: RuleSpec) -> Preset:
    parameters: dict[str, float | str] = {"ratio": "total"} if loss == "ppo_clip" else {}
    return Preset(bypass=True, rules=_on("total", rules), loss=(loss, parameters))


def _on(ratio: str, rules: Sequence[RuleSpec]) -> tuple[RuleSpec, ...]:
    return tuple((name, {**thresholds, "ratio": ratio}) for name, thresholds in rules)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "disabled": _decoupled(),
        "decoupled_token_is": _decoupled(TOKEN_IS),
        "decoupled_seq_is": _decoupled(SEQ_IS),
        "decoupled_token_icepop": _decoupled(TOKEN_BAND),
        "decoupled_seq_is_rs": _decoupled(SEQ_IS, SEQ_RS),
        "decoupled_geo_rs": _decoupled(GEO_RS),
        "decoupled_geo_rs_seq_tis": _decoupled(SEQ_IS, GEO_RS),
        "decoupled_geo_rs_token_tis": _decoupled(TOKEN_IS, GEO_RS),
        "decoupled_k3_rs": _decoupled(K3_RS),
        "decoupled_k3_rs_seq_tis": _decoupled(SEQ_IS, K3_RS),
        "decoupled_k3_rs_token_tis": _decoupled(TOKEN_IS, K3_RS),
        "bypass_ppo_clip": _bypass("ppo_clip"),
        "bypass_ppo_clip_geo_rs": _bypass("ppo_clip", GEO_RS),
        "bypass_ppo_clip_k3_rs": _bypass("ppo_clip", K3_RS),
        "bypass_pg_is": _bypass("reinforce", SEQ_IS),
        "bypass_pg_token_icepop": _bypass("reinforce", TOKEN_BAND),
        "bypass_pg_geo_rs": _bypass("reinforce", GEO_RS),
        "bypass_pg_geo_rs_seq_tis": _bypass("reinforce", SEQ_IS, GEO_RS),
        "bypass_pg_geo_rs_token_tis": _bypass("reinforce", TOKEN_IS, GEO_RS),
    }
)
