"""Configs of the DeepSeek families as published, their FP8 checkpoints, and what is left out or refused of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import SingleRank
from minisgl.kernel.base import Routing
from minisgl.kernel.torch_ops import route
from minisgl.layers.layer_config import LatentConfig, MLPConfig, MoEConfig
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config, parse_config
from minisgl.models.weights.loading import load_model
from models.quantized import save_quantized
from models.test_model_tp import Rank
from models.test_model_weights import assert_same, load

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V3: dict[str, Any] = {  # R1's configuration is equal
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **LATENT,
    "attention_bias": False,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"factor": 32, "beta_fast": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = DEEPSEEK_V3 | {
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "quantization_config": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "q_lora_rank": None,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
GLM_4_7_FLASH = MOONLIGHT | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "vocab_size": 154880,
}
V3_ROUTING = Routing(8, renormalize=True, score="sigmoid", groups=8, top_groups=4, scale=2.5)
V2_ROUTING = Routing(6, renormalize=False, groups=8, top_groups=3, group_scores=1, scale=16.0)
# raw config, its class in transformers, latent attention, factor of the scores, dense layers and all, routing
PUBLISHED: dict[str, tuple[dict[str, Any], str, LatentConfig, float, int, int, Routing]] = {
    "v3": (DEEPSEEK_V3, "DeepseekV3", LatentConfig(512, 128, 64, 128, 1536), 0.1 * math.log(40) + 1, 3, 61, V3_ROUTING),
    "kimi-k2": (
        KIMI_K2,
        "DeepseekV3",
        LatentConfig(512, 128, 64, 128, 1536),
        0.1 * math.log(32) + 1,
        1,
        61,
        Routing(8, renormalize=True, score="sigmoid", scale=2.827),
    ),
    "moonlight": (
        MOONLIGHT,
        "DeepseekV3",
        LatentConfig(512, 128, 64, 128, None),
        1.0,
        1,
        27,
        Routing(6, renormalize=True, score="sigmoid", scale=2.446),
    ),
    "v2": (
        DEEPSEEK_V2,
        "DeepseekV2",
        LatentConfig(512, 128, 64, 128, 1536),
        0.0707 * math.log(40) + 1,
        1,
        60,
        V2_ROUTING,
    ),
    "v2-lite": (
        DEEPSEEK_V2_LITE,
        "DeepseekV2",
        LatentConfig(512, 128, 64, 128, None),
        0.0707 * math.log(40) + 1,
        1,
        27,
        Routing(6, renormalize=False, group_scores=1),
    ),
    "glm-4.7-flash": (
        GLM_4_7_FLASH,
        "Glm4MoeLite",
        LatentConfig(512, 192, 64, 256, 768),
        1.0,
        1,
        47,
        Routing(4, renormalize=True, score="sigmoid", scale=1.8),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(tmp_path: Path, name: str) -> None:
    import transformers

    raw, family, latent, temperature, dense, num_layers, routing = PUBLISHED[name]
    config = parse_config(raw)
    attention = config.attention
    assert (attention.latent, attention.num_kv_heads, attention.head_dim) == (latent, 1, 576)
    assert attention.scale == pytest.approx((latent.nope_dim + 64) ** -0.5 * temperature**2)
    assert attention.rope.interleaved
    size = raw["moe_intermediate_size"]
    experts = MoEConfig(
        raw["n_routed_experts"],
        size,
        routing,
        shared_intermediate_size=size * raw["n_shared_experts"],
        choice_bias=routing.score == "sigmoid",
        float32_router=True,
    )
    layers = [MLPConfig(raw["intermediate_size"])] * dense + [experts] * (num_layers - dense)
    assert [layer.mlp for layer in config.layers] == layers
    assert (config.checkpoint.ours(f"model.layers.{num_layers}.eh_proj.weight") is None) == bool(
        raw["num_nextn_predict_layers"]
    )
    getattr(transformers, f"{family}Config").from_dict(raw).save_pretrained(tmp_path)
    assert load_model_config(tmp_path) == config


def test_unsupported_fields_are_refused_by_name() -> None:
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias true"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads 8 must be num_attention_heads 128"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, 'scoring_func "softmax"'),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, 'topk_method "greedy"'),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group 7 does not divide n_routed_experts 256"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk 2048"),
        (DEEPSEEK_V3, {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, 'topk_method "noaux_tc"'),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob true"),
        (DEEPSEEK_V2, {"mlp_bias": True}, "mlp_bias true"),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["dense", "linear"] * 23 + ["sparse"]}, "mlp_layer_types must hold"),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["sparse"] * 46}, "mlp_layer_types must hold"),  # of 47 layers
        (GLM_4_7_FLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ]
    for raw, change, message in refused:
        with pytest.raises(UnsupportedModel, match=message):
            parse_config({**raw, **change})


def test_yarn_scales_scores_only_by_mscale_all_dim() -> None:
    rope = {key: value for key, value in DEEPSEEK_V3["rope_scaling"].items() if key != "mscale_all_dim"}
    assert parse_config({**DEEPSEEK_V3, "rope_scaling": rope}).attention.scale == pytest.approx(192**-0.5)


def test_greedy_routing_passes_groups_over_and_groups_are_judged_by_their_best() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.8, 2.7, 1.0, 0.9]])  # in groups of two
    _, limited = route(logits, Routing(2, renormalize=False, groups=3, top_groups=1, group_scores=1))
    _, by_sum = route(logits, Routing(2, renormalize=False, groups=3, top_groups=1))
    assert (sorted(limited[0].tolist()), sorted(by_sum[0].tolist())) == ([0, 1], [2, 3])
    assert parse_config(DEEPSEEK_V2_LITE | {"n_group": 8, "topk_group": 3}).layers[1].mlp == (
        parse_config(DEEPSEEK_V2_LITE).layers[1].mlp
    )


def test_fp8_blocks_are_dequantized_by_head(tmp_path: Path) -> None:
    sizes = {"qk_nope_head_dim": 20, "qk_rope_head_dim": 24, "kv_lora_rank": 88, "num_hidden_layers": 2}
    quantized, plain = save_quantized(tmp_path, "deepseek-v3", "fp8 blocks", num_key_value_heads=8, **sizes)
    assert "kv_a_proj_with_mqa.weight_scale_inv" in " ".join(load_file(quantized / "model.safetensors"))
    for tp in (SingleRank(), Rank(3, 4)):
        assert_same(load(quantized, tp=tp), load(plain, tp=tp))


def test_layers_for_multi_token_prediction_are_left_out(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, folder = saved("deepseek-v3")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        model = load_model(
            load_model_config(tmp_path), tmp_path, tp=SingleRank(), dtype=torch.float32, device=torch.device("cpu")
        )
    assert len(model.model.layers) == 3
    assert "left out: model.layers.3" in caplog.text
