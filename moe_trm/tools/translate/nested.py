"""Settings of frameworks whose files are levels of keys: NeMo-RL, SkyRL, prime-rl and AReaL. Their tables say all."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_trm.config.load import read_plain
from moe_trm.errors import ConfigError
from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import ForeignSetting, NeedsDecisionError
from moe_trm.tools.translate.sources import flat, hydra_settings, of_file
from moe_trm.tools.translate.tables import Tables
from moe_trm.tools.translate.template_variables import template_variables
from moe_trm.tools.translate.values import (
    Rule,
    betas,
    direct,
    full_vocabulary,
    integer,
    number,
    pair,
    switch,
    text,
    top_k,
)

_REFERENCE = re.compile(r"\$\{(\.?[\w.-]+)\}")
_READERS = (integer, number, switch, text)
_VARIABLES = {
    "nemo-rl": "policy.tokenizer.chat_template_kwargs",
    "skyrl": "generator.chat_template_kwargs",
    "prime-rl": "orchestrator.renderer.chat_template_kwargs",
    "areal": "actor.chat_template_kwargs",
}
_OWN = {
    "nemo-rl": ("grpo.", "loss_fn."),
    "skyrl": ("trainer.", "generator."),
    "prime-rl": ("orchestrator.",),
    "areal": ("gconfig.", "actor."),
}
"""Beginnings of keys, all of which a file of the framework has."""


def from_nemo_rl(path: Path, words: Sequence[str] = ()) -> Draft:
    """Translate NeMo-RL's YAML, with the files that its `defaults` name, and further `key=value` on top.

    Raises:
        ConfigError: the file, or one that it names, cannot be read, or has no setting of GRPO there.
    """
    return _translate("nemo-rl", _yaml_settings(path), words, str(path))


def from_areal(path: Path, words: Sequence[str] = ()) -> Draft:
    """Translate AReaL's YAML, with further `key=value` on top. Errors as `from_nemo_rl`."""
    return _translate("areal", _yaml_settings(path), words, str(path))


def from_prime_rl(path: Path, words: Sequence[str] = ()) -> Draft:
    """Translate the TOML file of prime-rl's `rl` command, with further `key=value`. Errors as `from_nemo_rl`."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("the file cannot be read", where=str(path), got=str(error), expected="TOML") from error
    return _translate("prime-rl", _settings(_leaves(data)), words, str(path))


def from_skyrl(path: Path, words: Sequence[str] = ()) -> Draft:
    """Translate a launch script of SkyRL, or a list of its `key=value`, with further ones. Errors as `from_nemo_rl`."""
    return _translate("skyrl", hydra_settings(path), words, str(path))


def _translate(framework: str, settings: Mapping[str, ForeignSetting], words: Sequence[str], where: str) -> Draft:
    more = hydra_settings(None, words)
    settings = {**settings, **more}
    if not all(any(key.startswith(start) for key in settings) for start in _OWN[framework]):
        raise ConfigError(
            f"this is no configuration of {framework}",
            where=where,
            got=", ".join(list(settings)[:5]) or "no setting",
            expected=f"settings that begin with {' and with '.join(_OWN[framework])}",
        )
    tables = Tables.read(framework, _READERS, direct)
    idle = tables.idle(settings)
    draft = Draft({key: value for key, value in settings.items() if key not in idle}, tables.defaults, framework)
    tables.translate(draft, (*_RULES[framework], template_variables(_VARIABLES[framework], draft.settings)))
    _decide_defaults(draft, tables)
    tables.settle(draft)
    draft.settings = settings
    for key, switched in idle.items():
        draft.miss(key, f"not read where {switched} is off")
    return draft


def _decide_defaults(draft: Draft, tables: Tables) -> None:
    """Defaults of theirs that would change the training, where the file says nothing of them."""
    read = {key for rule in (*tables.rules, *_RULES[tables.framework]) for key in rule.reads}
    for key, value in tables.defaults.items():
        if key not in draft.settings and key not in read:
            fate = tables.fate(key, of_file(key, value), draft.settings)
            if fate.kind == "to do":
                draft.decide(key, fate.reason, *fate.ours)


def _minibatches(prompts_key: str, rows_key: str, samples_key: str = "") -> Rule:
    """Optimizer steps of a batch, from its prompts and those of a step; or from samples, where these have a key."""
    keys = (prompts_key, rows_key, *([samples_key] if samples_key else []))

    def apply(draft: Draft) -> None:
        prompts, rows = integer(draft, prompts_key), integer(draft, rows_key)
        samples = integer(draft, samples_key) if samples_key else 1
        if not prompts or not rows or not samples:
            return
        if prompts * samples % rows:
            raise NeedsDecisionError(rows_key, f"{prompts * samples} do not split into steps of {rows}")
        draft.put("learner.minibatches", prompts * samples // rows, *keys)

    return Rule(keys, ("learner.minibatches",), apply)


def _two_sided(low_key: str, high_key: str) -> Rule:
    """One bound for both sides, unless the upper one has its own."""

    def apply(draft: Draft) -> None:
        low, high = number(draft, low_key), number(draft, high_key)
        if low is not None:
            draft.put("loss.clip_low", low, low_key)
            draft.put("loss.clip_high", low if high is None else high, low_key if high is None else high_key)

    return Rule((low_key, high_key), ("loss.clip_low", "loss.clip_high"), apply)


def _expert_tensor(draft: Draft) -> None:
    """Megatron-Core takes the tensor-parallel size where the experts' own is null."""
    place = "trainer.policy.megatron_config"
    keys = (f"{place}.expert_tensor_parallel_size", f"{place}.tensor_model_parallel_size")
    key = next((key for key in keys if draft.take(key) is not None), None)
    if key is not None:
        draft.put("learner.parallel.expert_tensor", integer(draft, key), key)


