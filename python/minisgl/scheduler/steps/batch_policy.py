"""Policy of a step: the requests that it extends, by how many tokens, in what order. Pure.

`remaining[i]` is the number of known tokens of running request i that have no KV yet: 0 while its newest token is being
sampled, 1 if its next step is a decode, more while its prompt is being prefilled. `start_pos[i]` is the number of its
tokens that have KV.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.core import Batch, IndexArray, Int32Array
from minisgl.step_cost import LearnedCost, StepCost

TOKENS = StepCost(prefill_token=1.0)  # counts a budget in tokens instead of seconds
LANE = 0.5  # share of a long prompt's chunk that shorter prompts may have
SLACK = 1 / 8  # of the target: the most by which a step may exceed it, after a step that stayed below it by as much
MOST_PREFILLS = 16  # steps of chunks in a row for which `PrefillFirst` lets decodes wait
MOST_LAUNCHING = 2  # times the target that a step may take because its launches take the host that long
# Tokens that a GPU's matrix products compute in one tile. Steps below twice the first size are cut to the second.
TILES = 256, 128


class Chunks:
    """Chunks of prompts that share the budget of a step, which is counted by a cost model.

    In order of admission each prompt gets all it needs. The first that does not fit is the head: it gets what is left.
    Shorter prompts after it may take up to `lane` of that, the shortest first, so that none waits for a long one;
    and since the head has its share of every step, no flow of short ones can hold it up for ever.

    Say a budget of 100 tokens, a lane of a half, and prompts of 20, 500, 300 and 10 tokens: the first gets its 20. Of
    the 80 that are left up to 40 go to the shorter ones, 10 and 30, and the head (500) gets the other 40.

    With `decodes`, the number of decodes in the step, chunks of prompts that do not all fit are cut so that the step's
    tokens fill whole tiles of its matrix products, since a part of a tile takes nearly as long as a whole one. The head
    gives up tokens first, then the youngest prompts.

    A budget of 0 gives nobody a token.
    """

    def __init__(self, cost: StepCost, budget: float, lane: float, decodes: int | None = None) -> None:
        """`budget` is in the unit of `cost`, which prices chunks: seconds, or tokens with `TOKENS`."""
        self._cost = cost
        self._budget = budget
        self._left = budget  # less the cost of all prompts that fit whole
        self._lane = lane
        self._decodes = decodes
        self._head: int | None = None
        self._prompts: list[tuple[int, int, float]] = []  # first position, tokens, cost

    def accepts(self, start_pos: int, length: int) -> bool:
        """Return True if this prompt would get tokens if it were added."""
        if not self._prompts:
            return self._budget > 0
        first_token = self._cost.prefill(start_pos, 1)
        if self._head is None:
            return first_token <= self._left
        cost = self._cost.prefill(start_pos, length)
        before = sum(other for _, _, other in self._prompts[self._head + 1 :] if other <= cost)
        return cost < self._prompts[self._head][2] and before + first_token <= self._lane * self._left

    @property
    def is_crowded(self) -> bool:
        """True if some prompt does not fit whole into the budget."""
        return self._head is not None

    @property
    def is_full(self) -> bool:
        """True if no prompt would be accepted, however short."""
        return not self.accepts(0, 1)

    def add(self, start_pos: int, length: int) -> None:
        """Add a prompt of `length` remaining tokens after `start_pos` tokens that have KV."""
        cost = self._cost.prefill(start_pos, length)
        if self._head is None:
            if cost <= self._left:
                self._left -= cost
            else:
                self._head = len(self._prompts)
        self._prompts.append((start_pos, length, cost))

    def lengths(self) -> Int32Array:
        """Return the tokens of each prompt in the step, in the order in which they were added."""
        lengths = np.array([length for _, length, _ in self._prompts], dtype=np.int32)
        if self._head is None:
            return lengths
        lengths[self._head :] = 0
        lane = self._lane * self._left
        left = self._left - lane
        shorter = [i for i in range(self._head + 1, len(lengths)) if self._prompts[i][2] < self._prompts[self._head][2]]
        for i in sorted(shorter, key=lambda i: self._prompts[i][2]):
            start_pos, length, _ = self._prompts[i]
            lengths[i] = chunk = min(length, self._cost.chunk_within(lane, start_pos))
            lane -= self._cost.prefill(start_pos, chunk)
            if chunk < length:
                break
        start_pos, length, _ = self._prompts[self._head]
        # The oldest prompt gets a token in any case, so that every step makes progress.
        lengths[self._head] = max(
            self._cost.chunk_within(left + lane, start_pos), int(self._head == 0 and self._budget > 0)
        )
        if self._decodes is not None:
            self._end_on_tile(lengths, self._head, self._decodes)
        return lengths

    def _end_on_tile(self, lengths: Int32Array, head: int, decodes: int) -> None:
        """Shorten chunks so that the step's tokens fill whole tiles, if each chunk can keep a token."""
        excess = _excess(decodes + int(lengths.sum()))
        spare = np.maximum(lengths - 1, 0)
        if excess > int(spare.sum()):
            return
        for i in (head, *reversed(range(len(lengths)))):
            given_up = min(excess, int(spare[i]))
            spare[i] -= given_up
            lengths[i] -= given_up
            excess -= given_up

    def spent(self, lengths: Int32Array) -> float:
        """Return the cost of chunks of these lengths."""
        chunks = zip(self._prompts, lengths.tolist(), strict=True)
        return sum(self._cost.prefill(start_pos, taken) for (start_pos, _, _), taken in chunks)

    def given_up(self, lengths: Int32Array) -> float:
        """Return the budget that a step with these chunks leaves unused although prompts wait for it."""
        return max(self._budget - self.spent(lengths), 0.0) if self._head is not None else 0.0


