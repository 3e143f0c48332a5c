"""Tiny random models made with transformers' own classes."""

from __future__ import annotations

import copy
from typing import Any

import torch

VOCAB = 199  # prime: no tensor-parallel size divides it
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,  # large enough that attention is not uniform
    "eos_token_id": 2,
    "bos_token_id": 1,
    "dtype": "float32",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = 21  # shorter than the tests' prompts, and no multiple of a page
QWEN2_LAYERS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,  # not head_dim
    "attention_bias": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "tie_word_embeddings": True,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,  # of 8 frequencies some stay, some are interpolated, some are on the ramp between
    "beta_slow": 1.0,
}
MISTRAL_3_ROPE = {
    **YARN_ROPE,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
MULTIPLIERS = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}
OLMO3_ROPES = {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GLM4_MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "rope_parameters": HALF_ROPE,
    "pad_token_id": 0,
}
GPT_OSS: dict[str, Any] = {
    **WINDOWS,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    "swiglu_limit": 1.5,  # small enough that some values are clamped
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "global_head_dim": 32,
    "num_global_key_value_heads": 3,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
GEMMA4_PARTS: dict[str, Any] = {  # experts as 26B-A4B has them; inputs of each layer and shared KV as E2B has them
    **GEMMA4,
    "attention_bias": False,
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    "attention_k_eq_v": False,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
}
DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_V2 = {
    **DEEPSEEK,
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "q_lora_rank": 40,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.2},
}
GLM4_MOE_LITE = {**DEEPSEEK, "q_lora_rank": 40, "n_group": 1, "topk_group": 1, "head_dim": 16, "pad_token_id": 0}
# kind -> transformers' name of the family, and what its config has beside the shape
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", QWEN2_LAYERS),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "gemma3": ("Gemma3", GEMMA3),
    "olmo2": ("Olmo2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "phi3": ("Phi3", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "phi3-partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}, "pad_token_id": 0},
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "hidden_size": 96,  # Phi3Config wants factors for hidden_size / num_attention_heads, whatever head_dim is
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            },
            "pad_token_id": 0,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "granite": ("Granite", MULTIPLIERS),
    "ministral": ("Ministral", WINDOWS),
    "ministral3": ("Ministral3", {"rope_parameters": MISTRAL_3_ROPE, "pad_token_id": 0}),
    "olmo3": ("Olmo3", {**WINDOWS, "rope_parameters": OLMO3_ROPES}),
    "glm": ("Glm", {"rope_parameters": HALF_ROPE, "pad_token_id": 0}),
    "glm4": ("Glm4", {"rope_parameters": HALF_ROPE, "pad_token_id": 0}),
    "seed-oss": ("SeedOss", {"attention_out_bias": True}),
    "exaone4": ("Exaone4", WINDOWS),
    "ernie": ("Ernie4_5", {"use_bias": True}),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "gpt-oss": ("GptOss", GPT_OSS),
    "deepseek-v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK_V3),
    "glm4-moe-lite": ("Glm4MoeLite", GLM4_MOE_LITE),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-parts": ("Gemma4", GEMMA4_PARTS),
    "qwen3-next": ("Qwen3Next", {**HYBRID, **QWEN_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5", {**HYBRID, "attention_bias": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**HYBRID, **QWEN_EXPERTS}),
}
FAMILIES = tuple(KINDS)


def make_model(kind: str, **changes: Any) -> Any:
    import transformers

    family, extra = KINDS[kind]
    torch.manual_seed(0)
    has_vision = family in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
    config_name = f"{family}TextConfig" if has_vision else f"{family}Config"
    config = getattr(transformers, config_name)(**copy.deepcopy({**SHAPE, **extra, **changes}))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if family == "GptOss":
        for layer in model.model.layers:  # before its version 5.19, transformers clamps at 7 whatever the config says
            layer.mlp.experts.limit = config.swiglu_limit
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out or put in the wrong place
                parameter.uniform_(0.5, 1.5)
            if name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.2)
            if name.endswith("A_log"):  # so slow a decay that a state remembers whole prompts
                parameter.uniform_(-6.0, -2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    return model.eval()
