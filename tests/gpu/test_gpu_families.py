"""Each model family on a GPU in bf16, at true layer shapes: every token's logits against transformers.

Two layers and a small vocabulary, weights drawn at random. `minisgl verify` compares logits in batches, chunks and from
cached pages, and greedy tokens from captured graphs; its limits follow from the dtype's rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.verify.__main__ import main

pytestmark = pytest.mark.gpu

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
QWEN2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
}
QWEN3_06B = QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN3_14B = QWEN3 | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
QWEN3_5: dict[str, Any] = {
    "head_dim": 256,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}
QWEN3_5_9B = QWEN3_5 | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_key_value_heads": 4,
}
QWEN3_5_35B_A3B = QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
QWEN3_NEXT_80B_A3B = QWEN3_5_35B_A3B | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
GEMMA_3_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 168,  # the 27B model's; 12B's is the size of its heads
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
OLMO_2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
PHI_4_MINI: dict[str, Any] = {  # with plain frequencies
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
LLAMA_LIKE_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
HALF_WINDOWED: dict[str, Any] = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 256,  # shorter than the prompts, so that queries are scaled
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "no_rope_layers": [1, 0],
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0,
    "max_position_embeddings": 65536,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
GRANITE_8B = LLAMA_LIKE_8B | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
}
MINISTRAL_3_8B = LLAMA_LIKE_8B | {
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1},
    "max_position_embeddings": 4096,
}
OLMO_3_7B = OLMO_2_7B | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    **HALF_WINDOWED,
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
GLM_4_9B = LLAMA_LIKE_8B | {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "pad_token_id": 0,
}
GLM_4_5_AIR = LLAMA_LIKE_8B | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}
EXAONE_4 = LLAMA_LIKE_8B | {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", **HALF_WINDOWED}
SEED_OSS = LLAMA_LIKE_8B | {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "num_attention_heads": 40,
    "num_key_value_heads": 4,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    **HALF_WINDOWED,
}
GEMMA_4_DENSE = {key: value for key, value in GEMMA_3_12B.items() if key != "query_pre_attn_scalar"} | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA_4_26B_A4B = GEMMA_4_DENSE | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "moe_intermediate_size": 704,
    "top_k_experts": 8,
}
GEMMA_4_E4B = GEMMA_4_DENSE | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 8192,
    "num_hidden_layers": 4,  # the second half attends to K and V of the first
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA_4_E2B = GEMMA_4_E4B | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_key_value_heads": 1,
    "use_double_wide_mlp": True,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "topk_method": "greedy",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {  # with an eighth of its experts, and smaller ones
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 32,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "rope_parameters": YARN,
}
GLM_4_7_FLASH = DEEPSEEK_V2_LITE | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "topk_method": "noaux_tc",
}
GEMMA_4 = ("gemma4", "gemma4-26b-a4b", "gemma4-e2b", "gemma4-e4b")
WINDOWED = ("mistral-window", "gemma3", *GEMMA_4, "olmo3", "exaone4", "gpt-oss")
LATENT = ("deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite")
SHAPES = {
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v3": DEEPSEEK_V3,
    "exaone4": EXAONE_4,
    "gemma3": GEMMA_3_12B,
    "gemma4": GEMMA_4_DENSE,
    "gemma4-26b-a4b": GEMMA_4_26B_A4B,
    "gemma4-e2b": GEMMA_4_E2B,
    "gemma4-e4b": GEMMA_4_E4B,
    "glm4": GLM_4_9B,
    "glm4-moe": GLM_4_5_AIR,
    "glm4-moe-lite": GLM_4_7_FLASH,
    "gpt-oss": GPT_OSS_20B,
    "granite": GRANITE_8B,
    "llama": LLAMA_3_1_8B,
    "ministral3": MINISTRAL_3_8B,
    "mistral": MISTRAL_7B,
    "mistral-window": MISTRAL_7B | {"sliding_window": 100},
    "olmo2": OLMO_2_7B,
    "olmo3": OLMO_3_7B,
    "phi4-mini": PHI_4_MINI,
    "qwen2": QWEN2_5_7B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-14b": QWEN3_14B,
    "qwen3-next": QWEN3_NEXT_80B_A3B,
    "qwen3.5": QWEN3_5_9B,
    "qwen3.5-moe": QWEN3_5_35B_A3B,
    "qwen3_moe": QWEN3_30B_A3B,
    "seed-oss": SEED_OSS,
    "smollm3": SMOLLM3_3B,
}
SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": 8192,
    "hidden_act": "silu",
    "attention_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    path: Path = tmp_path_factory.mktemp("family") / request.param
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL | SHAPES[request.param]))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight", "router.proj.weight")):
            # As trained routers do, prefer few experts: with nearly equal ones rounding would change who is eighth.
            weight.data *= 8
        centred = request.param == "gemma3" or ("linear_attention" in SHAPES[request.param].get("layer_types", ()))
        if centred and "norm" in name and "linear_attn" not in name:  # the checkpoint holds w - 1
            weight.data.uniform_(-0.3, 0.3)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("attn", ["fa", "fi", "fa,fi", "auto", "varlen,fused", "torch"])
def test_logits(folder: Path, attn: str, capsys: pytest.CaptureFixture[str]) -> None:
    if attn != "auto" and (attn == "torch") != (folder.name in LATENT):
        pytest.skip("latents are attended to by kernels of their own and in torch, which takes nothing else here")
    if "fi" in attn and folder.name in WINDOWED:
        pytest.skip("FlashInfer would compile kernels with a window")
    if "fi" in attn:
        pytest.importorskip("flashinfer")  # without it the engine would take another backend
    pages = ["--num-pages", "400", "--page-size", "64", "--max-seq-len-override", "4096"]
    code = main([str(folder), "--device", "cuda", "--dtype", "bfloat16", "--attn", attn, *pages, "--json"])
    report = capsys.readouterr().out
    assert code == 0, report
