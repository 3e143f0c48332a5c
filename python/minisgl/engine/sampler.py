"""Choosing the next token of every sampling row in one batched pass.

The choice depends on nothing but the row's logits, its parameters, its seed and the position of the token: one
uniform number from a counter-based generator, and the inverse of the filtered distribution's cumulative sum taken in
vocabulary order. So equal logits give a request equal tokens in any batch and after any restart; 16-bit logits move by
rounding with the batch.

The generator is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014) applied to seed and position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.engine.processing import mask_logits, process_logits
from minisgl.engine.state import SlotState


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's signed int64 takes it."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """One number in (0, 1) for each int64 (seed, position), as float32 with 23 random bits."""
    bits = _shift_right(_mix(_mix(seed) + (position + 1) * _GOLDEN), 41)
    return (bits.float() + 0.5) * 2.0**-23


def filter_threshold(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest probability that each row keeps, [S, 1]; equal probabilities are kept together.

    As in transformers: the `top_k` most likely; of their mass, the shortest head that reaches `top_p`; of those,
    what has at least `min_p` times the probability of the most likely. probs [S, V] float32; top_k 0 is no limit.
    """
    vocab = probs.shape[1]
    ordered = probs.sort(dim=1, descending=True).values
    rank = torch.arange(vocab, device=probs.device)
    limit = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    ordered_k = torch.where(rank < limit, ordered, 0.0)
    mass_before = ordered_k.cumsum(dim=1) - ordered_k
    wanted = top_p.unsqueeze(1) * ordered_k.sum(dim=1, keepdim=True)
    keep = (rank < limit) & ((mass_before < wanted) | (top_p >= 1.0).unsqueeze(1))
    keep &= ordered >= min_p.unsqueeze(1) * ordered[:, :1]
    last = keep.sum(dim=1, keepdim=True).clamp_(min=1) - 1
    return ordered.gather(1, last)


@dataclass(frozen=True, slots=True)
class SampleKind:
    """What the rows of a step ask of the sampler; the flags only save work."""

    greedy: bool  # every row is greedy
    filtered: bool  # some row has top-k, top-p or min-p
    processed: bool = False  # some row has penalties, biases, or ids that it must not choose

    @classmethod
    def of(cls, batch: Batch) -> SampleKind:
        return cls(batch.greedy, batch.filtered, batch.processed)


class Sampler(Protocol):
    """Chooses a token for each row, and appends it to the row's slot for the next step to read."""

    @property
    def kinds(self) -> tuple[SampleKind, ...]:
        """Those of unprocessed rows that it launches different work for. The last is right for the others too."""
        ...

    def sample(
        self, logits: Tensor, slots: Tensor, state: SlotState, kind: SampleKind, mask: Tensor | None = None
    ) -> Tensor:
        """logits [S, V] of the rows in `slots` [S] int64 -> tokens [S] int32. The logits are left as they are.

        `mask` [S, ceil(V / 32)] int32 allows id 32 w + i where bit i of word w is set; None allows all.
        """
        ...


class TorchSampler:
    """The reference, in plain torch on any device."""

    kinds = SampleKind(True, False), SampleKind(False, False), SampleKind(False, True)

    def sample(
        self, logits: Tensor, slots: Tensor, state: SlotState, kind: SampleKind, mask: Tensor | None = None
    ) -> Tensor:
        if kind.processed:
            logits = process_logits(logits, slots, state, mask)
        elif mask is not None:
            logits = mask_logits(logits, mask)
        sampled = logits.argmax(dim=1) if kind.greedy else _draw(logits, slots, state, filtered=kind.filtered)
        sampled = sampled.int()
        state.advance(slots, sampled)
        return sampled


def _draw(logits: Tensor, slots: Tensor, state: SlotState, *, filtered: bool) -> Tensor:
    temperature = state.temperature[slots].unsqueeze(1)
    is_greedy = temperature == 0.0
    probs = torch.softmax(logits.float() / torch.where(is_greedy, 1.0, temperature), dim=1)
    if filtered:
        threshold = filter_threshold(probs, state.top_k[slots], state.top_p[slots], state.min_p[slots])
        probs = torch.where(probs >= threshold, probs, 0.0)
    cdf = probs.cumsum(dim=1)
    total = cdf[:, -1:]
    draw = uniform(state.seed[slots], state.lengths[slots].long()).unsqueeze(1)
    # Below the total even when the product rounds up, so that the token found has a probability above 0.
    target = torch.minimum(draw * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cdf, target, right=True).squeeze(1)
    chosen.clamp_(max=logits.shape[1] - 1)  # what a model that yields no numbers gets is at least a token
    return torch.where(is_greedy.squeeze(1), logits.argmax(dim=1), chosen)
