"""Settings of another framework from what its user has: a resolved file, an argument list, a launch script."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from moe_trm.config.load import read_plain, yaml_value
from moe_trm.errors import ConfigError
from moe_trm.tools.translate.foreign_setting import ForeignSetting, merged
from moe_trm.tools.translate.launcher import launcher_words
from moe_trm.tools.translate.shell import Word, references, words_of
from moe_trm.tools.translate.shell_values import filled

ARGUMENTS = "arguments"
_KEY = re.compile(r"[+~]{0,2}([A-Za-z_][\w/@]*(?:\.[\w/@-]+)*)=(.*)", re.DOTALL)
_HYDRA = re.compile(r"(--config-(?:name|path|dir))=(.*)", re.DOTALL)
_MAIN = re.compile(r"verl\.|main_\w+|(^|/)main\w*\.py$")
_TRAINER = re.compile(r"(^|/)train\w*\.py$")
_TRL = re.compile(r"(^|/)(trl|train\w*|grpo\w*)(\.py)?$")
_SCRIPT = re.compile(r"[^=]+\.(sh|bash)")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_FLAG = re.compile(r"--[A-Za-z]")
_LIST = re.compile(r"\$\{\w+\[[@*]\]\}|\$[@*]")
"""A word that becomes several, and so is no value of the flag before it."""
OWN_ARGUMENTS = ("$@", "$*", "${@}", "${*}")
_COMPUTED = "the script computes it"


def hydra_settings(path: Path | None, words: Sequence[str] = ()) -> dict[str, ForeignSetting]:
    """verl's settings by dotted key: from Hydra's composed YAML, a list of `key=value`, or a launch script.

    `words` are further `key=value`, which win. `-` is standard input; none: `words` alone.

    Raises:
        ConfigError: the file cannot be read.
    """
    read: list[ForeignSetting] = []
    if path is not None and path.suffix in (".yaml", ".yml"):
        read = [of_file(key, value) for key, value in flat(read_plain(path)).items()]
    elif path is not None:
        read = list(_hydra_words(_words(path, _MAIN)))
    more = [setting for word in words for setting in _hydra_words([Word(word, 0)])]
    return merged(read) | merged(more)


def plain_settings(path: Path, words: Sequence[str] = ()) -> dict[str, ForeignSetting]:
    """TRL's settings by name: from a YAML file, or a list of `--name value`. `words` are further ones, which win.

    Raises:
        ConfigError: the file cannot be read.
    """
    is_yaml = path.suffix in (".yaml", ".yml")
    read = [] if not is_yaml else [of_file(key, value) for key, value in read_plain(path).items()]
    listed = list(_flags(_words(path, _TRL), _TRL)) if not is_yaml else []
    more = list(_flags([Word(word, 0) for word in words]))
    read += [_single(entry) for entry in listed if entry.key != "train.py"]
    return merged(read) | merged([_single(entry) for entry in more])


def _single(setting: ForeignSetting) -> ForeignSetting:
    """A flag's words as one value: true for a switch, a list for several."""
    if setting.unread:
        return setting
    values = [yaml_value(word) for word in setting.value]
    value = True if not values else values[0] if len(values) == 1 else values
    return ForeignSetting(setting.key, value, setting.place, setting.shown)


