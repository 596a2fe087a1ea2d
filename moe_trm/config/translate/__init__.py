"""Configurations of other frameworks in our words: `moe-trm config from-verl` and `from-slime`.

A setting with an equivalent is translated, with its origin beside it. One without is listed with the reason. Nothing is
guessed: a value that cannot be read (a shell expression, a custom function) is listed too.
"""

from moe_trm.config.translate.draft import Draft
from moe_trm.config.translate.slime import from_slime
from moe_trm.config.translate.verl import from_verl

__all__ = ["Draft", "from_slime", "from_verl"]
