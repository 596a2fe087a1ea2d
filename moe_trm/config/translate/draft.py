"""A translated configuration in the making: values with where they came from, and what could not be translated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from moe_trm.config import rules
from moe_trm.config.problems import Problem, from_validation
from moe_trm.config.schema import Config


@dataclass
class Draft:
    """The result of a translation.

    Attributes:
        values: our settings by dotted key.
        origins: for each of them, the foreign setting.
        missing: foreign settings without an equivalent, and why.
        remarks: what a reader should know of a translated value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set one of our settings. None leaves our default."""
        if value is not None:
            self.values[key], self.origins[key] = value, origin

    def miss(self, origin: str, reason: str) -> None:
        self.missing[origin] = reason

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def yaml(self, header: str) -> str:
        """The configuration file, in the order of the schema, each line with its origin."""
        order = list(Config.model_fields)
        lines = [f"# {line}" for line in header.splitlines()]
        tree = _tree(self.values)
        for name in sorted(tree, key=order.index):
            lines += self._lines(name, tree[name], name, 0)
        return "\n".join(lines) + "\n"

    def problems(self) -> list[Problem]:
        """Everything that our configuration would still refuse.

        Examples are a missing checkpoint, or values that contradict each other here.
        """
        try:
            config = Config.model_validate_json(json.dumps(_tree(self.values)), strict=True)
        except ValidationError as error:
            return from_validation(error)
        return rules.refusals(config)

    def summary(self) -> str:
        """The settings without an equivalent, and the remarks; for people."""
        parts = [f"{len(self.values)} settings translated, {len(self.missing)} without an equivalent"]
        for reason in dict.fromkeys(self.missing.values()):
            origins = [origin for origin, given in self.missing.items() if given == reason]
            parts.append(f"  {reason}: {', '.join(origins)}")
        parts += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(parts)

    def _lines(self, name: str, value: Any, path: str, depth: int) -> list[str]:
        indent = "  " * depth
        if isinstance(value, _Section):
            inner = [line for key, item in value.items() for line in self._lines(key, item, f"{path}.{key}", depth + 1)]
            return [f"{indent}{name}:", *inner]
        return [f"{indent}{name}: {json.dumps(value)}  # {self.origins[path]}"]


class _Section(dict[str, Any]):
    """A level of the configuration, as opposed to a value that happens to be a mapping."""


def _tree(values: dict[str, Any]) -> _Section:
    root = _Section()
    for key, value in values.items():
        place = root
        *parents, leaf = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, _Section())
        place[leaf] = value
    return root
