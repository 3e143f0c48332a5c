"""Tiny models that pool, as they lie in folders, and transformers' answers to the same ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from support.tiny_tokenizer import save_byte_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "dtype": "float32",
    "pad_token_id": 0,
}
_STEPS = "sentence_transformers.models"
WORDS = "the of and to in is that it was for on are with as his they be at one have this from again over".split()


def save(folder: Path, head: str, **changes: Any) -> Path:
    """A Qwen3 with this head of transformers (`Model`, `ForCausalLM` ...), and a tokenizer that ends texts itself."""
    import transformers

    folder.mkdir()
    save_byte_tokenizer(folder, 256)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["no", "yes"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", pair="$A $B <end>", special_tokens=[("<end>", tokenizer.token_to_id("<end>"))]
    )
    tokenizer.save(str(path))
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=tokenizer.get_vocab_size(), **{**SHAPE, **changes})
    model = getattr(transformers, f"Qwen3{head}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def save_embedder(
    folder: Path, pooling: dict[str, Any] | None = None, *, normalize: bool = True, **changes: Any
) -> Path:
    """A model of sentence-transformers, named as Qwen3-Embedding is: a causal one whose tensors have no prefix."""
    save(folder, "Model", **changes)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
    steps = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    save_steps(folder, steps)
    write(folder / "1_Pooling" / "config.json", pooling or {"pooling_mode_lasttoken": True, "include_prompt": True})
    return folder


def save_steps(folder: Path, steps: Sequence[str]) -> None:
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{step}" if index else "", "type": f"{_STEPS}.{step}"}
        for index, step in enumerate(steps)
    ]
    write(folder / "modules.json", modules)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 14 words, up to some 70 tokens."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, size=random.integers(1, 15))) for _ in range(count)]


class Reference:
    """The folder's model in transformers; one prompt at a time."""

    def __init__(self, folder: Path, head: str) -> None:
        import transformers

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = getattr(transformers, f"Auto{head}").from_pretrained(folder, dtype="float32")

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the states [tokens, hidden_size] after the last norm."""
        states: NDArray[np.float32] = self.model(torch.tensor([ids])).last_hidden_state[0].numpy()
        return states

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of the classes, or of the token after the last one."""
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits if logits.ndim == 1 else logits[-1]

    def embedding(self, ids: Sequence[int], dimensions: int | None = None) -> NDArray[np.float32]:
        """Last token's state, cut and normalized."""
        return unit(self.states(ids)[-1][:dimensions])


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    normalized: NDArray[np.float32] = vector / np.linalg.norm(vector)
    return normalized
