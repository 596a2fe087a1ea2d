"""`moe-trm config`: show, explain and compare configurations."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from moe_trm.config.choices import BECOMES, MACHINE
from moe_trm.config.fields import REQUIRED, Setting, lookup, walk
from moe_trm.config.flat import as_yaml, different_keys, flatten
from moe_trm.config.load import Resolved, resolve
from moe_trm.config.method_page import method_page
from moe_trm.config.problems import suggest
from moe_trm.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Arguments of `moe-trm config` and its subcommands, to which `moe_trm.tools.translate` adds its own."""
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print the resolved configuration with the source of each value")
    show.add_argument("config", help="YAML configuration")
    show.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. replay.mode=R2 optimizer.lr=3e-5")
    show.add_argument("--json", action="store_true", help="as one JSON object, without sources")
    explain = commands.add_parser("explain", help="print what a key, a correction or a loss means and takes")
    explain.add_argument("key", nargs="?", help="e.g. replay.mode, trm_max, FILE.py:FUNCTION; none: every key")
    diff = commands.add_parser("diff", help="print the keys that differ between two configurations")
    diff.add_argument("a", help="YAML file")
    diff.add_argument("b", help="YAML file")
    diff.add_argument("overrides", nargs="*", metavar="key=value", help="applied to both")
    return commands


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand. `diff` answers 1 when something differs, like diff(1)."""
    if args.config_command == "show":
        return _show(args.config, args.overrides, as_json=args.json)
    if args.config_command == "explain":
        return _explain(args.key)
    return _diff(args.a, args.b, args.overrides)


def _show(path: str, overrides: list[str], *, as_json: bool) -> int:
    resolved = resolve(path, overrides)
    if as_json:
        print(json.dumps(resolved.config.dump(), indent=2))
    else:
        flat = _flat(resolved)
        width = max(len(key) + len(as_yaml(value)) for key, value in flat.items()) + 4
        remarks = {
            **{key: f", {text}" for key, text in MACHINE.items() if flat[key] == "auto"},
            **{choice.key: f", {choice}" for choice in resolved.choices},
        }
        for key, value in flat.items():
            source = _source(key, resolved.sources) + remarks.get(key, "")
            print(f"{f'{key}: {as_yaml(value)}':<{min(width, 70)}} # {source}")
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _source(key: str, sources: Mapping[str, str]) -> str:
    """The source of the value: it, one of its elements, or the list or mapping that holds it, was set."""
    inside = {source for path, source in sources.items() if path == key or path.startswith(f"{key}.")}
    if inside:
        return " and ".join(sorted(inside))
    parts = key.split(".")
    outside = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((sources[path] for path in outside if path in sources), "default")


def _explain(key: str | None) -> int:
    if key is None:
        for field in walk():
            if field.section is None:
                print(f"{field.path}  ({field.type_text}; {_default(field)})\n    {field.doc}")
        return 0
    setting = lookup(key)
    page = method_page(key) if setting is None else None
    if page is not None:
        print(page)
        return 0
    if setting is None:
        suggestion = suggest(key)
        raise ConfigError(
            "unknown key",
            where=key,
            fix=f"did you mean {suggestion}?"
            if suggestion
            else "`moe-trm config explain` without a key lists them all",
        )
    print(f"{setting.path}\n  {setting.doc}\n  type:    {setting.type_text}")
    if setting.section is None:
        print(f"  default: {_default(setting).removeprefix('default ')}")
    for case in BECOMES.get(setting.path, ()):
        print(f"  auto -> {case}")
    for inner in walk():
        if inner.path.startswith(f"{setting.path}."):
            print(f"  {inner.path}  ({inner.type_text}; {_default(inner)})")
    return 0


def _default(setting: Setting) -> str:
    if setting.section is not None:
        return "section"
    return "required" if setting.default is REQUIRED else f"default {as_yaml(setting.default)}"


def _diff(path_a: str, path_b: str, overrides: list[str]) -> int:
    a, b = (_flat(resolve(path, overrides)) for path in (path_a, path_b))
    different = different_keys(a, b)
    for key in different:
        print(f"{key}: {as_yaml(a[key]) if key in a else '(absent)'} -> {as_yaml(b[key]) if key in b else '(absent)'}")
    return 1 if different else 0


def _flat(resolved: Resolved) -> dict[str, Any]:
    """Leaf values by dotted key; a secret shows only whether it is set."""
    flat = flatten(resolved.config.dump())
    if resolved.config.rollout.api_key is not None:
        flat["rollout.api_key"] = "(set, not shown)"
    return flat
