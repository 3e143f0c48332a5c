"""Configs: the published ones parse; what the layers lack is refused by name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    MoEConfig,
    NormConfig,
    NormNames,
    RopeConfig,
    YarnScaling,
)
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel
from minisgl.models.load_config import FAMILIES, load_model_config, parse_config

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
    "head_dim": 64,
}
LLAMA_3_1 = {
    **{key: value for key, value in LLAMA_3_2_1B.items() if key != "head_dim"},
    "rope_scaling": {**LLAMA_3_2_1B["rope_scaling"], "factor": 8.0},
    "tie_word_embeddings": False,
}
LLAMA_3_1_8B = {
    **LLAMA_3_1,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
}
LLAMA_3_1_70B = {
    **LLAMA_3_1,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_14B = {
    **QWEN3_0_6B,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "tie_word_embeddings": False,
}
MISTRAL_7B_V3: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32768,
}
MISTRAL_7B_V1 = {**MISTRAL_7B_V3, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000}
QWEN2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_30B_A3B = {
    **QWEN3_0_6B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
QWEN3_8B = {
    **QWEN3_14B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
}
QWEN3_32B = {**QWEN3_14B, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64}
OLMO_2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": False,
    "vocab_size": 100352,
}
PHI_3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32064,
}
PUBLISHED = {
    "Llama-2-7B": LLAMA_2_7B,
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "Llama-3.1-8B": LLAMA_3_1_8B,
    "Llama-3.1-70B": LLAMA_3_1_70B,
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-14B": QWEN3_14B,
    "Qwen3-32B": QWEN3_32B,
    "Mistral-7B-v0.1": MISTRAL_7B_V1,
    "Mistral-7B-v0.3": MISTRAL_7B_V3,
    "Qwen2.5-7B": QWEN2_5_7B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "OLMo-2-7B": OLMO_2_7B,
    "Phi-3-mini-4k": PHI_3_MINI_4K,
}


def modern(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config as transformers 5 writes it."""
    raw = dict(raw)
    rope = raw.pop("rope_scaling", None) or {"rope_type": "default"}
    return {
        **raw,
        "rope_parameters": {**rope, "rope_theta": raw.pop("rope_theta", 10000.0)},
        "dtype": raw.pop("torch_dtype"),
    }


def test_llama_3_2() -> None:
    rope = RopeConfig(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    attention = AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=64, rope=rope, scale=0.125)
    assert parse_config(LLAMA_3_2_1B) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        layers=(LayerConfig(attention, MLPConfig(8192)),) * 16,
        norm=NormConfig(1e-5),
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        dtype="bfloat16",
        initializer_range=0.02,
        eos_token_ids=(128001, 128008, 128009),
    )


SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), 256),
    **dict.fromkeys(("num_hidden_layers", "num_experts_per_tok"), 8),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 16),  # no default of a number of KV heads
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 100_000),
}
NOT_IN_ALL: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 16},
    "GptOssForCausalLM": {"num_local_experts": 16},
    "SmolLM3ForCausalLM": {"sliding_window": 64},  # not used unless the file says so
}


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name.endswith("ForCausalLM")])
def test_defaults_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    import transformers

    family = architecture.removesuffix("ForCausalLM")
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    raw = {"architectures": [architecture], **SIZES, **NOT_IN_ALL.get(architecture, {})}

    def written(raw: dict[str, Any]) -> ModelConfig:
        kind.from_dict(dict(raw)).save_pretrained(tmp_path)
        return parse_config({**json.loads((tmp_path / "config.json").read_text()), "eos_token_id": None})

    assert written(raw) == parse_config(raw)
    assert parse_config({**raw, "rope_parameters": None}) == parse_config(raw)
    for size in SIZES:
        less = {key: value for key, value in raw.items() if key != size}
        try:
            ours, theirs = parse_config(less), written(less)
        except UnsupportedModel:
            continue  # the file must have it, or the default does not fit the other sizes
        assert ours == theirs, size


def test_defaults_of_older_files() -> None:
    raw = dict(LLAMA_2_7B)
    del raw["num_key_value_heads"], raw["torch_dtype"], raw["tie_word_embeddings"]
    config = parse_config(raw)
    assert (config.attention.num_kv_heads, config.attention.head_dim) == (32, 128)
    assert config.attention.rope == RopeConfig(10000.0)
    assert config.dtype == "float32"
    assert not config.tie_word_embeddings
    del raw["eos_token_id"]
    assert parse_config(raw).eos_token_ids == ()


