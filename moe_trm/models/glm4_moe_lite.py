"""GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3's latent attention and router, with GLM's plain rotation.

`mlp_layer_types` of config.json names dense and sparse layers; published checkpoints have `first_k_dense_replace`, too.
"""

from dataclasses import replace

from moe_trm.models.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    rotations=("default",),
    tiny={
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        # Wider than keys, as in the published model.
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
)
