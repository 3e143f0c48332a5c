"""Tiny random models made with transformers' own classes."""

from __future__ import annotations

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
FAMILIES = ("llama", "llama-tied", "llama-bias", "qwen3", "qwen3-tied")


def make_model(kind: str, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    tied = {"tie_word_embeddings": kind.endswith("-tied")}
    torch.manual_seed(0)
    if kind.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **tied, **changes}))
    else:
        bias = {"attention_bias": True, "mlp_bias": True} if kind == "llama-bias" else {}
        model = LlamaForCausalLM(
            LlamaConfig(**{**SHAPE, "rope_parameters": dict(LLAMA3_ROPE), **tied, **bias, **changes})
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out or put in the wrong place
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model.eval()
