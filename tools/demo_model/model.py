"""A compact Qwen3 for training on packed rows, and its exchange with Hugging Face folders.

Parameters carry the names and shapes of Qwen3 checkpoints, so that saving is copying. Attention stays
within a document: a row holds many, one after another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demo_model.batches import LONGEST_DOCUMENT
from demo_model.case import END_OF_TEXT, IM_END
from demo_model.render import TOKEN_IDS, VOCAB_SIZE

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": TOKEN_IDS[IM_END],
    "pad_token_id": TOKEN_IDS[END_OF_TEXT],
    "torch_dtype": "bfloat16",
}

GENERATION_CONFIG: dict[str, Any] = {
    "do_sample": False,
    "eos_token_id": [TOKEN_IDS[IM_END], TOKEN_IDS[END_OF_TEXT]],
    "pad_token_id": TOKEN_IDS[END_OF_TEXT],
}


_IGNORED = -100


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config["rms_norm_eps"])
        self.k_norm = RMSNorm(self.head_dim, config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, mask: Tensor | None) -> Tensor:
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))), cos, sin)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out: Tensor = self.o_proj(attend_within_documents(q, k, v, starts, mask).flatten(-2))
        return out


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, starts, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class Model(nn.Module):
    """The whole model; `model` is its only child, as in a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        deep = (2 * config["num_hidden_layers"]) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=std * deep if into_stream else std)

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """The logits [row, vocabulary] of a packed row; positions count from 0 in each document."""
        index = torch.arange(len(tokens), device=tokens.device, dtype=starts.dtype)
        document = torch.searchsorted(starts, index, right=True)
        cos, sin = rotations(index - starts[document - 1], self.config["head_dim"], self.config["rope_theta"])
        mask = None
        if not tokens.is_cuda:
            mask = (document[:, None] == document[None, :]) & (index[:, None] >= index[None, :])
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, starts, mask)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, learned: Tensor, starts: Tensor) -> Tensor:
        """The mean cross entropy over the learned tokens, each predicted from those before it."""
        logits = self(tokens, starts)
        targets = torch.where(learned, tokens, _IGNORED).roll(-1).long()
        return F.cross_entropy(logits.float(), targets, ignore_index=_IGNORED)

    def save(self, folder: Path) -> None:
        """Writes config.json, generation_config.json and model.safetensors in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
        weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in self.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path) -> Model:
        """The model of a folder, in float32."""
        model = cls(json.loads((folder / "config.json").read_text()))
        model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
        return model


def rotations(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [row, 1, head_dim] of the rotary position embedding."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[:, None, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def attend_within_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention [row, heads, head_dim]: by the packed kernel on CUDA, by the mask elsewhere."""
    if mask is None:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, starts, starts, LONGEST_DOCUMENT, LONGEST_DOCUMENT, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