_SCHEDULER = ("type", "warmup_steps", "decay_steps", "min_lr")


def _prime_schedule(draft: Draft) -> None:
    """`linear` there holds the rate and falls at the end. Only schedules that change have a warm-up, of 10 steps."""
    keys = {name: f"trainer.scheduler.{name}" for name in _SCHEDULER}
    kind = text(draft, keys["type"])
    if kind not in ("constant", "linear", "cosine"):
        raise NeedsDecisionError(keys["type"], f"{kind}: not a schedule of ours")
    if kind == "constant":
        draft.put("optimizer.schedule", kind, keys["type"])
        draft.put("optimizer.warmup_steps", 0, keys["type"])
        return
    warmup, falling = (10 if (steps := integer(draft, keys[name])) is None else steps for name in _SCHEDULER[1:3])
    draft.put("optimizer.warmup_steps", warmup, keys["warmup_steps"])
    draft.put("optimizer.schedule", "cosine" if kind == "cosine" else "wsd" if falling else "constant", keys["type"])
    if kind == "linear" and falling:
        draft.put("optimizer.final_steps", falling, keys["decay_steps"])
    if (lowest := number(draft, keys["min_lr"])) is not None:
        draft.put("optimizer.min_lr", lowest, keys["min_lr"])


_ADAM = "policy.megatron_cfg.optimizer.adam_beta"
_RULES: Mapping[str, Sequence[Rule]] = {
    "nemo-rl": (
        top_k("policy.generation.top_k"),
        betas((f"{_ADAM}1", f"{_ADAM}2")),
        _minibatches("grpo.num_prompts_per_step", "policy.train_global_batch_size", "grpo.num_generations_per_prompt"),
    ),
    "skyrl": (
        top_k("generator.sampling_params.top_k"),
        pair("trainer.policy.optimizer_config.adam_betas"),
        _minibatches("trainer.train_batch_size", "trainer.policy_mini_batch_size"),
        full_vocabulary(tuple(f"generator.sampling_params.{name}" for name in ("top_p", "top_k", "min_p"))),
        Rule(
            tuple(f"trainer.policy.megatron_config.{name}_parallel_size" for name in ("expert_tensor", "tensor_model")),
            ("learner.parallel.expert_tensor",),
            _expert_tensor,
        ),
    ),
    "prime-rl": (
        betas(("trainer.optim.betas1", "trainer.optim.betas2")),
        Rule(
            tuple(f"trainer.scheduler.{name}" for name in _SCHEDULER),
            ("optimizer.schedule", "optimizer.warmup_steps", "optimizer.final_steps", "optimizer.min_lr"),
            _prime_schedule,
        ),
    ),
    "areal": (
        betas(("actor.optimizer.beta1", "actor.optimizer.beta2")),
        _two_sided("actor.eps_clip", "actor.eps_clip_higher"),
        full_vocabulary(("gconfig.top_p", "gconfig.top_k")),
    ),
}
"""Rules of more than one setting."""


def _yaml_settings(path: Path) -> dict[str, ForeignSetting]:
    data = _merged(path)
    leaves = _leaves(data)
    return {key: of_file(key, _referred(key, value, leaves)) for key, value in leaves.items()}


def _settings(leaves: Mapping[str, Any]) -> dict[str, ForeignSetting]:
    return {key: of_file(key, value) for key, value in leaves.items()}


def _leaves(data: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key; a list of one table is that table, and of several has their numbers."""
    result: dict[str, Any] = {}
    for key, value in flat(data).items():
        tables = value if isinstance(value, list) and value and all(isinstance(item, dict) for item in value) else []
        for number_of_table, table in enumerate(tables):
            place = key if len(tables) == 1 else f"{key}.{number_of_table}"
            result |= {f"{place}.{inner}": leaf for inner, leaf in _leaves(table).items()}
        if not tables:
            result[key] = value
    return result


def _merged(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file on top of the one that its `defaults` name."""
    data = read_plain(path)
    if not isinstance(data, dict):
        raise ConfigError("these are no settings", where=str(path), got=type(data).__name__, expected="levels of keys")
    base = data.pop("defaults", None)
    if not isinstance(base, str):
        return data
    below = (path.parent / base).resolve()
    if below in above or not below.exists():
        raise ConfigError(
            "the file that has the rest of the settings is not there",
            where=str(path),
            got=f"defaults: {base}",
            expected=f"a file at {below}",
            fix="copy the folder with both files",
        )
    return _over(_merged(below, (*above, path.resolve())), data)


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        key: _over(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return {**below, **inner}


def _referred(key: str, value: Any, leaves: Mapping[str, Any], depth: int = 0) -> Any:
    """The value that `${a.b}` names in the same file. Any other interpolation stays as it was written."""
    if not isinstance(value, str) or depth > 8:
        return value
    match = _REFERENCE.fullmatch(value)
    if match is None:
        return value
    name = match[1] if not match[1].startswith(".") else f"{key.rpartition('.')[0]}{match[1]}"
    return _referred(name, leaves[name], leaves, depth + 1) if name in leaves else value
