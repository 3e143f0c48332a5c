"""Folders of well-known model shapes, for engines that fill in random weights: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 256, 257
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
_QWEN3 = {"head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_QWEN3_5 = {
    "full_attention_interval": 4,  # the other layers are recurrent
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"},
}
_GEMMA_4 = {
    "attention_k_eq_v": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
}
_FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": ["lm_head"],
    "version": "gemm",
    "zero_point": True,
}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `more`: further fields of its configuration.

    `vision`: the model is published with a vision tower, so its sizes stand under `text_config`. Of the tower, which
    Minisgl leaves out, a block is enough for engines that make one.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool  # embedding and output head are one
    vocab: int = 151936
    architecture: str = "Qwen3ForCausalLM"
    model_type: str = "qwen3"
    more: Mapping[str, Any] = field(default_factory=lambda: _QWEN3)
    vision: bool = False


def _layers_by_type(times: int, windowed: int) -> list[str]:
    """Return the types of layers of which so many with a window stand before each without."""
    return [*["sliding_attention"] * windowed, "full_attention"] * times


def _gemma_4(
    hidden: int, heads: int, kv_heads: int, intermediate: int, *, layer_types: list[str], **more: Any
) -> Shape:
    return Shape(
        hidden,
        len(layer_types),
        heads,
        kv_heads,
        intermediate,
        tied=True,
        vocab=262144,
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        more={**_GEMMA_4, "layer_types": layer_types, **more},
    )


SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 3072, tied=True),
    "1.7b": Shape(2048, 28, 16, 8, 6144, tied=True),
    "8b": Shape(4096, 36, 32, 8, 12288, tied=False),
    "14b": Shape(5120, 40, 40, 8, 17408, tied=False),
    "32b": Shape(5120, 64, 64, 8, 25600, tied=False),
    "30b-a3b": Shape(
        2048,
        48,
        32,
        4,
        6144,
        tied=False,
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        more={
            **_QWEN3,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3.5-9b": Shape(
        4096,
        32,
        16,
        4,
        12288,
        tied=False,
        vocab=248320,
        architecture="Qwen3_5ForConditionalGeneration",
        model_type="qwen3_5",
        more=_QWEN3_5,
        vision=True,
    ),
    "qwen3.5-35b-a3b": Shape(
        2048,
        40,
        16,
        2,
        0,
        tied=False,
        vocab=248320,
        architecture="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        vision=True,
        more={
            **_QWEN3_5,
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "llama-8b": Shape(
        4096,
        32,
        32,
        8,
        14336,
        tied=False,
        vocab=128256,
        architecture="LlamaForCausalLM",
        model_type="llama",
        more={"max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    ),
    "gemma-3-12b": Shape(
        3840,
        48,
        16,
        8,
        15360,
        tied=True,
        vocab=262208,
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        more={
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,  # every sixth layer sees everything
        },
    ),
    "gpt-oss-20b": Shape(
        2880,
        24,
        64,
        8,
        2880,
        tied=False,
        vocab=201088,
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        more={
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "num_local_experts": 32,
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
        },
    ),
    "deepseek-v2-lite": Shape(
        2048,
        27,
        16,
        16,
        10944,
        tied=False,
        vocab=102400,
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        more={
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_group": 1,
            "topk_method": "greedy",
            "v_head_dim": 128,
        },
    ),
    "gemma-4-26b-a4b": _gemma_4(
        2816,
        16,
        8,
        2112,
        layer_types=_layers_by_type(5, 5),
        attention_k_eq_v=True,
        enable_moe_block=True,
        hidden_size_per_layer_input=0,
        moe_intermediate_size=704,
        num_experts=128,
        num_global_key_value_heads=2,
        sliding_window=1024,
        top_k_experts=8,
    ),
    "gemma-4-e2b": _gemma_4(
        1536, 8, 1, 6144, layer_types=_layers_by_type(7, 4), num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "gemma-4-e4b": _gemma_4(2560, 8, 2, 10240, layer_types=_layers_by_type(7, 5), num_kv_shared_layers=18),
    "smollm2-135m": Shape(
        576,
        30,
        9,
        3,
        1536,
        tied=True,
        vocab=49152,
        architecture="LlamaForCausalLM",
        model_type="llama",
        more={"max_position_embeddings": 8192, "rope_theta": 100000.0},
    ),
}


def _quantized(name: str, config: Mapping[str, Any]) -> Shape:
    """Return a shape as it is published with quantized weights; a Qwen3's routers keep theirs."""
    shape = SHAPES[name]
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(shape.layers)] if "num_experts" in shape.more else []
    kept = [*config["modules_to_not_convert"], *routers]
    return replace(shape, more={**shape.more, "quantization_config": {**config, "modules_to_not_convert": kept}})


SHAPES |= {
    **{f"{name}-fp8": _quantized(name, _FP8_BLOCKS) for name in ("8b", "14b", "32b", "30b-a3b")},
    **{f"{name}-awq": _quantized(name, _AWQ) for name in ("8b", "14b", "32b")},
    "gpt-oss-20b-mxfp4": _quantized("gpt-oss-20b", _MXFP4),
}


def make_shape(name: str, folder: Path) -> Path:
    """Write a folder for a shape: a configuration and a tokenizer of one token a byte. No weights."""
    shape = SHAPES[name]
    is_qwen3 = shape.model_type in ("qwen3", "qwen3_moe")
    path = folder / (f"qwen3-{name}" if is_qwen3 else name)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
        **shape.more,
    }
    if is_qwen3:
        config |= {"max_window_layers": shape.layers, "sliding_window": None, "use_sliding_window": False}
    if shape.vision:
        tower = {"depth": 1, "deepstack_visual_indexes": [], "out_hidden_size": shape.hidden}
        config = {
            "architectures": [shape.architecture],
            "model_type": shape.model_type,
            "text_config": {**config, "model_type": f"{shape.model_type}_text"},
            "tie_word_embeddings": shape.tied,
            "vision_config": {**tower, "model_type": shape.model_type},
        }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    _byte_tokenizer(shape.vocab).save(str(path / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": shape.more["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


def _byte_tokenizer(vocab: int) -> Tokenizer:
    """Make a tokenizer of one token a byte; every other id decodes to some text, so that each shows in a stream."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>"]
    names += [f"<{index}>" for index in range(len(names), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return tokenizer


def read_vocab_size(folder: Path) -> int:
    """Return the vocabulary's size of any model folder."""
    config = json.loads((folder / "config.json").read_text())
    size: int = config.get("vocab_size") or config["text_config"]["vocab_size"]
    return size


def read_context(folder: Path) -> int:
    """Return the context in tokens that a model folder claims."""
    config = json.loads((folder / "config.json").read_text())
    size: int = config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"]
    return size
