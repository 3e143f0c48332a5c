"""Gemma 4's configs: heads by layer, in the keys of published files and of transformers', and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import LayerInputConfig, MLPConfig, MoEConfig, ProportionalScaling, RopeConfig
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config, parse_config

TEXT: dict[str, Any] = {  # a dense model
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 12,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
}
EXPERTS: dict[str, Any] = {  # Gemma 4 26B-A4B
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
INPUTS: dict[str, Any] = {  # Gemma 4 E2B, whose last layers share KV
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
}
GEMMA_4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "gemma4",
    "text_config": TEXT,
}


def test_layers_without_a_window_have_other_heads() -> None:
    config = parse_config(GEMMA_4)
    window, full = config.layers[0].attention, config.layers[5].attention
    assert (window.head_dim, window.num_kv_heads, window.window, window.k_is_v) == (256, 16, 1024, False)
    assert (full.head_dim, full.num_kv_heads, full.window, full.k_is_v) == (512, 4, None, True)
    assert window.rope == RopeConfig(10000.0)
    assert full.rope == RopeConfig(1000000.0, ProportionalScaling(0.25, 1.0))
    assert (config.logits_softcap, config.attention.scale) == (30.0, 1.0)
    assert config.checkpoint.ours("model.embed_vision.weight") is None


def test_experts_stand_beside_the_mlp() -> None:
    config = parse_config({**GEMMA_4, "text_config": TEXT | EXPERTS})
    assert {layer.mlp for layer in config.layers} == {MLPConfig(21504, activation="gelu_tanh")}
    assert {layer.experts for layer in config.layers} == {
        MoEConfig(128, 704, Routing(8, renormalize=True), activation="gelu_tanh")
    }
    assert config.experts_per_token == 8
    config.check_tp(2)
    with pytest.raises(UnsupportedModel, match=r"intermediate size of an expert \(704\)"):
        parse_config({**GEMMA_4, "text_config": TEXT | EXPERTS | {"num_attention_heads": 96}}).check_tp(3)


def test_the_last_layers_share_kv_of_earlier_ones() -> None:
    config = parse_config({**GEMMA_4, "text_config": TEXT | INPUTS})
    assert config.layer_inputs == LayerInputConfig(256, 262144)
    assert [attention.kv_of for attention in config.attentions] == [None] * 6 + [4] * 5 + [5]
    sizes = [layer.mlp.intermediate_size for layer in config.layers]
    assert sizes == [21504] * 6 + [43008] * 6
    names = "model.language_model.layers.6.self_attn.k_norm.weight", "model.layers.5.self_attn.k_norm.weight"
    assert [config.checkpoint.ours(name) for name in names] == [None, names[1]]


def test_each_layer_has_inputs_by_default() -> None:
    text = {key: value for key, value in TEXT.items() if key != "hidden_size_per_layer_input"}
    assert parse_config({**GEMMA_4, "text_config": text}).layer_inputs == LayerInputConfig(256, 262144)


def test_transformers_writes_heads_by_layer(tmp_path: Path) -> None:
    import transformers

    transformers.Gemma4TextConfig.from_dict(TEXT).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in raw
    assert "global_head_dim" not in raw
    raw |= {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model_config(tmp_path).layers == parse_config(GEMMA_4).layers
    raw["per_layer_config"]["05"]["head_dim"] = 128
    with pytest.raises(UnsupportedModel, match="per_layer_config"):
        parse_config(raw)


@pytest.mark.parametrize(
    "same",
    [{"global_head_dim": 256}, {"num_global_key_value_heads": 16}, {"global_head_dim": 256, "attention_k_eq_v": False}],
)
def test_transformers_leaves_out_sizes_that_all_layers_share(same: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    text = TEXT | same
    transformers.Gemma4TextConfig.from_dict(text).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    assert parse_config(raw).layers == parse_config({**GEMMA_4, "text_config": text}).layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers 7 leaves no layer of each type"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers 12 leaves no layer of each type"),
        (INPUTS | {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input 9 is less than vocab_size 262144"),
        ({"enable_moe_block": True}, "config.json lacks num_experts"),
        ({**EXPERTS, "top_k_experts": 129}, "top_k_experts 129 is more than num_experts 128"),
        ({"num_experts": 128}, "num_experts 128 is not supported"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention "all" is not supported'),
        ({"hidden_activation": "silu"}, 'hidden_activation "silu" is not supported'),
        ({"num_global_key_value_heads": 5}, "is not a multiple of num_global_key_value_heads 5"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    text = {key: value for key, value in {**TEXT, **change}.items() if value is not None}
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**GEMMA_4, "text_config": text})
