"""gpt-oss's configs: as published but for the experts' format, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.distributed import SingleRank
from minisgl.kernel.base import ClampedSwiGLU, Routing
from minisgl.layers.layer_config import MoEConfig, NormConfig, RopeConfig, YarnScaling
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config, parse_config
from minisgl.models.weights.loading import load_model
from models.harness import Harness
from models.quantized import save_mxfp4
from models.tiny import make_model

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}


def test_a_published_config(tmp_path: Path) -> None:
    import transformers

    config = parse_config(GPT_OSS_20B)
    assert config.windows == (128, None) * 12
    rope = RopeConfig(150000.0, YarnScaling(32.0, 32.0, 1.0, pytest.approx(1.3465735902799727), False, 4096))
    assert config.attention.rope == rope
    assert config.attention.has_sinks
    assert config.attention.out_bias
    assert config.max_position_embeddings == 131072
    assert config.norm == NormConfig(1e-5, float32=True)
    assert config.layers[0].mlp == MoEConfig(
        32,
        2880,
        Routing(4, renormalize=True),
        activation=ClampedSwiGLU(1.702, 7.0),
        router_name="router",
        router_bias=True,
        expert_bias=True,
        interleaved=True,
    )
    assert parse_config({**GPT_OSS_20B, "layer_types": None, "rope_scaling": None}) == config
    transformers.GptOssConfig.from_dict(GPT_OSS_20B).save_pretrained(tmp_path)
    assert load_model_config(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 33}, "num_experts_per_tok 33 is more than num_local_experts 32"),
        ({"swiglu_limit": None, "swiglu_alpha": -1}, "swiglu_alpha must be a positive number"),
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**GPT_OSS_20B, **change})


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Blocks and scales, and everything else in the file's dtype: gpt-oss-20b is published so."""
    theirs = make_model("gpt-oss", hidden_size=64, intermediate_size=32)
    theirs.load_state_dict(save_mxfp4(tmp_path, hidden_size=64, intermediate_size=32), strict=False)
    options: dict[str, Any] = {"tp": SingleRank(), "dtype": torch.float32, "device": torch.device("cpu")}
    harness = Harness(load_model(load_model_config(tmp_path), tmp_path, **options))
    tokens = list(range(40, 90))
    logits = harness.step([(harness.add(tokens), 50)], every_token=True)
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    assert (logits - want).abs().max() < 1e-4 * want.abs().max()
