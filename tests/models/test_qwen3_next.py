"""Configs of Qwen3-Next and Qwen3.5 as published, what is refused, and the weights that text does not need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.attention.base import RecurrentSpec
from minisgl.distributed import SingleRank
from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import AttentionConfig, DeltaNetConfig, MLPConfig, MoEConfig, RopeConfig
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config, parse_config
from minisgl.models.weights.loading import load_model

QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
}


def test_three_of_four_layers_are_recurrent() -> None:
    for raw in (QWEN3_NEXT_80B, QWEN3_5):
        config = parse_config(raw)
        grouped = raw is QWEN3_NEXT_80B  # a head's q, k, v and z are adjacent rows
        mixers = [layer.attention for layer in config.layers]
        assert mixers[0] == mixers[1] == mixers[2] == DeltaNetConfig(16, 32, 128, 128, 4, grouped)
        attention = mixers[3]
        assert isinstance(attention, AttentionConfig)
        assert (attention.num_heads, attention.head_dim, attention.qk_norm) == (16, 256, "head")
        assert attention.output_gate
        assert attention.rope == RopeConfig(10000000.0, partial_factor=0.25)
        assert mixers == mixers[:4] * (len(mixers) // 4)
        assert config.norm.unit_offset
        assert config.is_hybrid
    assert {layer.mlp for layer in parse_config(QWEN3_5).layers} == {MLPConfig(12288)}
    experts = MoEConfig(512, 512, Routing(10, renormalize=True), shared_intermediate_size=512, shared_gate=True)
    assert {layer.mlp for layer in parse_config(QWEN3_NEXT_80B).layers} == {experts}


def test_a_state_of_qwen3_next_is_some_75_mb_and_divides_by_rank() -> None:
    layers = [layer.attention for layer in parse_config(QWEN3_NEXT_80B).layers]
    for size in (1, 2, 4):
        specs = [
            RecurrentSpec.of(layer, tp_size=size, dtype=torch.bfloat16)
            for layer in layers
            if isinstance(layer, DeltaNetConfig)
        ]
        total = sum(store.entry_bytes for spec in specs for store in spec.stores)
        assert total == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) // size
    with pytest.raises(UnsupportedModel, match=r"over 32 ranks does not divide .*key heads of linear attention \(16\)"):
        parse_config(QWEN3_NEXT_80B).check_tp(32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
        ({"layer_types": ["linear_attention"] * 32}, "without any full_attention layer"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types must name 32 layers"),
        ({"layer_types": ["mamba"] * 32}, "layer_types must name 32 layers linear_attention or full_attention"),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of at least 2"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**QWEN3_5, "text_config": {**TEXT, **change}})


def test_towers_and_layers_for_multi_token_prediction_are_left_out(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    _, folder = saved("qwen3.5")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    more = {"mtp.fc.weight": torch.ones(3), "model.visual.blocks.0.attn.qkv.weight": torch.ones(3)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"tp": SingleRank(), "dtype": torch.float32, "device": torch.device("cpu")}
    assert len(load_model(load_model_config(tmp_path), tmp_path, **options).model.layers) == 4
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    assert load_model_config(tmp_path).pooling is None, "a checkpoint with a vision tower generates"
    names = parse_config(QWEN3_5).checkpoint
    assert names.ours("model.language_model.layers.0.linear_attn.A_log") == "model.layers.0.linear_attn.A_log"
    assert names.ours("model.visual.patch_embed.proj.weight") is None
    assert names.ours("mtp.norm.weight") is None
