"""GLM-4.5's configs, as published, and the layers of its checkpoints that are left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import SingleRank
from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import MLPConfig, MoEConfig, RopeConfig
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config, parse_config
from minisgl.models.weights.loading import load_model

GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def test_a_published_config(tmp_path: Path) -> None:
    import transformers

    config = parse_config(GLM_4_5_AIR)
    attention = config.layers[1].attention
    assert (attention.rope, attention.qk_norm) == (RopeConfig(1000000.0, partial_factor=0.5), "none")
    assert (attention.qkv_bias, attention.out_bias) == (True, False)
    routing = Routing(8, renormalize=True, score="sigmoid")
    experts = MoEConfig(128, 1408, routing, shared_intermediate_size=1408, choice_bias=True, float32_router=True)
    assert [layer.mlp for layer in config.layers] == [MLPConfig(10944)] + [experts] * 45
    assert [layer.mlp for layer in parse_config({**GLM_4_5_AIR, "first_k_dense_replace": 0}).layers] == [experts] * 46
    assert config.checkpoint.ours("model.layers.46.embed_tokens.weight") is None
    transformers.Glm4MoeConfig.from_dict(GLM_4_5_AIR).save_pretrained(tmp_path)
    assert load_model_config(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, "n_group 3 does not divide n_routed_experts 128"),
        ({"n_group": 8, "topk_group": 9}, "topk_group 9 is more than n_group 8"),
        ({"n_group": 32, "topk_group": 1}, "num_experts_per_tok 8 is more than the 4 that compete"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**GLM_4_5_AIR, **change})


def test_shared_experts_must_divide_too() -> None:
    config = parse_config(GLM_4_5_AIR)
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, shared_intermediate_size=1407))
        for layer in config.layers
        if isinstance(layer.mlp, MoEConfig)
    )
    with pytest.raises(UnsupportedModel, match=r"intermediate size of the shared experts \(1407\)"):
        replace(config, layers=layers).check_tp(2)


def test_layers_for_multi_token_prediction_are_left_out(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    _, folder = saved("glm4-moe")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"tp": SingleRank(), "dtype": torch.float32, "device": torch.device("cpu")}
    model = load_model(load_model_config(tmp_path), tmp_path, **options)
    assert len(model.model.layers) == 3