@pytest.mark.parametrize("raw", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_in_old_and_new_form(raw: dict[str, Any]) -> None:
    config = parse_config(raw)
    assert parse_config(modern(raw)) == config
    assert parse_config({**raw, "rope_scaling": raw.get("rope_scaling") and _with_old_type(raw)}) == config
    assert config.attention.num_kv_heads == raw["num_key_value_heads"]


def _with_old_type(raw: dict[str, Any]) -> dict[str, Any]:
    rope = dict(raw["rope_scaling"])
    return {**rope, "type": rope.pop("rope_type")}


@pytest.mark.parametrize("raw", [modern(raw) for raw in PUBLISHED.values()], ids=PUBLISHED)
def test_transformers_reads_and_writes_the_same(raw: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    kind = getattr(transformers, raw["architectures"][0].replace("ForCausalLM", "Config"))
    kind.from_dict(raw).save_pretrained(tmp_path)
    assert load_model_config(tmp_path) == parse_config(raw)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
        "BloomForCausalLM is not supported, nor by transformers' modules: its attention is not exchangeable",
    ),
    "no architecture": ({"architectures": None}, "names no architecture"),
    "dynamic rope": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 5.0, "original_max_position_embeddings": 8192}},
        'rope type "dynamic" is not supported beyond the original length: '
        "max_position_embeddings is 40960, original_max_position_embeddings 8192",
    ),
    "longrope": ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, 'rope type "longrope"'),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
    "yarn without factor": ({"rope_parameters": {"rope_type": "yarn"}}, "lacks factor"),
    "yarn without a ramp": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
        "beta_fast (1.0) not below beta_slow (2.0)",
    ),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 'rope type "mrope"'),
    "rope is no object": ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
        "rope parameters by layer type",
    ),
    "llama3 without factor": ({"rope_scaling": {"rope_type": "llama3"}}, "lacks factor"),
    "llama3 without a ramp": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
            }
        },
        "high_freq_factor",
    ),
    "gelu": ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
    "no window": ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window must be"),
    "window that is not used": ({"layer_types": ["sliding_attention"] * 28, "sliding_window": 9}, "no sliding_window"),
    "window that is not set": (
        {"layer_types": ["sliding_attention"] * 28, "sliding_window": None, "use_sliding_window": True},
        "no sliding_window",
    ),
    "too few layer types": ({"layer_types": ["full_attention"] * 27}, "layer_types names 27 layers"),
    "layer types are no list": ({"layer_types": "full_attention"}, "layer_types must be a list"),
    "linear attention": ({"layer_types": ["full_attention", "linear_attention"]}, "layer type linear_attention"),
    "quantized": ({"quantization_config": {"quant_method": "bitsandbytes"}}, 'quant_method "bitsandbytes"'),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "partial rotary inside": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5",
    ),
    "dual chunk attention": (
        {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
        "dual_chunk_attention_config",
    ),
    "softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    "final softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    "multipliers": ({"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
    "experts": ({"num_experts": 128}, "num_experts 128"),
    "experts by their other name": ({"num_local_experts": 8}, "num_local_experts 8"),
    "float8": ({"torch_dtype": "float8_e4m3fn"}, 'dtype "float8_e4m3fn"'),
    "no vocabulary": ({"vocab_size": None}, "lacks vocab_size"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the limit is 1024"),
    "a context of 10^12": (
        {"max_position_embeddings": 10**12},
        "is 1000000000000, but the limit is 16777216",
    ),
    "heads as many as digits": ({"num_key_value_heads": 10**100}, "000..., but the limit is 65536"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
    "bool for a number": ({"hidden_size": True}, "hidden_size must be an integer"),
    "text for a flag": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    "KV heads that do not divide": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    "odd head": ({"head_dim": 63}, "head_dim 63 is odd"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        parse_config({**QWEN3_0_6B, **change})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},  # present but not enabled
        {"use_sliding_window": True, "sliding_window": 4096},  # from layer 28 on, which there is not
        {"use_sliding_window": True, "sliding_window": 40960, "max_window_layers": 0},  # holds everything
        {"partial_rotary_factor": 1.0},
        dict.fromkeys(("use_bias", "attention_out_bias", "use_qk_norm", "qk_layernorm", "alibi"), False),
        dict.fromkeys(("use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"), False),
        dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0),
        {"is_causal": True, "moe_layer_freq": 1, "num_experts": None, "hidden_size_per_layer_input": 0},
        {"quantization_config": None},
        {"layer_types": ["full_attention"] * 28},
        {"layer_types": ["full_attention"] * 28, "use_sliding_window": True, "sliding_window": 9},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},  # plain frequencies up to the trained length
        {"architectures": ["SomethingElse", "Qwen3ForCausalLM"]},
        {"attention_dropout": 0.1, "use_cache": False, "transformers_version": "4.51.0", "auto_map": {}},
    ],
)
def test_fields_without_effect_are_ignored(change: dict[str, Any]) -> None:
    assert parse_config({**QWEN3_0_6B, **change}) == parse_config(QWEN3_0_6B)


def test_olmo_2_norms_outputs_alone() -> None:
    config = parse_config(OLMO_2_7B)
    layer = config.layers[0]
    assert layer.norms == NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
    assert layer.attention.qk_norm == "projection"
    assert config.norm == NormConfig(1e-6, float32=True)


def test_phi_3() -> None:
    config = parse_config(PHI_3_MINI_4K)
    assert config.windows == (2047,) * 32
    assert (config.attention.head_dim, config.attention.rope) == (96, RopeConfig(10000.0))


@pytest.mark.parametrize(
    "change",
    [
        {"partial_rotary_factor": 0.75},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_phi_rotates_a_part_of_each_head(change: dict[str, Any]) -> None:
    rope = parse_config({**PHI_3_MINI_4K, **change}).attention.rope
    assert rope == RopeConfig(10000.0, partial_factor=0.75)
    assert rope.rotary_dim(96) == 72


def test_a_part_of_a_head_that_cannot_be_rotated() -> None:
    for factor, message in (
        (0.0525, "rotates 5 of 96"),
        (2.0, "rotates 192 of 96"),
        (-1, "must be a positive number"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            parse_config({**PHI_3_MINI_4K, "partial_rotary_factor": factor})


def test_a_window_that_llama_asks_for_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window 1024"):
        parse_config({**LLAMA_3_2_1B, "sliding_window": 1024})


def test_windows_of_each_layer() -> None:
    used = {"use_sliding_window": True, "sliding_window": 4096}
    for raw in (QWEN2_5_7B, QWEN3_0_6B):
        assert parse_config({**raw, **used}).windows == (None,) * 28
        assert parse_config({**raw, **used, "max_window_layers": 10}).windows == (None,) * 10 + (4096,) * 18
        types = ["sliding_attention", "full_attention"] * 14
        assert parse_config({**raw, **used, "layer_types": types}).windows == (4096, None) * 14
    assert parse_config(MISTRAL_7B_V1).windows == (4096,) * 32
    assert (
        parse_config({key: value for key, value in MISTRAL_7B_V1.items() if key != "sliding_window"}).windows
        == (4096,) * 32
    )  # transformers' default
    assert parse_config({**QWEN3_30B_A3B, **used}).windows == (4096,) * 48
    types = ["sliding_attention", "full_attention"] * 16
    assert parse_config({**MISTRAL_7B_V1, "layer_types": types}).windows == (4096, None) * 16  # read as Ministral
    of_others = {"max_window_layers": 10, "sliding_window_pattern": 4}
    assert parse_config({**MISTRAL_7B_V1, **of_others}).windows == (4096,) * 32
    for refused in (types, ["full_attention"] * 32):
        with pytest.raises(UnsupportedModel, match="but sliding_window 2047 is for all layers of this architecture"):
            parse_config({**PHI_3_MINI_4K, "layer_types": refused})


def sparse_layers(raw: dict[str, Any]) -> dict[int, MoEConfig]:
    layers = enumerate(parse_config(raw).layers)
    return {index: layer.mlp for index, layer in layers if isinstance(layer.mlp, MoEConfig)}


def test_mixture_layers_are_read() -> None:
    experts = MoEConfig(128, 768, Routing(8, renormalize=True))
    assert sparse_layers(QWEN3_30B_A3B) == dict.fromkeys(range(48), experts)
    changed = sparse_layers({**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2, 5]})
    assert tuple(changed) == (3, *range(7, 48, 2))
    bare = {key: value for key, value in QWEN3_30B_A3B.items() if key not in ("norm_topk_prob", "mlp_only_layers")}
    bare["num_local_experts"] = bare.pop("num_experts")
    assert sparse_layers(bare) == dict.fromkeys(range(48), MoEConfig(128, 768, Routing(8, renormalize=False)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "lacks num_experts"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than num_experts 128"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, not 3"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of layers"),
    ],
)
def test_experts_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**QWEN3_30B_A3B, **change})


def test_rope_scalings() -> None:
    def scaling(**rope: Any) -> Any:
        return parse_config({**QWEN3_0_6B, "rope_scaling": rope}).attention.rope.scaling

    assert scaling(type="linear", factor=2) == LinearScaling(2.0)
    yarn = YarnScaling(4.0, 32.0, 1.0, 0.1 * math.log(4) + 1, True, 32768)
    length = {"original_max_position_embeddings": 32768}
    assert scaling(type="yarn", factor=4.0, **length) == yarn
    assert scaling(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0, **length) == yarn
    assert scaling(rope_type="yarn", factor=4.0).original_max_positions == 40960
    assert scaling(rope_type="yarn", factor=None, **length).factor == 1.25
    assert scaling(rope_type="yarn", factor=0.5, **length).attention_factor == 1.0
    both = scaling(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5, **length)
    assert both.attention_factor == (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert scaling(rope_type="yarn", factor=4.0, attention_factor=1.5, **length).attention_factor == 1.5


def test_yarn_makes_the_context_longer_than_the_file_says() -> None:
    def context(raw: dict[str, Any] = QWEN3_0_6B, **rope: Any) -> int:
        return parse_config({**raw, "rope_scaling": {"rope_type": "yarn", **rope}}).max_position_embeddings

    assert context(factor=4.0, original_max_position_embeddings=32768) == 131072  # the value on Qwen's model cards
    assert context({**QWEN3_0_6B, "original_max_position_embeddings": 32768}, factor=4.0) == 131072
    assert context(factor=1.1, original_max_position_embeddings=32768) == 40960
    assert context(factor=None, original_max_position_embeddings=30000) == 40960
    assert context(factor=4.0) == 40960
    assert context(rope_type="linear", factor=4.0, original_max_position_embeddings=32768) == 40960
    windows = {**MISTRAL_7B_V1, "sliding_window": 40000}  # more than the file says, less than the context
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse_config({**windows, "rope_scaling": yarn}).windows == (40000,) * 32


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_0_6B, "eos_token_id": 151645}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert load_model_config(tmp_path).eos_token_ids == (151645, 151643)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151643, 151936]}))
    assert load_model_config(tmp_path).eos_token_ids == (151645, 151643)  # the model does not have the last
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 151643]}))
    assert load_model_config(tmp_path).eos_token_ids == (151645, 151643)  # -1 is none


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is not a folder"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(UnsupportedModel, match=r"has no config\.json: GGUF is not supported"):
        load_model_config(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UnsupportedModel, match=r"has no config\.json: it is a LoRA adapter"):
        load_model_config(tmp_path)
    for content in ("{", "\xff", "[]", ""):
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(UnsupportedModel, match=r"config\.json (cannot be read as JSON|does not hold)") as error:
            load_model_config(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "want"),
    [
        (8, 8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (8, 1, 2, [[0], [0]]),
        (6, 2, 3, [[0, 0], [0, 1], [1, 1]]),  # neither number divides the other; every rank gets two
        (12, 4, 3, [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]),
        (12, 4, 6, [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]]),
    ],
)
def test_kv_heads_of_each_rank(heads: int, kv_heads: int, tp: int, want: list[list[int]]) -> None:
    config = parse_config({**QWEN3_0_6B, "num_attention_heads": heads, "num_key_value_heads": kv_heads}).attention
    have = [config.kv_heads_of(rank, tp) for rank in range(tp)]
    assert have == want
    share, stored = config.heads_per_rank(tp), config.kv_heads_per_rank(tp)
    for head in range(heads):  # the head that a query finds is the one that the model means
        rank, local = divmod(head, share)
        assert have[rank][local // (share // stored)] == head // (heads // kv_heads)


def test_tensor_parallel_sizes_that_do_not_divide() -> None:
    config = parse_config(QWEN3_0_6B)
    config.check_tp(16)
    with pytest.raises(UnsupportedModel, match=r"over 5 ranks does not divide the model's attention heads \(16\)"):
        config.check_tp(5)
    with pytest.raises(UnsupportedModel, match=r"intermediate size \(3070\)"):
        parse_config({**QWEN3_0_6B, "intermediate_size": 3070}).check_tp(4)
    experts = {**QWEN3_30B_A3B, "intermediate_size": 6145}
    parse_config(experts).check_tp(16)  # no layer has this size
    with pytest.raises(UnsupportedModel, match=r"intermediate size \(6145\)"):
        parse_config({**experts, "mlp_only_layers": [3]}).check_tp(2)
    with pytest.raises(UnsupportedModel, match=r"intermediate size of an expert \(766\)"):
        parse_config({**experts, "moe_intermediate_size": 766}).check_tp(4)
    whole = parse_config({**experts, "moe_intermediate_size": 767, "num_experts": 15}).with_whole_experts()
    whole.check_tp(8)  # one rank has a single expert
    with pytest.raises(UnsupportedModel, match="15 experts do not suffice for 16 ranks that hold them whole"):
        whole.check_tp(16)
    with pytest.raises(UnsupportedModel, match="--enable-expert-parallel: Qwen3ForCausalLM has no experts"):
        config.with_whole_experts()


def test_importing_configs_loads_no_torch() -> None:
    code = (
        "import sys, minisgl.models, minisgl.models.load_config, minisgl.models.hub\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
