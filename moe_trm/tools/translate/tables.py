"""Tables of one framework's settings, as data: `NAME.toml` beside this file, and its known keys in `keys/NAME.txt`.

| table | content |
|---|---|
| `defaults` | the framework's own, where we would use something else, or where a rule needs to know them |
| `omitted` | settings of ours that the framework has in no file, or not in every one, and what it does then |
| `sections` | regular expressions of keys whose empty table switches a feature on |
| `renamed` | settings that are ours under another name, by the reader of their values |
| `choices` | settings of which some values are some of ours: our key, the values, the reason where another is given |
| `undecided` | features that need a decision when they are on: the reason, and our settings that stay open |
| `switched` | keys of a section, the setting that switches it on, what is to decide then, other values that are off |
| `under` | keys that no rule reads where a setting is off, and that setting |
| `never`, `decide`, `left` | pairs of a regular expression of keys and a reason, for settings that no rule has read |
| `open` | regular expressions of keys that are known although no list has them, e.g. those of an engine |
| `megatron` | regular expression of keys whose first group is a setting of Megatron-Core, for `megatron.toml` |

The first pair that matches gives the reason. Those of `decide` would change the training: somebody has to decide about
them, unless their value is among the harmless ones that follow the reason, or else in `off`; ours that follow these
stay open. A pair of `left` counts
for known keys alone, and never for a key that `guarded.toml` names: a term of the objective, precision, staleness,
masks, pictures. Whatever has no pair is a to-do.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moe_trm.config.load import yaml_value
from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import Fate, ForeignSetting
from moe_trm.tools.translate.sources import OWN_ARGUMENTS
from moe_trm.tools.translate.values import Reader, Rule, choice, undecided

_OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "null", "disabled")
"""Values that switch a guarded setting off, whatever the framework."""
OBJECTIVE = (
    "model.checkpoint",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "train.steps",
    "learner.minibatches",
    "learner.epochs",
    "learner.dtype",
    "optimizer.lr",
    "optimizer.warmup_steps",
    "optimizer.schedule",
    "optimizer.betas",
    "optimizer.weight_decay",
    "loss.name",
    "loss.aggregation",
    "advantage.name",
    "replay.mode",
)
"""Settings of ours that a translation never leaves at our default: that is seldom the other framework's."""
_OF_DISTILLATION = ("advantage.name", "kl.teacher", "kl.coef", "kl.where")
"""Ours that a teacher would decide; without it a run would learn from rewards alone."""


