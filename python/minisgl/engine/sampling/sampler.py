"""Sampling of the next token of every row in one batch, and log-probabilities of tokens.

A token depends only on the row's logits, parameters, seed and the token's position: a counter-based generator gives one
uniform number, which is mapped through the inverse of the filtered distribution's cumulative sum in vocabulary order.
So equal logits give equal tokens in any batch and after any restart; but 16-bit logits differ by rounding from batch to
batch.

Log-probabilities are the float32 log-softmax of logits, computed for a limited number of rows at a time, so that a long
prompt takes no more memory than a short one.

The generator is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014) applied to seed and position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from minisgl.core import NO_TOKEN, Logprobs
from minisgl.engine.sampling.logits_processing import mask_logits, process_logits
from minisgl.engine.state import SlotState
from minisgl.sampling_params import SamplingFlags


def _signed(value: int) -> int:
    """Return the signed int64 with this 64-bit pattern."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 logically (torch's shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return one number in (0, 1) for each int64 (seed, position), as float32 with 23 random bits.

    Seed 42 gives 0.5961 at position 0, 0.1604 at 1 and 0.1664 at 2. A position needs no state of earlier ones.
    """
    bits = _shift_right(_mix(_mix(seed) + (position + 1) * _GOLDEN), 41)
    return (bits.float() + 0.5) * 2.0**-23


def filter_threshold(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the smallest probability that each row keeps, [S, 1]; equal probabilities are kept together.

    The filters are those of transformers: the `top_k` most likely tokens; of these, the shortest list in descending
    order that has a share `top_p` of their mass; of these, all with at least `min_p` times the largest probability.
    probs [S, V] float32; top_k 0 is no limit.

    Say a row has the probabilities 0.1, 0.4, 0.05, 0.3 and 0.15. top_k 3 keeps 0.4, 0.3 and 0.15: the threshold is
    0.15. top_p 0.8 of their mass 0.85 is 0.68, which 0.4 and 0.3 reach: 0.3. min_p 0.8 of 0.4 is 0.32: 0.4.
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


_GREEDY, _SAMPLED, _FILTERED = SamplingFlags(0), SamplingFlags.SAMPLED, SamplingFlags.SAMPLED | SamplingFlags.FILTERED


class Sampler(Protocol):
    """Samples a token for each row, and appends it to the row's slot, where the next step reads it."""

    @property
    def graph_flags(self) -> tuple[SamplingFlags, ...]:
        """Flags for which it launches different kernels, if no row is processed; the last ones serve any such rows."""

    def sample(
        self, logits: Tensor, slots: Tensor, state: SlotState, flags: SamplingFlags, bitmask: Tensor | None = None
    ) -> Tensor:
        """Return tokens [S] int32 from the logits [S, V], which are not changed, of the rows in `slots` [S] int64.

        A row whose logits have a NaN or no finite maximum gets NO_TOKEN, and any valid token in its slot. That costs no
        launch: the host finds it among the tokens that it reads anyway.
        `flags` are those of all rows together, and save work. `bitmask` [S, ceil(V / 32)] int32 allows id 32 w + i if
        bit i of word w is set; None allows all.
        """


class TorchSampler:
    """Reference sampler, in plain torch on any device."""

    graph_flags = _GREEDY, _SAMPLED, _FILTERED

    def sample(
        self, logits: Tensor, slots: Tensor, state: SlotState, flags: SamplingFlags, bitmask: Tensor | None = None
    ) -> Tensor:
        if SamplingFlags.PROCESSED in flags:
            logits = process_logits(logits, slots, state, bitmask)
        elif bitmask is not None:
            logits = mask_logits(logits, bitmask)
        # The first of the largest logits; a NaN counts as the largest. (`argmax` takes a CPU four times as long.)
        largest, sampled = logits.max(dim=1)
        if SamplingFlags.SAMPLED in flags:
            sampled = torch.where(
                state.temperature[slots] == 0.0,
                sampled,
                _draw(logits, slots, state, filtered=SamplingFlags.FILTERED in flags),
            )
        sampled = sampled.int()
        state.advance(slots, sampled)
        return torch.where(largest.isfinite(), sampled, NO_TOKEN)


def _draw(logits: Tensor, slots: Tensor, state: SlotState, *, filtered: bool) -> Tensor:
    """Return a token [S] int64 for each row; those of greedy rows are drawn at temperature 1."""
    temperature = state.temperature[slots].unsqueeze(1)
    probs = torch.softmax(logits.float() / torch.where(temperature == 0.0, 1.0, temperature), dim=1)
    if filtered:
        threshold = filter_threshold(probs, state.top_k[slots], state.top_p[slots], state.min_p[slots])
        probs = torch.where(probs >= threshold, probs, 0.0)
    cdf = probs.cumsum(dim=1)
    total = cdf[:, -1:]
    draw = uniform(state.seed[slots], state.lengths[slots].long()).unsqueeze(1)
    # Below the total even if the product rounds up, so that the token has a probability above 0.
    target = torch.minimum(draw * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cdf, target, right=True).squeeze(1)
    return chosen.clamp_(max=logits.shape[1] - 1)  # NaN logits give at least a valid token


_SCORED_ELEMENTS = 2**24  # logits scored at a time: 64 MiB in float32


def no_logprobs(device: torch.device) -> Logprobs[Tensor]:
    """Return log-probabilities of zero positions."""
    ids = torch.empty((0, 0), dtype=torch.int32, device=device)
    values = torch.empty((0, 0), dtype=torch.float32, device=device)
    return Logprobs(values.flatten(), ids.flatten(), ids, values)


def compute_logprobs(logits: Callable[[slice], Tensor], tokens: Tensor, vocab: int, top: int) -> Logprobs[Tensor]:
    """Return log-probabilities of tokens int64[n], with `top` alternatives each.

    `logits` returns the logits [rows, vocab] of a slice of the tokens. A token that is among its alternatives has the
    same bits there.
    """
    if len(tokens) == 0:
        return no_logprobs(tokens.device)
    rows = max(_SCORED_ELEMENTS // vocab, 1)
    pieces = [
        _score(logits(slice(begin, begin + rows)), tokens[begin : begin + rows], min(top, vocab))
        for begin in range(0, len(tokens), rows)
    ]
    return Logprobs(*(torch.cat(columns) for columns in zip(*pieces, strict=True)))


def _score(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.float(), dim=1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    best = logprobs.topk(top, dim=1)
    ids = best.indices if top == 0 else _first_among_equals(best.indices, tokens, ranks)
    return chosen.squeeze(1), ranks.int(), ids.int(), best.values


def _first_among_equals(ids: Tensor, tokens: Tensor, ranks: Tensor) -> Tensor:
    """Return the alternatives [n, k] with the chosen token before those with equal logits, which 16 bits often have.

    Otherwise a greedy token might not be the first of its alternatives, or not be among them.
    """
    token, index = tokens.unsqueeze(1), ranks.unsqueeze(1) - 1
    at = index.clamp(max=ids.shape[1] - 1)
    swapped = torch.where(ids == token, ids.gather(1, at), ids).scatter(1, at, token)
    return torch.where(index == at, swapped, ids)
