"""A translated configuration in the making. Every setting of the input ends in it: translated, or with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_trm.config.load import UNSET
from moe_trm.config.schema import Config
from moe_trm.tools.translate.foreign_setting import Fate, ForeignSetting, NeedsDecisionError


@dataclass
class Draft:
    """The result of a translation.

    Attributes:
        settings: the input by key.
        defaults: what the other framework takes where the input says nothing and we would take something else.
        framework: its name, for the notes.
        dashes: what stands before its keys on a command line.
        values: our settings by dotted key; `???` where a to-do has to say it.
        origins: for each of them, what it was made of.
        translated: by key of the input, our keys.
        to_do: keys that need a decision or could not be read, and why.
        unknown: those of them that are unknown to the translation.
        missing: keys without a counterpart here, and why.
        remarks: what a reader should know of a translated value.
    """

    settings: Mapping[str, ForeignSetting]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    framework: str = ""
    dashes: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    translated: dict[str, list[str]] = field(default_factory=dict)
    to_do: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def take(self, key: str) -> Any:
        """The value of a setting of the input, else the other framework's default, else None.

        Raises:
            NeedsDecisionError: it is set, but its value cannot be read.
        """
        setting = self.settings.get(key)
        if setting is None:
            return self.defaults.get(key)
        if setting.unread:
            raise NeedsDecisionError(key, setting.unread)
        return setting.value

    def put(self, our_key: str, value: Any, *keys: str) -> None:
        """Set one of our settings, made of the settings `keys` of the input."""
        self.values[our_key] = value
        notes = []
        for key in keys:
            setting = self.settings.get(key)
            if setting is not None:
                self.translated.setdefault(key, []).append(our_key)
            place = setting.place if setting is not None else f"{self.framework}'s default"
            notes.append(self._named(key) + (f" ({place})" if place else ""))
        self.origins[our_key] = ", ".join(notes)

    def same(self, *keys: str) -> None:
        """These settings say what is always so here."""
        for key in keys:
            if key in self.settings:
                self.missing[key] = "always so here"

    def read(self, ours: str, read: Callable[[Draft, str], Any], key: str) -> None:
        """Set one of our settings from one of theirs, or leave it open where that cannot be read. Null says nothing."""
        try:
            value = read(self, key)
        except NeedsDecisionError as error:
            self.decide(key, error.reason, ours)
        else:
            if value is not None:
                self.put(ours, value, key)

    def miss(self, key: str, reason: str) -> None:
        """A setting without a counterpart here. One that the input does not have is left out."""
        if key in self.settings:
            self.missing[key] = reason

    def decide(self, key: str, reason: str, *our_keys: str) -> None:
        """A setting that somebody has to decide about; our settings that it would say are left open."""
        self.to_do[key] = reason
        for our_key in our_keys:
            self.values[our_key] = UNSET
            self.origins[our_key] = f"to do: {self._named(key)}"

    def remark(self, text: str) -> None:
        """A note for the reader."""
        self.remarks.append(text)

    def accounted(self, key: str) -> bool:
        """True when the output says what became of this setting of the input."""
        return key in self.translated or key in self.to_do or key in self.missing

    def list_rest(self, fate_of: Callable[[str, ForeignSetting], Fate]) -> None:
        """List every setting that no rule has read, with its reason."""
        for key, setting in self.settings.items():
            if self.accounted(key):
                continue
            fate = fate_of(key, setting)
            if fate.kind == "harmless":
                self.miss(key, fate.reason)
            else:
                self.decide(key, fate.reason, *fate.ours)
            if fate.kind == "unknown":
                self.unknown.add(key)

    def accept_unknown(self) -> None:
        """Unknown settings are no to-dos: somebody has read their list, and goes on without them."""
        for key in sorted(self.unknown):
            self.missing[key] = f"{self.to_do.pop(key)}, and accepted so"
        self.unknown.clear()

    def rule(self, reads: tuple[str, ...], writes: tuple[str, ...], apply: Callable[[Draft], None]) -> None:
        """Run one rule of a translation. What it reads and does not use is listed.

        A value that cannot be read leaves all that the rule writes open, and not at any default.
        """
        translated_before = set(self.translated)
        present_keys = [key for key in reads if key in self.settings]
        try:
            apply(self)
        except NeedsDecisionError as error:
            # What the rule has put already stays.
            self.to_do.pop(error.key, None)
            self.decide(error.key, error.reason, *(ours for ours in writes if ours not in self.values))
            for key in set(self.translated) - translated_before:
                self.translated[key] = [ours for ours in self.translated[key] if self.values.get(ours) != UNSET]
                if not self.translated[key]:
                    del self.translated[key]
            for key in present_keys:
                if not self.accounted(key):
                    self.to_do[key] = self.settings[key].unread or f"depends on {error.key}"
        else:
            self.missing |= {
                key: "no effect beside the other settings" for key in present_keys if not self.accounted(key)
            }

    def yaml(self, header: str) -> str:
        """The configuration file: our settings in the order of the schema, then what was not translated."""
        order = list(Config.model_fields)
        tree = _tree(self.values)
        lines = [f"# {line}".rstrip() for line in header.splitlines()]
        for name in sorted(tree, key=order.index):
            lines += self._lines(name, tree[name], name, 0)
        lines += self._listed("To do: these need a decision", self.to_do)
        lines += self._listed("Not translated", self.missing)
        return "\n".join(lines) + "\n"

    def counts(self) -> str:
        """Numbers of settings translated, to do, and without a counterpart."""
        listed = len(self.missing.keys() - self.translated.keys() - self.to_do.keys())
        done = len(self.translated.keys() - self.to_do.keys())
        unknown = f" ({len(self.unknown)} of them unknown)" if self.unknown else ""
        return f"{done} settings translated, {len(self.to_do)} to do{unknown}, {listed} without a counterpart"

    def summary(self) -> str:
        """The fate of the input in numbers, with every to-do and remark; for people."""
        parts = [self.counts()]
        parts += [f"to do: {self._shown(key)}: {reason}" for key, reason in self.to_do.items()]
        parts += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(parts)

    def _listed(self, title: str, reasons: Mapping[str, str]) -> list[str]:
        lines = ["#", f"# {title}:"] if reasons else []
        for reason in dict.fromkeys(reasons.values()):
            lines.append(f"#   {_flat_text(reason)}:")
            lines += [f"#     {self._shown(key)}" for key, own_reason in reasons.items() if own_reason == reason]
        return lines

    def _shown(self, key: str) -> str:
        setting = self.settings.get(key)
        named = self._named(key)
        if setting is None:
            return named if key.startswith("`") else f"{named} ({self.framework}'s default)"
        place = f" ({setting.place})" if setting.place else ""
        return f"{named} = {_flat_text(setting.shown)}{place}"

    def _named(self, key: str) -> str:
        return key if key.startswith(("$", "-", "`")) or key == "train.py" else self.dashes + key

    def _lines(self, name: str, value: Any, path: str, depth: int) -> list[str]:
        indent = "  " * depth
        if isinstance(value, _Section):
            inner = [line for key, item in value.items() for line in self._lines(key, item, f"{path}.{key}", depth + 1)]
            return [f"{indent}{name}:", *inner]
        written = UNSET if value == UNSET else json.dumps(value)
        return [f"{indent}{name}: {written}  # {_flat_text(self.origins[path])}"]


def _flat_text(text: str) -> str:
    return " ".join(text.split())


class _Section(dict[str, Any]):
    """A level of the configuration, as opposed to a value that happens to be a mapping."""


def _tree(values: Mapping[str, Any]) -> _Section:
    root = _Section()
    for key, value in values.items():
        place = root
        *parents, leaf = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, _Section())
        place[leaf] = value
    return root
