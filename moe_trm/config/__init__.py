"""Configuration: typed schema, loading with overrides, rules between settings, explanations. Imports no torch."""

from moe_trm.config.load import Resolved, load, load_with_choices, resolve
from moe_trm.config.problems import InvalidConfigError
from moe_trm.config.schema import Config

__all__ = ["Config", "InvalidConfigError", "Resolved", "load", "load_with_choices", "resolve"]
