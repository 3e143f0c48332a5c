"""Answers of transformers: greedy tokens in the dtype that is verified, and the float32 logits of every position.

One prompt at a time, the prompt in one forward and then a token each, so nothing of batching or padding is in them. The
logits in the narrower dtype tell only how far rounding moves them: trained weights amplify it where a prompt repeats
itself (massive activations), so that two right computations may be a standard deviation apart there. If the weights in
float32 find no room, the logits stay those in the dtype, and a second computation of theirs, with another kernel of
attention, tells how far rounding moves them.
Only a file of logits remains: the model is freed before ours is loaded, so the two never need memory together.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.error_text import abridged, in_one_line
from minisgl.models.generic.load import loading_by_transformers
from minisgl.quantization.dequantize import is_of_quantized
from minisgl.verify.compare import compare_rows
from minisgl.verify.prompt_texts import NamedPrompt

logger = logging.getLogger(__name__)

Float32Array = NDArray[np.float32]

TRACED = 32  # last prompt tokens whose hidden states are kept, to find the layer where two models part


@dataclass(frozen=True, slots=True)
class Expected:
    """One prompt's answer: `logits[p]` follow tokens[: p + 1]; the last row chose the last new token."""

    prompt: NamedPrompt
    new_tokens: list[int]
    logits: Float32Array  # [len(prompt) + len(new_tokens) - 1, vocab], in a file
    # Largest rms, in standard deviations, by which other logits of transformers in the dtype miss these.
    rounding: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Answers:
    """All prompts' answers, and the hidden states of the last tokens of one prompt."""

    expected: list[Expected]
    traced: int  # index of the prompt
    hidden: list[Float32Array]  # after the embedding and after each layer but the last: [TRACED, hidden_size]
    is_float32: bool  # the logits are those in float32; otherwise the weights in float32 found no room


@torch.inference_mode()
def run_transformers(
    folder: Path,
    prompts: Sequence[NamedPrompt],
    *,
    new_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    scratch: Path,
    progress: Callable[[], object],
) -> Answers:
    """Return the answers of transformers. `scratch` is a folder for the logits.

    Raises ConfigError if transformers cannot load or run the model.
    """
    narrow = dtype != torch.float32
    has_room = narrow and _has_room_for_float32(folder, dtype, device)
    expected = []
    with _model(folder, dtype, device) as model:
        for index, prompt in enumerate(prompts):
            expected.append(_answer(model, prompt, new_tokens, device, scratch / f"{index}.logits"))
            progress()
        traced = max(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
        out = model(torch.tensor([prompts[traced].tokens], device=device), output_hidden_states=True, use_cache=False)
        # The last entry is left out: it includes the final norm, and the logits cover it.
        hidden = [_host(states[0, -TRACED:]) for states in out.hidden_states[:-1]]
        if narrow and not has_room:
            _attend_by_sdpa(model)
            expected = [_with_rounding(one, _logits(model, one, device), one.logits) for one in expected]
    del model, out  # frees the memory before another model is loaded
    if has_room:
        with _model(folder, torch.float32, device) as model:
            expected = [_in_float32(one, _logits(model, one, device)) for one in expected]
        progress()
    return Answers(expected, traced, hidden, is_float32=has_room or not narrow)


@contextmanager
def _model(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    """Lend the model as transformers loads it, and free it afterwards. ConfigError if it cannot be loaded or run."""
    model = _load(folder, dtype, device)
    try:
        yield model
    except (RuntimeError, IndexError) as error:  # out of memory, a smaller vocabulary
        raise ConfigError(f"transformers cannot run {folder}: {in_one_line(error)}") from error
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    with loading_by_transformers(folder):
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation=_experts(folder, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
        model = model.to(device).eval()
    left_out = sorted(filter(is_of_quantized, info["unexpected_keys"]))
    if left_out:
        raise ConfigError(
            f"transformers does not know how the weights in {folder} are quantized: it leaves out "
            f"{abridged(left_out)}; name dequantized ones by --reference"
        )
    return model


def _experts(folder: Path, dtype: torch.dtype) -> str | None:
    """Return the way to multiply experts: one by one if rows are no multiples of 16 bytes, as grouped products want."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    widths = [
        getattr(config, name, None) or 0 for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")
    ]
    return "eager" if any(width * dtype.itemsize % 16 for width in widths) else None


def cache_argument(model: Any) -> str:
    """Return the name of the KV cache in a model's arguments and output, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _answer(model: Any, prompt: NamedPrompt, new_tokens: int, device: torch.device, file: Path) -> Expected:
    logits: Float32Array | None = None
    chosen: list[int] = []
    name, cache, step, done = cache_argument(model), None, prompt.tokens, 0
    while len(chosen) < new_tokens:
        out = model(torch.tensor([step], device=device), **{name: cache}, use_cache=True)
        cache = out[name]
        rows = _host(out.logits[0])
        if logits is None:
            logits = np.memmap(
                file, dtype=np.float32, mode="w+", shape=(len(prompt.tokens) + new_tokens - 1, rows.shape[1])
            )
        logits[done : done + len(rows)] = rows
        done += len(rows)
        step = [int(rows[-1].argmax())]
        chosen += step
    assert logits is not None  # new_tokens is at least 1
    return Expected(prompt, chosen, logits)


def _attend_by_sdpa(model: Any) -> None:
    """Let the model attend by torch's fused attention; it stays as it is if its class cannot, as gpt-oss's."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError as error:
        logger.debug("%s", error)


def _logits(model: Any, answer: Expected, device: torch.device) -> Float32Array:
    """Return the logits of every position of the answer, from one forward."""
    return _host(model(torch.tensor([answer.tokens[:-1]], device=device), use_cache=False).logits[0])


def _with_rounding(answer: Expected, rounded: Float32Array, exact: Float32Array) -> Expected:
    """Return the answer with the distance of rounded logits from exact ones, or from others in the same dtype."""
    rounding = max(position.rms for position in compare_rows(0, rounded, exact))
    return dataclasses.replace(answer, rounding=rounding)


def _in_float32(answer: Expected, exact: Float32Array) -> Expected:
    """Put the logits in float32 in place of the answer's, and say how far those were off."""
    measured = _with_rounding(answer, answer.logits, exact)
    answer.logits[:] = exact
    return measured


def _has_room_for_float32(folder: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the weights in float32 take less than half of the free memory."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 4 // dtype.itemsize
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * size < free


def _host(tensor: Tensor) -> Float32Array:
    array: Float32Array = tensor.float().cpu().numpy()
    return array