@dataclass(frozen=True)
class Tables:
    """The tables of `framework`. `rules` are those of `renamed`, `choices` and `undecided`."""

    framework: str
    defaults: Mapping[str, Any]
    rules: Sequence[Rule]
    data: Mapping[str, Any]
    keys: Sequence[str]

    @classmethod
    def read(
        cls,
        framework: str,
        readers: Sequence[Reader],
        renamed: Callable[[str, str, Reader], Rule],
        lists: Sequence[str] = (),
    ) -> Tables:
        """Read the file. `renamed` makes a rule of a setting's key, of ours and of one of `readers`, called by name.

        `lists`: names of the lists of keys, where it is not the framework's alone.
        """
        data = _toml(framework)
        by_name = {reader.__name__: reader for reader in readers}
        rules = [
            renamed(k, ours, by_name[name])
            for name, keys in data.get("renamed", {}).items()
            for k, ours in keys.items()
        ]
        rules += [
            choice(key, row["ours"], _keyed(row["values"]), row["reason"])
            for key, row in data.get("choices", {}).items()
        ]
        rules += [undecided(key, *rest) for key, rest in data.get("undecided", {}).items()]
        keys = [key for name in lists or (framework,) for key in listed_keys(name)]
        return cls(framework, data["defaults"], rules, data, keys)

    def translate(self, draft: Draft, rules: Sequence[Rule]) -> Draft:
        """Run the rules of the tables, then `rules`, and list what none of them has read."""
        for rule in (*self.rules, *rules):
            draft.rule(rule.reads, rule.writes, rule.apply)
        draft.list_rest(lambda key, setting: self.fate(key, setting, draft.settings))
        if taught := [key for key in draft.to_do if guarded(key) == "distillation"]:
            draft.decide(taught[0], draft.to_do[taught[0]], *_OF_DISTILLATION)
        return draft

    def settle(self, draft: Draft) -> Draft:
        """Write what the framework does where the input has no setting of it, and leave open what nobody knows."""
        for ours in OBJECTIVE:
            if ours in draft.values:
                continue
            if ours in self.data["omitted"]:
                draft.put(ours, self.data["omitted"][ours])
                draft.origins[ours] = f"{self.framework} without a setting of it"
            else:
                draft.decide(f"`{ours}`", "the input says nothing of it, and our default may not be right", ours)
        return draft

    def fate(self, key: str, setting: ForeignSetting, settings: Mapping[str, ForeignSetting]) -> Fate:
        """The fate of a setting that no rule has read, and the reason."""
        if key.startswith(("$", "`")):
            return Fate("harmless" if key in OWN_ARGUMENTS else "to do", setting.unread)
        if reason := self._matching("never", key):
            return Fate("harmless", reason[0])
        if (fate := self._switched(key, setting, settings)) is not None:
            return fate
        if row := self._matching("decide", key):
            harmless = row[1] if len(row) > 1 else self.data.get("off", [])
            return self._decided(setting, row[0], harmless, *row[2:])
        name = self.megatron_name(key)
        if name and (row := _matching(_toml("megatron")["decide"], name)):
            return self._decided(setting, row[0], row[1] if len(row) > 1 else [])
        if not self.knows(key):
            kind = guarded(key)
            parts = ["unknown to this translator", *([f"it looks like {kind}"] if kind else []), setting.unread]
            return Fate("unknown", "; ".join(part for part in parts if part))
        if kind := guarded(key):
            return self._decided(setting, f"{kind}: there is no such setting here", [])
        harmless = self._matching("left", key) or (_matching(_toml("megatron")["left"], name) if name else None)
        if harmless:
            return Fate("harmless", harmless[0])
        return Fate("to do", setting.unread or "there is no such setting here")

    def idle(self, settings: Mapping[str, ForeignSetting]) -> dict[str, str]:
        """Keys of sections that are switched off, which no rule should read, and the setting that switches them."""
        idle_keys: dict[str, str] = {}
        for pattern, switch in self.data.get("under", []):
            switch_setting = settings.get(switch)
            value = switch_setting.value if switch_setting is not None else self.defaults.get(switch)
            if (switch_setting is None or not switch_setting.unread) and _among(value, _OFF):
                keys = (key for key in settings if key != switch and re.fullmatch("".join(pattern.split()), key))
                idle_keys |= dict.fromkeys(keys, switch)
        return idle_keys

    def knows(self, key: str) -> bool:
        """True for a key of the framework's own definitions, or one below an open one."""
        name = self.megatron_name(key)
        return (
            key in _exact(self.framework, tuple(self.keys))
            or any(f"{key}.".startswith(open_key[:-1]) for open_key in self.keys if open_key.endswith(".*"))
            or any(re.fullmatch("".join(pattern.split()), key) for pattern in self.data.get("open", []))
            or (name is not None and name in listed_keys("megatron"))
        )

    def megatron_name(self, key: str) -> str | None:
        """The setting of Megatron-Core that this key is, by Megatron-Core's name."""
        pattern = self.data.get("megatron")
        match = re.fullmatch("".join(pattern.split()), key) if pattern else None
        return match[1].replace("-", "_") if match else None

    def _matching(self, table: str, key: str) -> Sequence[Any] | None:
        return _matching(self.data.get(table, []), key)

    def _switched(self, key: str, setting: ForeignSetting, settings: Mapping[str, ForeignSetting]) -> Fate | None:
        for pattern, switch, reason, *off in self.data.get("switched", []):
            if not re.fullmatch("".join(pattern.split()), key) or key == switch:
                continue
            switch_setting = settings.get(switch)
            value = switch_setting.value if switch_setting is not None else self.defaults.get(switch)
            if switch_setting is not None and switch_setting.unread:
                return Fate("to do", f"depends on {switch}")
            if _among(value, (*_OFF, *(off[0] if off else ()))):
                return Fate("harmless", f"{switch} is off")
            return self._decided(setting, reason, [])
        return None

    def _decided(self, setting: ForeignSetting, reason: str, harmless: Sequence[Any], *ours: str) -> Fate:
        if setting.unread:
            return Fate("to do", f"{setting.unread}; {reason}", ours)
        if setting.value == {} and any(re.fullmatch(part, setting.key) for part in self.data.get("sections", [])):
            return Fate("to do", reason, ours)
        if _among(setting.value, (None, [], {}, *harmless)) or (guarded(setting.key) and _among(setting.value, _OFF)):
            return Fate("harmless", f"off, or {self.framework}'s default")
        return Fate("to do", reason, ours)


@cache
def listed_keys(name: str) -> frozenset[str]:
    """Keys of one list beside this file, by the framework's own definitions (tests/unit/tools/translate)."""
    return frozenset((Path(__file__).parent / "keys" / f"{name}.txt").read_text(encoding="utf-8").split())


def guarded(key: str) -> str | None:
    """The reason why a setting is never harmless; None where there is none."""
    name = key.lower().replace("-", "_")
    table = _toml("guarded")
    if any(re.search("".join(pattern.split()), name) for pattern in table["not"]):
        return None
    kinds = (kind for kind, pattern in table["kinds"].items() if re.search("".join(pattern.split()), name))
    return next(kinds, None)


@cache
def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


@cache
def _exact(framework: str, keys: tuple[str, ...]) -> frozenset[str]:
    return frozenset(keys)


def _matching(pairs: Sequence[Sequence[Any]], key: str) -> Sequence[Any] | None:
    """Reason, and harmless values where there are any, of the first pair that matches."""
    return next((rest for pattern, *rest in pairs if re.fullmatch("".join(pattern.split()), key)), None)


def _among(value: Any, harmless: Sequence[Any]) -> bool:
    """True where a value, or the only word of a flag, is one of these."""
    if isinstance(value, tuple):
        if len(value) != 1:
            return False
        value = yaml_value(value[0]) if value[0] else ""
    if isinstance(value, str):
        value = value.lower() if value.lower() in _OFF else value
    return any(
        value is item or (isinstance(value, bool) == isinstance(item, bool) and value == item) for item in harmless
    )


def _keyed(values: Mapping[str, Any]) -> dict[Any, Any]:
    """TOML's keys are texts; `true` and `false` are not."""
    return {{"true": True, "false": False}.get(key, key): ours for key, ours in values.items()}