def flag_settings(path: Path, words: Sequence[str] = ()) -> dict[str, ForeignSetting]:
    """slime's flags by name: from an argument list or a launch script. Each value is a tuple of words.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path.suffix in (".yaml", ".yml", ".json", ".toml"):
        raise ConfigError(
            "this is no list of arguments",
            where=str(path),
            got=f"a {path.suffix} file",
            expected="slime's or miles's arguments, or the script that holds them",
            fix="use `moe-trm config from-verl` for verl's YAML",
        )
    read = list(_flags(_words(path, _TRAINER)))
    more = list(_flags([Word(word, 0) for word in words]))
    return merged(read) | merged(more)


def _words(path: Path, starts: re.Pattern[str]) -> list[Word]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "launch script cannot be read", where=str(path), got=str(error), expected="a text file"
        ) from error
    if path.suffix == ".py":
        return launcher_words(text, str(path))
    if "\0" in text:
        return [Word(word, 0) for word in text.split("\0") if word]
    words = filled(words_of(text, str(path), starts), text)
    _check_starts(words, path, starts)
    return words


def _check_starts(words: Sequence[Word], path: Path, starts: re.Pattern[str]) -> None:
    """Refuse a script that leaves the start to another one: a default would stand for what only that one says."""
    loose = [word for word in words if not word.holder]
    scripts = [word for word in loose if _SCRIPT.fullmatch(word.text)]
    if scripts and not any(starts.search(word.text) for word in loose if word not in scripts):
        raise ConfigError(
            "another script starts the training, and has the rest of the settings",
            where=f"{path}, {_place(scripts[-1])}",
            got=scripts[-1].text,
            expected="the script with the training command, or a list of arguments",
            fix="translate that one, with the settings of this one behind it; or save the arguments of a running job",
        )


def _place(word: Word) -> str:
    place = f"line {word.line}" if word.line else ARGUMENTS
    return place + (f", unless {', '.join(word.outside)} is set outside" if word.outside else "")


def _unread(word: Word) -> str:
    return _COMPUTED if word.dynamic else word.doubt


def _hydra_words(words: Sequence[Word]) -> Iterator[ForeignSetting]:
    holders = {word.holder for word in words if word.holder}
    commands = {word.command for word in words if word.holder or re.search(r"\bverl\b|main_\w+|^\w+\.\w+", word.text)}
    main = {word.command for word in words if _MAIN.search(word.text) and not word.holder}
    passed_whole = _whole(word for word in words if word.command in main or word.holder)
    for word in words:
        hydra = _HYDRA.fullmatch(word.text)
        assignment = _KEY.fullmatch(word.text)
        if hydra:
            yield ForeignSetting(hydra[1], hydra[2], _place(word), hydra[2], _unread(word))
        elif assignment and ("." in assignment[1] or word.command in commands):
            yield _assigned(word, assignment[1], assignment[2], removed=word.text.startswith("~"))
        elif word.text.startswith("~") and "." in word.text:
            yield _assigned(word, word.text.lstrip("~"), "", removed=True)
        elif (
            word.dynamic and (word.command in main or word.holder in passed_whole) and word.text.startswith(("$", "`"))
        ):
            yield from _passed(word, holders)


def _assigned(word: Word, key: str, text: str, *, removed: bool) -> ForeignSetting:
    unread, value = _unread(word), None
    if removed:
        unread = "the script takes it out of the base configuration"
    elif not unread:
        try:
            value = yaml_value(text)
        except (yaml.YAMLError, OmegaConfBaseException):
            unread = "its value is not in YAML"
    return ForeignSetting(key, value, _place(word), text, unread)


def _whole(words: Iterable[Word]) -> set[str]:
    """Variables whose words become words of a command; of others the value is a part of a word."""
    references_found = (_REFERENCE.fullmatch(word.text) for word in words if word.dynamic)
    return {reference[1] for reference in references_found if reference}


def _passed(word: Word, holders: set[str]) -> Iterator[ForeignSetting]:
    """Settings that a variable brings in, of which nothing is known."""
    if word.text in OWN_ARGUMENTS:
        reason = "the script passes on its own arguments: give them after the file"
        yield ForeignSetting(word.text, None, _place(word), word.text, reason)
    elif not set(references(word.text)) & holders:
        yield ForeignSetting(word.text, None, _place(word), word.text, "its settings are not in this file")


def _flags(words: Sequence[Word], starts: re.Pattern[str] = _TRAINER) -> Iterator[ForeignSetting]:
    holders = {word.holder for word in words if word.holder}
    groups = []
    for number in dict.fromkeys(word.command for word in words):
        mine = [word for word in words if word.command == number]
        if not mine[0].holder and not mine[0].text.startswith("--"):
            at = next((index for index, word in enumerate(mine) if starts.search(word.text)), None)
            if at is None:
                continue
            program, mine = mine[at], mine[at + 1 :]
            yield ForeignSetting("train.py", (program.text,), _place(program), program.text, program.doubt)
        groups.append(mine)
    loose = [word for mine in groups for word in _loose(mine)]
    passed_whole = _whole(loose)
    for mine in groups:
        yield from _grouped(mine)
    for word in loose:
        if not word.holder or word.holder in passed_whole:
            yield from _passed(word, holders)


def _loose(words: Sequence[Word]) -> Iterator[Word]:
    """Words of one command or variable that the script fills in, before any flag and not as a flag's value."""
    under_flag = False
    for word in words:
        is_flag = bool(_FLAG.match(word.text))
        if (
            not is_flag
            and word.dynamic
            and word.text.startswith("$")
            and (not under_flag or _LIST.fullmatch(word.text))
        ):
            yield word
            under_flag = False
        under_flag |= is_flag


def _grouped(words: Sequence[Word]) -> Iterator[ForeignSetting]:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _FLAG.match(word.text):
            continue
        name, equals, first = word.text[2:].partition("=")
        values = [first] if equals else []
        unread, outside = _unread(word), list(word.outside)
        while at < len(words) and not _FLAG.match(words[at].text):
            if words[at].dynamic and _LIST.fullmatch(words[at].text):
                break
            values.append(words[at].text)
            unread = unread or _unread(words[at])
            outside += words[at].outside
            at += 1
        place = _place(replace(word, outside=tuple(dict.fromkeys(outside))))
        yield ForeignSetting(name, tuple(values), place, " ".join(values) or "on", unread)


def of_file(key: str, value: Any) -> ForeignSetting:
    """A setting as a file of keys has it."""
    if isinstance(value, str) and "${" in value:
        reason = "an interpolation: print the configuration with `--cfg job --resolve`"
        return ForeignSetting(key, None, "", value, reason)
    if value == "???":
        return ForeignSetting(key, None, "", "???", "it has no value yet")
    return ForeignSetting(key, value, "", "null" if value is None else str(value))


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    if not isinstance(data, dict) or not data:
        return {prefix: data} if prefix else {}
    return {
        leaf: value
        for key, inner in data.items()
        for leaf, value in flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
