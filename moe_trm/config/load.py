"""From a YAML file and dotted overrides to a validated `Config`.

YAML is read by OmegaConf's loader: `1e-4` is a number, and a key given twice is an error. Interpolation (`${...}`) is
refused, because a run must be readable from its file. Nothing is converted silently: text is not a number.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from moe_trm.config import rules
from moe_trm.config.choices import Choice, settle
from moe_trm.config.fields import default_of, lookup
from moe_trm.config.problems import Problem, from_validation, refuse
from moe_trm.config.removed import without_removed
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError

_log = logging.getLogger(__name__)

FurtherCheck = Callable[[Any], Sequence[Problem]]
"""Tells what is wrong with a `Config`."""
UNSET = "???"
"""A value that somebody has yet to decide, as the translations from other frameworks leave it. It is refused."""


@dataclass(frozen=True)
class Resolved:
    """A configuration and how it came about.

    Attributes:
        config: the validated values, every `auto` that settings decide as the value it stands for.
        sources: `file` or `override` by dotted key, for every value that was set; what is not here is a default.
        warnings: settings that have no effect, or not the one they seem to have.
        choices: what each such `auto` became, and why.
    """

    config: Config
    sources: Mapping[str, str]
    warnings: tuple[str, ...]
    choices: tuple[Choice, ...] = ()


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override, validate, settle. Settings without effect are logged as warnings.

    `overrides` are `section.key=value`, the value in YAML: `replay.mode=R3`, `optimizer.betas.1=0.99`,
    `correction.rules=[{name: trm_max}]`. Later ones win.

    Raises:
        ConfigError: no such file, or not YAML.
        InvalidConfigError: unknown keys, bad values, malformed overrides and impossible combinations, all of them at
            once.
    """
    return load_with_choices(path, overrides)[0]


def load_with_choices(
    path: str | Path, overrides: Sequence[str] = (), *, here: FurtherCheck | None = None
) -> tuple[Config, tuple[Choice, ...]]:
    """As `load`, with what every `auto` became and why. Same errors.

    `here`: what this machine cannot do of a configuration; of one that is refused it is told first.
    """
    resolved = resolve(path, overrides, here=here)
    for warning in resolved.warnings:
        _log.warning("config: %s", warning)
    return resolved.config, resolved.choices


def resolve(path: str | Path, overrides: Sequence[str] = (), *, here: FurtherCheck | None = None) -> Resolved:
    """As `load`, but returns the sources and warnings too instead of logging. Same errors. `here`: as there."""
    data = _what_was_set(read_yaml(path))
    sources = dict.fromkeys(_leaves(data), "file")
    problems: list[Problem] = []
    for override in overrides:
        try:
            key, value = parse_override(override)
            _assign(data, key, value)
        except InvalidOverrideError as error:
            problems.append(error.problem)
            continue
        sources = {
            source_key: source for source_key, source in sources.items() if not f"{source_key}.".startswith(f"{key}.")
        }
        sources |= dict.fromkeys(_leaves(value, key), "override")
    leaves = _leaves(data)
    problems += [
        Problem(key, "interpolation is not supported", got=repr(value), expected="the value itself")
        for key, value in leaves.items()
        if isinstance(value, str) and "${" in value
    ]
    undecided = [key for key, value in leaves.items() if value == UNSET]
    problems += _undecided(undecided)
    where = str(path) + (" with overrides" if overrides else "")
    try:
        config = Config.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        refuse(
            where,
            problems + _decided(from_validation(error) + _refusals_of_the_rest(data, error), undecided),
        )
        raise
    problems += _decided(rules.refusals(config), undecided)
    if problems and here:
        problems = [*(problem for problem in here(config) if problem not in problems), *problems]
    refuse(where, problems)
    settled, choices = settle(config)
    return Resolved(settled, sources, tuple(rules.warnings(settled)), choices)


def _what_was_set(data: dict[str, Any]) -> dict[str, Any]:
    """Without its defaults, where `data` is what a run wrote: it has every setting, but users set few."""
    defaults = Config.model_validate({"model": {"checkpoint": ""}}).dump()
    return _difference(without_removed(data), defaults) if _has_all(data, defaults) else data


def _has_all(data: Any, defaults: Any) -> bool:
    if not isinstance(defaults, dict) or not defaults:
        return True
    return isinstance(data, dict) and all(
        key in data and _has_all(data[key], default) for key, default in defaults.items()
    )


def _difference(data: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: value for key, value in data.items() if key not in defaults or value != defaults[key]}
    return {
        key: _difference(value, defaults[key])
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
        else value
        for key, value in changed.items()
    }


