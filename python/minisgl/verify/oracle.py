"""What transformers answers: greedy tokens, and the logits of every position, kept in a file.

One prompt at a time, the prompt in one forward and then a token each, so nothing of batching or padding is in it.
Only the file is left when it is done: the model is gone before ours is loaded, so the two never need room together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.verify.prompts import Prompt

Float32Array = NDArray[np.float32]

TRACED = 32  # last prompt tokens whose hidden states are kept, to find the layer where two models part


@dataclass(frozen=True, slots=True)
class Expected:
    """One prompt's answer: `logits[p]` follow tokens[: p + 1], up to the one that chose the last new token."""

    prompt: Prompt
    new_tokens: list[int]
    logits: Float32Array  # [len(prompt) + len(new_tokens) - 1, vocab], in a file

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Answers:
    """All prompts' answers, and the hidden states behind the last tokens of one prompt."""

    expected: list[Expected]
    traced: int  # which prompt
    hidden: list[Float32Array]  # after the embedding and after each layer but the last: [TRACED, hidden_size]


@torch.inference_mode()
def ask_transformers(
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    new_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    scratch: Path,
    progress: Callable[[], object],
) -> Answers:
    """Raises ConfigError if transformers cannot load or run the model. `scratch` is a folder for the logits."""
    model = _load(folder, dtype, device)
    expected = []
    try:
        for index, prompt in enumerate(prompts):
            expected.append(_answer(model, prompt, new_tokens, device, scratch / f"{index}.logits"))
            progress()
        traced = max(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
        out = model(torch.tensor([prompts[traced].tokens], device=device), output_hidden_states=True, use_cache=False)
        # The last of them has gone through the final norm; the logits tell of it.
        hidden = [_host(states[0, -TRACED:]) for states in out.hidden_states[:-1]]
        return Answers(expected, traced, hidden)
    except (RuntimeError, IndexError) as error:  # out of memory, a smaller vocabulary
        raise ConfigError(f"transformers cannot run {folder}: {_line(error)}") from error
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation=_experts(folder, dtype),
            local_files_only=True,
        )
        return model.to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"transformers cannot load {folder}: {_line(error)}") from error


def _experts(folder: Path, dtype: torch.dtype) -> str | None:
    """How it multiplies experts: one by one if rows are no multiples of 16 bytes, as grouped products want."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    widths = [
        getattr(config, name, None) or 0 for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")
    ]
    return "eager" if any(width * dtype.itemsize % 16 for width in widths) else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _answer(model: Any, prompt: Prompt, new_tokens: int, device: torch.device, file: Path) -> Expected:
    logits: Float32Array | None = None
    chosen: list[int] = []
    cache, step, done = None, prompt.tokens, 0
    while len(chosen) < new_tokens:
        out = model(torch.tensor([step], device=device), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows = _host(out.logits[0])
        if logits is None:
            logits = np.memmap(
                file, dtype=np.float32, mode="w+", shape=(len(prompt.tokens) + new_tokens - 1, rows.shape[1])
            )
        logits[done : done + len(rows)] = rows
        done += len(rows)
        step = [int(rows[-1].argmax())]
        chosen += step
    assert logits is not None
    return Expected(prompt, chosen, logits)


def _host(tensor: Tensor) -> Float32Array:
    array: Float32Array = tensor.float().cpu().numpy()
    return array