class BatchPolicy(Protocol):
    """Rows of a step. The scheduler adds the prompts that it admits to the `chunks`, then asks for all `query_lens`."""

    def chunks(self, start_pos: Int32Array, remaining: Int32Array, max_tokens: int) -> Chunks:
        """Return the chunks of the running prompts in a step of at most `max_tokens` prompt tokens."""

    def query_lens(self, remaining: Int32Array, chunks: Chunks) -> Int32Array:
        """Return the tokens of each request in the step; the prompts among them are those of `chunks`, in order."""

    def record(self, batch: Batch, seconds: float) -> None:
        """Take the seconds that a step has taken."""


class PrefillFirst:
    """A step holds chunks of prompts if there are any, in order of admission, else a token of each decode.

    When decodes have waited for MOST_PREFILLS steps in a row, a step holds decodes alone. Otherwise a flow of prompts
    whose answers end with their first token, and which therefore never fill the slots, would hold them up for ever.
    """

    def __init__(self) -> None:
        self._waited = 0  # steps of chunks in a row for which some request has waited to decode

    def chunks(self, start_pos: Int32Array, remaining: Int32Array, max_tokens: int) -> Chunks:
        if not (remaining == 1).any():
            self._waited = 0
        return _with_prompts(Chunks(TOKENS, 0 if self._decodes_are_due else max_tokens, 0.0), start_pos, remaining)

    @property
    def _decodes_are_due(self) -> bool:
        return self._waited == MOST_PREFILLS

    def query_lens(self, remaining: Int32Array, chunks: Chunks) -> Int32Array:
        is_prompt = remaining > 1
        query_lens: Int32Array = (remaining == 1).astype(np.int32)
        if self._decodes_are_due or not is_prompt.any():
            self._waited = 0
            return query_lens
        self._waited += int(query_lens.any())
        query_lens[~is_prompt] = 0
        query_lens[is_prompt] = chunks.lengths()
        return query_lens

    def record(self, batch: Batch, seconds: float) -> None:
        pass