def _refusals_of_the_rest(data: dict[str, Any], error: ValidationError) -> list[Problem]:
    """Contradictions between the values that are right by themselves, to be told together with those that are not."""
    rest = json.loads(json.dumps(data))
    for details in error.errors(include_url=False):
        _remove(rest, details["loc"])
    try:
        return rules.refusals(Config.model_validate_json(json.dumps(rest), strict=True))
    except ValidationError:
        return []


def _remove(data: Any, path: Sequence[int | str]) -> None:
    """Take the value at `path` away; of a path that goes on inside a value (a choice of types), what is there of it."""
    for depth, part in enumerate(path):
        inside = data[part] if isinstance(data, dict) and part in data else None
        if not isinstance(inside, dict) or depth == len(path) - 1:
            if isinstance(data, dict):
                data.pop(part, None)
            return
        data = inside


class InvalidOverrideError(ConfigError):
    """One `key=value` that cannot be read or placed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A configuration file as plain data. Raises `ConfigError`."""
    data = read_plain(path)
    if not isinstance(data, dict):
        raise ConfigError(
            "configuration file must hold sections",
            where=str(path),
            got=type(data).__name__,
            expected="a mapping, e.g. `model:` and `  checkpoint: ...`",
        )
    return {str(key): value for key, value in data.items()}


def read_plain(path: str | Path) -> Any:
    """Any YAML file as plain data, interpolations left as text. Raises `ConfigError`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            "configuration file not found",
            where=str(path),
            got="a folder" if file.is_dir() else "no such file",
            expected="a YAML file",
            fix="check the path; configs/ holds examples",
        )
    try:
        return OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(
            "configuration file is not valid YAML",
            where=str(path),
            got=" ".join(str(error).split()),
            expected="`section:` and `  key: value` lines",
        ) from error


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=VALUE` as key and YAML value. Raises `InvalidOverrideError`."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")) or any(character.isspace() for character in key):
        raise InvalidOverrideError(
            Problem("", "malformed override", got=repr(text), expected="section.key=value, e.g. replay.mode=R3")
        )
    try:
        holder = OmegaConf.to_container(OmegaConf.create({"value": yaml_value(raw)}), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise InvalidOverrideError(
            Problem(
                key,
                "the override's value is not valid YAML",
                got=repr(raw),
                expected="a value, [a, list] or {a: mapping}",
            )
        ) from error
    value = holder["value"] if isinstance(holder, dict) else None
    setting = lookup(key)
    if setting and setting.annotation in (str, str | None) and isinstance(value, (bool, int, float)):
        value = raw  # a text setting takes what was typed: name=123 needs no quotes on a command line
    return key, value


def yaml_value(text: str) -> Any:
    """One YAML value, read by the same loader as files. Raises `yaml.YAMLError` or `OmegaConfBaseException`."""
    holder = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    return holder["value"] if isinstance(holder, dict) else None


def _assign(data: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at `key`. A list is indexed by number: an existing element, or the one past the end."""
    parts = key.split(".")
    place: Any = data
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        last = depth == len(parts) - 1
        if isinstance(place, list):
            if not part.isdigit() or int(part) > len(place):
                raise InvalidOverrideError(
                    Problem(
                        key, "no such list element", got=part, expected=f"an index from 0 to {len(place)} of {here}"
                    )
                )
            index = int(part)
            if index == len(place):
                place.append(None)
            if last:
                place[index] = value
            else:
                place[index] = {} if place[index] is None else place[index]
                place = place[index]
        elif isinstance(place, dict):
            if last:
                place[part] = value
            else:
                if place.get(part) is None:
                    place[part] = _container(".".join(parts[: depth + 1]))
                place = place[part]
        else:
            raise InvalidOverrideError(
                Problem(
                    key,
                    "no such key",
                    got=f"{here} is a value",
                    expected="a section or a list",
                    fix=f"set {here} itself",
                )
            )


def _container(path: str) -> Any:
    """Start value of an override below `path` where the file says nothing: a list's default, else an empty section."""
    default = default_of(path)
    if not isinstance(default, tuple):
        return {}
    return [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in default]


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; the elements of a list are numbered. What is empty is a leaf itself."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    if not data or not items:
        return {prefix: data} if prefix else {}
    inner = (_leaves(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in items)
    return {key: value for leaves in inner for key, value in leaves.items()}


def _undecided(keys: Sequence[str]) -> list[Problem]:
    """One problem for all values that are left open."""
    if not keys:
        return []
    key, what = (keys[0], "not decided yet") if len(keys) == 1 else ("", f"not decided yet: {', '.join(keys)}")
    fix = "the comment beside each says what it was made of"
    return [Problem(key, what, got=UNSET, expected="a value" if key else "a value for each", fix=fix)]


def _decided(problems: Sequence[Problem], undecided: Sequence[str]) -> list[Problem]:
    """The problems of settings that somebody has decided."""
    return [problem for problem in problems if problem.key not in undecided]
