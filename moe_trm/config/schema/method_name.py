"""Types of settings that name a method: one of a table, or a function of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.corrections import CORRECTIONS
from moe_trm.methods.losses import LOSSES
from moe_trm.methods.own import is_own
from moe_trm.methods.presets import PRESETS

TABLES = {
    "advantage.name": ADVANTAGES,
    "loss.name": LOSSES,
    "correction.rules": CORRECTIONS,
    "correction.preset": PRESETS,
}
"""Methods by the setting that takes their names."""


@dataclass(frozen=True)
class OneOf:
    """Annotation of a text setting: the names it takes.

    Attributes:
        known: names of the built-in methods.
        own: whether `path/to/file.py:function` is taken too.
    """

    known: tuple[str, ...]
    own: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, name: str) -> str:
        """Return `name`. Raises `ValueError` with the nearest name where nothing is called so, or the setting that
        takes it."""
        if name in self.known or (self.own and is_own(name)):
            return name
        setting = next((setting for setting, names in TABLES.items() if name in names), None)
        if setting is not None:
            raise ValueError(f"did you mean {setting}? It takes {name}")
        close = get_close_matches(name, self.known, n=1)
        raise ValueError(f"did you mean {close[0]}?" if close else "")

    def __str__(self) -> str:
        user_forms = ("path/to/file.py:function", "package.module:function") if self.own else ()
        return "one of " + ", ".join((*self.known, *user_forms))


AdvantageName = Annotated[str, OneOf(tuple(ADVANTAGES))]
RuleName = Annotated[str, OneOf(tuple(CORRECTIONS), own=True)]
PresetName = Annotated[str, OneOf(tuple(PRESETS))]
LossName = Annotated[str, OneOf(tuple(LOSSES), own=True)]
