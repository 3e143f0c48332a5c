"""Attention sinks (Xiao et al., 2023) behind a backend that has none of its own but returns the log-sum-exp."""

from __future__ import annotations

from torch import Tensor


def add_sinks(attended: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add a score to each head's softmax after the fact, in place: attended [T, heads, d] is returned.

    `lse` [T, heads] float32: the natural logarithm of the sum of exp(score) that the backend has divided by; `sinks`
    [heads]. The sink's value is 0, so all that it does is to enlarge the sum: by 1 + exp(sink - lse).
    """
    return attended.mul_((lse - sinks.float()).sigmoid_().unsqueeze(-1))
