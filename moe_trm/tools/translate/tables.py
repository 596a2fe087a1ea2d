"""Tables of one framework's settings, as data: `NAME.toml` beside this file.

| table | content |
|---|---|
| `defaults` | the framework's own, where we would use something else, or where a rule needs to know them |
| `renamed` | settings that are ours under another name, by the reader of their values |
| `undecided` | features that need a decision when they are on: the reason, and our settings that stay open |
| `never`, `decide`, `left` | pairs of a regular expression of keys and a reason, for settings that no rule has read |

The first pair that matches gives the reason. Those of `decide` would change the training: somebody has to decide about
them, unless their value is among the harmless ones that follow the reason, or else in `off`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import ForeignSetting
from moe_trm.tools.translate.sources import OWN_ARGUMENTS
from moe_trm.tools.translate.values import Reader, Rule, undecided


@dataclass(frozen=True)
class Tables:
    """The tables of `framework`. `rules` are those of `renamed` and `undecided`."""

    framework: str
    defaults: Mapping[str, Any]
    rules: Sequence[Rule]
    reasons: Mapping[str, Sequence[Sequence[Any]]]
    off: Sequence[Any]

    @classmethod
    def read(cls, framework: str, readers: Sequence[Reader], renamed: Callable[[str, str, Reader], Rule]) -> Tables:
        """Read the file. `renamed` makes a rule of a setting's key, of ours and of one of `readers`, called by name."""
        data = tomllib.loads(Path(__file__).with_name(f"{framework}.toml").read_text(encoding="utf-8"))
        by_name = {reader.__name__: reader for reader in readers}
        rules = [renamed(k, ours, by_name[name]) for name, keys in data["renamed"].items() for k, ours in keys.items()]
        rules += [undecided(key, *rest) for key, rest in data.get("undecided", {}).items()]
        reasons: dict[str, Any] = {name: data[name] for name in ("never", "decide", "left") if name in data}
        return cls(framework, data["defaults"], rules, reasons, data["off"])

    def translate(self, draft: Draft, rules: Sequence[Rule]) -> Draft:
        """Run the rules of the tables, then `rules`, and list what none of them has read."""
        for rule in (*self.rules, *rules):
            draft.rule(rule.reads, rule.writes, rule.apply)
        draft.list_rest(self.reason_of)
        return draft

    def reason_of(self, key: str, setting: ForeignSetting) -> tuple[str, bool]:
        """The reason that no rule has read this setting, and whether somebody has to decide about it."""
        if key.startswith(("$", "`")):
            return setting.unread, key not in OWN_ARGUMENTS
        for name, pairs in self.reasons.items():
            for pattern, reason, *harmless in pairs:
                if not re.fullmatch("".join(pattern.split()), key):
                    continue
                if name != "decide":
                    return reason, False
                if setting.unread:
                    return f"{setting.unread}; {reason}", True
                value, off = setting.value, harmless[0] if harmless else self.off
                same = value is None or value in ([], {}) or value in off
                return (f"off, or {self.framework}'s default", False) if same else (reason, True)
        return (setting.unread, True) if setting.unread else ("unknown to this translator", False)