class Mixed:
    """Each decode has its token in every step, and prompts get the rest of the target: even times between tokens.

    `target`: seconds that steps may take by `cost`, in the mean, while some request decodes. What prompts give up for
    whole tiles is added to the budget of the next step. Where decodes take more than half of the target, prompts may
    take as long as the decodes: a smaller budget would leave requests waiting without end near the highest rate, and
    read all weights for tiny chunks. Where the host launches a step for longer than the target, prompts get all of that
    time, since the step would be no shorter without them. Without a cost model, and when no request decodes, the budget
    is in tokens.

    With many decodes, a step of chunks and a step of decodes are together shorter than one step of both kinds. Then
    chunks and decodes take turns, strictly: a step of each keeps to the bound that one step of both would have.
    """

    def __init__(self, cost: LearnedCost | None = None, target: float = math.inf) -> None:
        self._cost = cost if math.isfinite(target) else None
        self._target = target
        self._given_up = 0.0  # seconds of the budget that the latest step with chunks has left unused
        self._takes_turns = False  # the next step has chunks alone, if these are not too few
        self._decodes_are_due = False  # the latest step had chunks alone, so the next one has decodes alone

    def chunks(self, start_pos: Int32Array, remaining: Int32Array, max_tokens: int) -> Chunks:
        is_decode = remaining == 1
        decodes = int(is_decode.sum())
        self._decodes_are_due &= decodes > 0
        if self._decodes_are_due:
            return _with_prompts(Chunks(TOKENS, 0, LANE), start_pos, remaining)
        if self._cost is None or not decodes:
            self._takes_turns = False
            tokens = max(max_tokens - decodes, 1)
            return _with_prompts(Chunks(TOKENS, tokens, LANE, decodes or None), start_pos, remaining)
        self._takes_turns = self._cost.saved_by_turns(decodes, math.inf) > 0
        decodes_in_step = 0 if self._takes_turns else decodes
        cost, tokens = self._cost.model, max(max_tokens - decodes_in_step, 1)
        budget = self._seconds_for_chunks(self._cost, start_pos[is_decode]) / self._cost.ratio
        budget = min(max(budget, cost.prefill_token), tokens * cost.prefill_token)
        return _with_prompts(Chunks(cost, budget, LANE, decodes_in_step), start_pos, remaining)

    def _seconds_for_chunks(self, cost: LearnedCost, start_pos: Int32Array) -> float:
        """Return the seconds that decodes with so many tokens each leave for chunks, in the same step or in turns."""
        fixed = cost.ratio * cost.model.fixed
        target = max(self._target, min(cost.model.launching, MOST_LAUNCHING * self._target))
        if self._takes_turns:
            decodes = cost.decodes_alone(start_pos)
            return max(target - decodes, decodes) - fixed + self._given_up
        decodes = fixed + cost.ratio * cost.model.decodes(start_pos)
        return max(target - decodes, decodes) + self._given_up

    def query_lens(self, remaining: Int32Array, chunks: Chunks) -> Int32Array:
        is_decode = remaining == 1
        query_lens: Int32Array = is_decode.astype(np.int32)
        if self._decodes_are_due:
            self._decodes_are_due = False
            return query_lens
        query_lens[remaining > 1] = lengths = chunks.lengths()
        if self._cost is not None:
            self._given_up = min(chunks.given_up(lengths) * self._cost.ratio, SLACK * self._target)
            if self._takes_turns and lengths.any():
                saved = self._cost.saved_by_turns(int(is_decode.sum()), chunks.spent(lengths))
                self._decodes_are_due = saved > 0
        if self._decodes_are_due:
            query_lens[is_decode] = 0
        return query_lens

    def record(self, batch: Batch, seconds: float) -> None:
        if self._cost is not None:
            self._cost.record(batch, seconds)


def _excess(tokens: int) -> int:
    """Return how many tokens a step has beyond its last whole tile."""
    large, small = TILES
    return tokens % (large if tokens >= 2 * large else small)


def _with_prompts(chunks: Chunks, start_pos: Int32Array, remaining: Int32Array) -> Chunks:
    is_prompt = remaining > 1
    for start, length in zip(start_pos[is_prompt].tolist(), remaining[is_prompt].tolist(), strict=True):
        chunks.add(start, length)
    return chunks


def make_batch_policy(config: SchedulerConfig, cost: StepCost | None) -> BatchPolicy:
    """Return the configured policy. Without a cost model, steps are bounded by tokens alone."""
    if config.batch_policy == "prefill-first":
        return PrefillFirst()
    target = config.target_tbt / 1e3 if config.target_tbt else math.inf
    return Mixed(None if cost is None else LearnedCost(cost), target)


def longest_first(slots: IndexArray, kv_lens: Int32Array) -> IndexArray:
    """Return the slots of a decode's rows, longest row first: attention begins with the first rows, and those that it
    begins last should be short.

    All rows of a decode grow by one token a step, so their order stays until a request comes or goes.
    """
    ordered: IndexArray = slots[np.argsort(-kv_lens, kind="stable")]
    return ordered
