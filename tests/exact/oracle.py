"""Answers that a model must give: Hugging Face transformers in float32, and how clear each choice was.

Batch shape moves float32 logits by about 3e-5. A test demands equality, so it takes prompts and seeds whose every
choice has a margin far above that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.seeds import choice_seed
from minisgl.verify.oracle import cache_argument
from models.tiny import VOCAB, make_model
from support.tiny_tokenizer import save_byte_tokenizer

LOGIT_MARGIN = 1e-3
DRAW_MARGIN = 1e-3
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Expected:
    prompt: list[int]
    tokens: list[int]
    seed: int | None = None


class Oracle:
    """One tiny model, saved as a folder for the engine and kept for transformers."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self._model: Any = make_model(kind)
        self._model.save_pretrained(folder)
        self._model.generation_config.eos_token_id = None  # the full length is compared
        save_byte_tokenizer(folder, VOCAB)

    def greedy(
        self,
        rng: random.Random,
        count: int,
        new_tokens: int,
        make_cache: Callable[[], Any] | None = None,
        *,
        longest: int = 300,
    ) -> list[Expected]:
        """`count` prompts of 1 to `longest` tokens, several sharing prefixes, with transformers' greedy answers.

        `make_cache` makes the KV cache of one of them, if it is not to be transformers' own.
        """
        shared = [prefix for prefix in (_tokens(rng, 90), _tokens(rng, 130)) if len(prefix) < longest]
        found: list[Expected] = []
        while len(found) < count:
            begin = shared[len(found) % 6] if len(found) % 6 < len(shared) else []
            prompt = begin + _tokens(rng, rng.randint(1, longest - len(begin)))
            ids = torch.tensor([prompt])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{cache_argument(self._model): make_cache() if make_cache else None},
                max_new_tokens=new_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
            best = torch.stack(out.logits).squeeze(1).topk(2, dim=1).values
            if (best[:, 0] - best[:, 1]).min() > LOGIT_MARGIN:
                found.append(Expected(prompt, out.sequences[0, len(prompt) :].tolist()))
        return found

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], tokens: list[int]) -> None:
        """Assert, in one forward, that each token is the greedy choice after those before it.

        A choice within rounding of the best one passes.
        """
        logits = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert (logits.amax(1) - chosen).max() < LOGIT_MARGIN

    def sampled(
        self, rng: random.Random, count: int, new_tokens: int, *, temperature: float, top_k: int
    ) -> list[Expected]:
        """`count` prompts with seeds, and what plain sampling of transformers' logits in float64 gives for them."""
        found: list[Expected] = []
        while len(found) < count:
            prompt, seed = _tokens(rng, rng.randint(1, 120)), rng.getrandbits(40)
            tokens = self._sample(prompt, seed, new_tokens, temperature, top_k)
            if tokens is not None:
                found.append(Expected(prompt, tokens, seed))
        return found

    @torch.inference_mode()
    def _sample(
        self, prompt: list[int], seed: int, new_tokens: int, temperature: float, top_k: int
    ) -> list[int] | None:
        """The tokens, or None if a choice was within rounding of another."""
        tokens, name, cache, step = list(prompt), cache_argument(self._model), None, prompt
        while len(tokens) < len(prompt) + new_tokens:
            out = self._model(torch.tensor([step]), **{name: cache}, use_cache=True)
            cache = out[name]
            token = choose(out.logits[0, -1].double().numpy(), choice_seed(seed, 0), len(tokens), temperature, top_k)
            if token is None:
                return None
            tokens.append(token)
            step = [token]
        return tokens[len(prompt) :]


def choose(logits: np.ndarray, seed: int, position: int, temperature: float, top_k: int) -> int | None:
    """Sampling by the book, for one row; None where rounding could change the choice."""
    order = np.argsort(-logits)
    kept, cut = order[:top_k], order[top_k]
    if logits[kept[-1]] - logits[cut] < LOGIT_MARGIN:
        return None
    weights = np.zeros_like(logits)
    weights[kept] = np.exp((logits[kept] - logits[kept[0]]) / temperature)
    cumulative = np.cumsum(weights) / weights.sum()
    draw = reference_uniform(seed, position)
    if np.abs(cumulative[kept] - draw).min() < DRAW_MARGIN:
        return None
    return int(np.argmax(cumulative > draw))


def reference_uniform(seed: int, position: int) -> float:
    """The generator of engine.sampling.sampler in Python's integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
        return x ^ (x >> 31)

    bits = mix((mix(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 41
    return (bits + 0.5) / 2**23


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]
