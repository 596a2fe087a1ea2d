"""Imports of ranks in tests, made once by the process that forks them (`tests.integration.ranks`)."""

import gc
from importlib import import_module

from moe_trm.learner.megatron.cpu_shim import import_uncompiled
from moe_trm.learner.megatron.notices import silence_known_notices

silence_known_notices()
import_uncompiled()
for _name in (
    "launch.learner",
    "moe_trm.learner.megatron.build",
    "moe_trm.learner.megatron.cpu_shim",
    "moe_trm.models.tiny.checkpoint",
    "safetensors.torch",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
):
    import_module(_name)
# Collections in a fork would otherwise write to, and so copy, every page of what was imported.
gc.collect()
gc.freeze()
