"""Configurations of other frameworks in our words: `moe-trm config from-verl` and the like.

Every setting of the input is in the output: translated, with its origin beside it, or listed with the reason. Nothing
is guessed. A value that is computed, or that somebody has to decide, stays open (`???`), and a run refuses it.
"""

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.nested import from_areal, from_nemo_rl, from_prime_rl, from_skyrl
from moe_trm.tools.translate.slime import from_miles, from_slime
from moe_trm.tools.translate.trl import from_trl
from moe_trm.tools.translate.verl import from_verl

__all__ = [
    "Draft",
    "from_areal",
    "from_miles",
    "from_nemo_rl",
    "from_prime_rl",
    "from_skyrl",
    "from_slime",
    "from_trl",
    "from_verl",
]
