"""GLM-5: DeepSeek-V3.2's sparse attention without expert groups and YaRN; layers may share the choice of an indexer."""

from dataclasses import replace

from moe_trm.models.deepseek_v32 import DEEPSEEK_V32
from moe_trm.models.family import Required

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    required={**DEEPSEEK_V32.required, "indexer_rope_interleave": Required(True, "another rotation in the indexer")},
    rotations=("default",),
    tiny={
        **DEEPSEEK_V32.tiny,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "n_group": 1,
        "topk_group": 1,
        # The third of four layers takes the choice of the second.
        "index_topk_freq": 2,
    },
)
