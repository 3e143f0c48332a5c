"""Policy of a step: the requests that it extends, by how many tokens, in what order, within which bounds. Pure.

`remaining[i]` is how many known tokens of running request i have no KV yet: 0 when all it may do is in flight, 1 when
the next step is a decode, more while its prompt is being prefilled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from minisgl.config import BatchPolicyName
from minisgl.core import Batch, IndexArray, Int32Array

BatchPolicy: TypeAlias = Callable[[Int32Array, int], Int32Array]


def chunk_lengths(remaining: Int32Array, budget: int) -> Int32Array:
    """Share a budget of tokens among prompts in order: each gets all it needs while the budget lasts."""
    before = np.cumsum(remaining) - remaining
    query_lens: Int32Array = np.clip(budget - before, 0, remaining).astype(np.int32)
    return query_lens


def prefill_first(remaining: Int32Array, budget: int) -> Int32Array:
    """Return the tokens of each request in the next step: chunks of prompts if there are any, else one a decode."""
    is_prompt = remaining > 1
    if is_prompt.any():
        return chunk_lengths(np.where(is_prompt, remaining, 0).astype(np.int32), budget)
    return remaining


def mixed(remaining: Int32Array, budget: int) -> Int32Array:
    """Give each decode its token in every step, and prompts the rest of the budget: even times between tokens."""
    prompts = np.where(remaining > 1, remaining, 0).astype(np.int32)
    decodes = np.where(remaining == 1, remaining, 0).astype(np.int32)
    query_lens: Int32Array = decodes + chunk_lengths(prompts, max(budget - int(decodes.sum()), 1))
    return query_lens


def longest_first(slots: IndexArray, kv_lens: Int32Array) -> IndexArray:
    """Order a decode's rows. Attention begins with rows as they come, and what it begins last should be short.

    All rows of a decode grow by one token a step, so their order stays until a request comes or goes.
    """
    ordered: IndexArray = slots[np.argsort(-kv_lens, kind="stable")]
    return ordered


BATCH_POLICIES: Mapping[BatchPolicyName, BatchPolicy] = {"prefill-first": prefill_first, "mixed": mixed}


STEPS_TO_RECOVER = 64  # completed steps after which lowered bounds are doubled, at first
SMALL_STEP = 64  # tokens: prefills are not made smaller than this


class StepLimits:
    """Tokens of a step's prefills, and requests that run at a time.

    A step that failed halves what made it large: the tokens of its prefills or, where these are few, the number of its
    requests. When bounds have risen too soon, the next rise takes twice as many steps, so that requests that lost
    their work get it done.
    """

    def __init__(self, max_prefill_tokens: int, max_running: int) -> None:
        self._configured = max_prefill_tokens, max_running
        self.prefill_tokens = max_prefill_tokens
        self.running = max_running
        self._completed = 0  # steps since the bounds were changed
        self._backoff = STEPS_TO_RECOVER
        self._has_risen = False

    def lower(self, batch: Batch) -> None:
        """Make the next steps smaller than this one, which failed."""
        prefill_tokens = int(batch.query_lens[batch.query_lens > 1].sum())
        if prefill_tokens > SMALL_STEP:
            self.prefill_tokens = max(prefill_tokens // 2, SMALL_STEP)
        else:
            self.running = max(len(batch.slots) // 2, 1)
        self._completed = 0
        if self._has_risen:
            self._backoff, self._has_risen = 2 * self._backoff, False

    def completed(self) -> None:
        """Count a step that did not fail."""
        self._completed += 1
        if self._completed < self._backoff:
            return
        self._completed = 0
        if (self.prefill_tokens, self.running) == self._configured:
            self._backoff, self._has_risen = STEPS_TO_RECOVER, False
            return
        most_tokens, most_running = self._configured
        self.prefill_tokens = min(2 * self.prefill_tokens, most_tokens)
        self.running = min(2 * self.running, most_running)
        self._has_risen = True


def is_small(batch: Batch) -> bool:
    """True if a step cannot be made smaller: it has one request, which fails because of itself."""
    return len(batch.slots) == 1 and batch.num_tokens <= SMALL_STEP
