"""Published configs of the families in the table of Llama, and the decoder that each of them gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import SingleRank
from minisgl.layers.layer_config import (
    NO_ROPE,
    Llama3Scaling,
    LongropeScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
)
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel
from minisgl.models.load_config import load_model_config, parse_config
from minisgl.models.weights.loading import load_model
from models.harness import Harness

LLLG = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GRANITE_3_3_8B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49159,
}
OLMO_3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": LLLG * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 100278,
}
PHI_4: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
GLM_4_9B: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "attention_bias": False,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
SEED_OSS_36B: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 155136,
}
EXAONE_4_32B: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": LLLG * 16,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}
MINISTRAL_3_8B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "type": "yarn",
        },
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
}
PUBLISHED = {
    "SmolLM3-3B": SMOLLM3_3B,
    "granite-3.3-8b": GRANITE_3_3_8B,
    "Olmo-3-7B": OLMO_3_7B,
    "phi-4": PHI_4,
    "GLM-4-9B-0414": GLM_4_9B,
    "Seed-OSS-36B": SEED_OSS_36B,
    "EXAONE-4.0-32B": EXAONE_4_32B,
}


@pytest.mark.parametrize("raw", PUBLISHED.values(), ids=PUBLISHED)
def test_transformers_reads_and_writes_the_same(raw: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    kind = getattr(transformers, raw["architectures"][0].replace("ForCausalLM", "Config"))
    kind.from_dict(raw).save_pretrained(tmp_path)
    config, again = parse_config(raw), load_model_config(tmp_path)
    assert config.eos_token_ids == tuple(raw.get("eos_token_id", ()))  # transformers adds its own
    assert {**vars_of(again), "eos_token_ids": ()} == {**vars_of(config), "eos_token_ids": ()}


def vars_of(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def ropes(config: ModelConfig) -> list[RopeConfig]:
    return [layer.attention.rope for layer in config.layers]


def test_every_fourth_layer_of_smollm3_has_no_rope() -> None:
    config = parse_config(SMOLLM3_3B)
    assert ropes(config) == [RopeConfig(5000000.0)] * 3 + [NO_ROPE] + ropes(config)[4:]
    assert ropes(config)[3::4] == [NO_ROPE] * 9
    assert config.tie_word_embeddings
    assert parse_config({**SMOLLM3_3B, "no_rope_layers": None}) == config


def test_granite_scales_four_things() -> None:
    config = parse_config(GRANITE_3_3_8B)
    assert (config.embedding_scale, config.logits_scale, config.attention.scale) == (12.0, 1 / 16, 1 / 128)
    assert {layer.residual_scale for layer in config.layers} == {0.22}


def test_olmo_3_scales_the_rope_of_layers_without_a_window() -> None:
    config = parse_config(OLMO_3_7B)
    yarn = YarnScaling(8.0, 32.0, 1.0, 1.2079441541679836, True, 8192)
    assert ropes(config)[:4] == [RopeConfig(500000.0)] * 3 + [RopeConfig(500000.0, yarn)]
    assert config.windows[:4] == (4096, 4096, 4096, None)
    assert config.max_position_embeddings == 65536
    assert parse_config({**OLMO_3_7B, "layer_types": None}) == config


def test_exaone_4_has_no_rope_without_a_window() -> None:
    config = parse_config(EXAONE_4_32B)
    assert ropes(config)[:4] == [RopeConfig(1000000.0, Llama3Scaling(16.0, 1.0, 4.0, 8192))] * 3 + [NO_ROPE]
    assert NO_ROPE not in ropes(parse_config({**EXAONE_4_32B, "sliding_window": None, "layer_types": None}))
    short = parse_config({**EXAONE_4_32B, "max_position_embeddings": 4096})  # no window is shorter: they still differ
    assert (short.windows[0], ropes(short)[3]) == (None, NO_ROPE)


def test_glm_4_rotates_half_of_each_head_by_neighbours() -> None:
    attention = parse_config(GLM_4_9B).attention
    assert attention.rope == RopeConfig(10000.0, partial_factor=0.5, interleaved=True)
    assert not attention.qkv_bias
    assert parse_config({**GLM_4_9B, "attention_bias": None}).attention.qkv_bias is False
    assert parse_config({key: GLM_4_9B[key] for key in GLM_4_9B if key != "attention_bias"}).attention.qkv_bias


def test_ministral_3_scales_queries_beyond_the_original_context() -> None:
    config = parse_config(MINISTRAL_3_8B)
    assert config.attention.rope.query_scaling == QueryScaling(0.1, 16384)
    assert config.max_position_embeddings == 262144
    text = {key: value for key, value in MINISTRAL_3_8B["text_config"].items() if key != "rope_parameters"}
    assert parse_config({**MINISTRAL_3_8B, "text_config": text}) == config
    rope = {**MINISTRAL_3_8B["text_config"]["rope_parameters"]}
    outside = {
        **text,
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.pop("original_max_position_embeddings"),
    }
    assert parse_config({**MINISTRAL_3_8B, "text_config": outside}) == config
    plain = {**MINISTRAL_3_8B["text_config"], "model_type": "mistral"}
    with pytest.raises(UnsupportedModel, match=r"llama_4_scaling_beta 0\.1 is not supported"):
        parse_config({**MINISTRAL_3_8B, "text_config": plain})


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_served_up_to_the_original_length(kind: str) -> None:
    """Longer sequences have other factors at all positions, also at those whose keys are in the cache."""
    rope = {"type": kind, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    lengths = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
    config = parse_config({**PHI_4, **lengths, "partial_rotary_factor": 0.75, "rope_scaling": rope})
    assert config.max_position_embeddings == 4096
    assert config.layers[0].attention.rope.scaling == LongropeScaling(
        (1.0,) * 48, pytest.approx((17 / 12) ** 0.5), 4096
    )


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (SMOLLM3_3B, {"no_rope_layers": [1, 0]}, "no_rope_layers must hold 0 or 1 for each layer"),
        (SMOLLM3_3B, {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}, "sliding_window 9"),
        (GRANITE_3_3_8B, {"residual_multiplier": 0}, "residual_multiplier must be a positive number"),
        (OLMO_3_7B, {"rope_scaling": {"sliding_attention": 3}}, "an object for each layer type"),
        (PHI_4, {"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of positive numbers"),
        (
            PHI_4,
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor must hold 64 numbers, not 1",
        ),
        (EXAONE_4_32B, {"layer_types": None}, 'sliding_window_pattern must be an integer of at least 1, not "LLLG"'),
        (SEED_OSS_36B, {"attention_out_bias": "yes"}, "attention_out_bias must be true or false"),
        (MINISTRAL_3_8B, {"text_config": {"model_type": "llama"}}, 'text_config has model_type "llama"; known are'),
        (MINISTRAL_3_8B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_refused_by_name(raw: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**raw, **change})


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
@pytest.mark.parametrize("inner", [True, False])
def test_a_multimodal_config_that_both_ties_the_head_and_does_not(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path, kind: str, inner: bool
) -> None:
    """transformers 5 adds the default of the object that said nothing; the checkpoint knows."""
    _, folder = saved(kind)
    text = json.loads((folder / "config.json").read_text())
    text |= {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": inner}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": not inner}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = load_model_config(tmp_path)
    model = load_model(config, tmp_path, tp=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))
    assert model.config.tie_word_embeddings == (kind == "llama-tied")


def test_the_text_of_a_mistral_3_with_a_vision_tower(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, folder = saved("ministral3")
    raw = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": raw, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tower = {"vision_tower.patch_conv.weight": torch.ones(3), "multi_modal_projector.norm.weight": torch.ones(3)}
    save_file({**tensors, **tower}, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        model = load_model(
            load_model_config(tmp_path), tmp_path, tp=SingleRank(), dtype=torch.float32, device=torch.device("cpu")
        )
    assert "2 tensors that plain text does not need are left out: multi_modal_projector, vision_tower" in caplog.text
    tokens = list(range(60, 160))
    harness = Harness(model)
    logits = harness.step([(harness.add(tokens), 100)], every_token=True)
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    assert (logits - want).abs().max() < 1e-4 * want.abs().max()
