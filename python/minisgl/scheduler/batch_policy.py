"""Which running requests a step extends, by how many tokens, and in what order. Pure functions of arrays.

`remaining[i]` is how many known tokens of running request i have no KV yet: 0 when all it may do is in flight, 1 when
the next step is a decode, more while its prompt is being prefilled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from minisgl.config import BatchPolicyName
from minisgl.core import IndexArray, Int32Array

BatchPolicy: TypeAlias = Callable[[Int32Array, int], Int32Array]


def chunk_lengths(remaining: Int32Array, budget: int) -> Int32Array:
    """Share a budget of tokens among prompts in order: each gets all it needs while the budget lasts."""
    before = np.cumsum(remaining) - remaining
    query_lens: Int32Array = np.clip(budget - before, 0, remaining).astype(np.int32)
    return query_lens


def prefill_first(remaining: Int32Array, budget: int) -> Int32Array:
    """Tokens each request gets in the next step: the prompts' chunks if there are any, else one for each decode."""
    is_prompt = remaining > 1
    if is_prompt.any():
        return chunk_lengths(np.where(is_prompt, remaining, 0).astype(np.int32), budget)
    return remaining


def mixed(remaining: Int32Array, budget: int) -> Int32Array:
    """All decodes in every step, and the rest of the budget in chunks of prompts: even times between tokens."""
    prompts = np.where(remaining > 1, remaining, 0).astype(np.int32)
    decodes = np.where(remaining == 1, remaining, 0).astype(np.int32)
    query_lens: Int32Array = decodes + chunk_lengths(prompts, max(budget - int(decodes.sum()), 1))
    return query_lens


def longest_first(slots: IndexArray, kv_lens: Int32Array) -> IndexArray:
    """A decode's rows in order. Attention begins with rows as they come, and what it begins last should be short.

    All rows of a decode grow by one token a step, so their order stays until a request comes or goes.
    """
    ordered: IndexArray = slots[np.argsort(-kv_lens, kind="stable")]
    return ordered


BATCH_POLICIES: Mapping[BatchPolicyName, BatchPolicy] = {"prefill-first": prefill_first, "mixed": mixed}
