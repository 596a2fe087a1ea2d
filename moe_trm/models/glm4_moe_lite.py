"""GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3's latent attention and router without expert groups and YaRN."""

from dataclasses import replace

from moe_trm.models.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    rotations=("default",),
    tiny={
        **DEEPSEEK_V3.tiny,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
)
