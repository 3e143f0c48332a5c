"""The slot table: the host's data of running requests, as arrays indexed by slot.

The device holds the same rows (`engine.state.SlotState`). With the host's copy a step is planned and completed in a few
array operations, however many requests run.

A row has three lengths: `known_len` tokens have reached the host; `device_len` tokens are known to the device or being
sampled there; K and V of the first `cached_len` tokens are written or being written. It holds that cached_len <=
device_len <= max_len. While the host is a step behind, they differ by a step: with 10 tokens known to the host, the
launch of a decode makes device_len 11 and cached_len 10, and the next decode is launched, with 12 and 11, before the
eleventh token has reached the host.

A slot is not reused at once when its request ends: `Scheduler.complete` finds the request of each row by its slot, and
a step in flight still names this one. Say sequence 1 ends in slot 0 while step 7, which extends it, is in flight. If
sequence 3 entered slot 0 before step 7 is complete, it would get the late token of sequence 1, even though the device
runs its steps in order. So `last_step` says which step a slot waits for.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import BoolArray, IndexArray, Int32Array, pages_for
from minisgl.sampling_params import SamplingFlags
from minisgl.scheduler.requests.request import Request

NEVER = np.iinfo(np.int32).max  # position that no request reaches


def common_length(ours: Int32Array, theirs: Int32Array) -> int:
    """Return the number of tokens at the beginning of both."""
    length = min(len(ours), len(theirs))
    parted = np.flatnonzero(ours[:length] != theirs[:length])
    return int(parted[0]) if len(parted) else length


class SlotTable:
    """Rows for `num_slots` running requests of up to `max_seq_len` tokens."""

    def __init__(self, num_slots: int, max_seq_len: int, page_size: int) -> None:
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.page_size = page_size
        self.tokens = np.zeros((num_slots, max_seq_len), dtype=np.int32)
        self.pages = np.zeros((num_slots, pages_for(max_seq_len, page_size)), dtype=np.int32)
        self.num_pages = np.zeros(num_slots, dtype=np.int32)
        self.known_len = np.zeros(num_slots, dtype=np.int32)
        self.device_len = np.zeros(num_slots, dtype=np.int32)
        self.cached_len = np.zeros(num_slots, dtype=np.int32)
        self.entry_len = np.zeros(num_slots, dtype=np.int32)  # known tokens when the request entered
        self.max_len = np.zeros(num_slots, dtype=np.int32)
        self.stop = np.full(num_slots, NEVER, dtype=np.int32)  # position at which the current chunk must end
        self.last_step = np.full(num_slots, -1, dtype=np.int64)  # last step that names the slot
        self.seq_id = np.zeros(num_slots, dtype=np.int64)
        self.live = np.zeros(num_slots, dtype=np.bool_)  # the request has not ended
        self._flags = np.zeros(num_slots, dtype=np.uint8)  # SamplingFlags
        self.stops_at_eos = np.zeros(num_slots, dtype=np.bool_)
        self.own_stop_ids = np.zeros(num_slots, dtype=np.bool_)
        self.top_logprobs = np.full(num_slots, -1, dtype=np.int32)  # SamplingParams.logprobs; -1: None
        # SamplingParams.prompt_logprobs; -1: None, or already reported.
        self.top_prompt_logprobs = np.full(num_slots, -1, dtype=np.int32)
        self.prompt_len = np.zeros(num_slots, dtype=np.int32)
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, request: Request, cached_pages: Int32Array) -> int:
        """Give the request a free slot, whose row begins with the pages of its cached prefix; return the slot."""
        slot = self._free.pop()
        length = len(request.token_ids)
        self.tokens[slot, :length] = request.token_ids
        self.pages[slot, : len(cached_pages)] = cached_pages
        self.num_pages[slot] = len(cached_pages)
        self.entry_len[slot] = self.known_len[slot] = self.device_len[slot] = length
        self.cached_len[slot] = len(cached_pages) * self.page_size
        self.max_len[slot] = request.max_len
        self.stop[slot] = NEVER
        self.last_step[slot] = -1
        self.seq_id[slot] = request.seq_id
        self.live[slot] = True
        sampling = request.sampling
        flags = sampling.flags
        if request.matcher is not None:
            flags |= SamplingFlags.CONSTRAINED
        if sampling.logprobs is not None or not request.prompt_scored:
            flags |= SamplingFlags.LOGPROBS
        self._flags[slot] = flags
        self.stops_at_eos[slot] = not sampling.ignore_eos
        self.own_stop_ids[slot] = bool(sampling.stop_token_ids)
        self.top_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        wanted = None if request.prompt_scored else sampling.prompt_logprobs
        self.top_prompt_logprobs[slot] = -1 if wanted is None else wanted
        self.prompt_len[slot] = request.prompt_len
        self.requests[slot] = request
        request.slot = slot
        return slot

    def leave(self, slot: int) -> None:
        """Free the slot, which no step in flight may name."""
        self.requests[slot] = None
        self._free.append(slot)

    def remaining(self, slots: IndexArray) -> Int32Array:
        """Return the number of tokens of each slot that need KV and have none yet, up to its stop.

        The last token of a request never needs KV.
        """
        wanted = np.minimum(self.device_len[slots], self.max_len[slots] - 1)
        return np.minimum(wanted, self.stop[slots]) - self.cached_len[slots]

    def prefilling(self, slots: IndexArray) -> list[int]:
        """Return the slots that lack KV of some tokens with which their requests entered."""
        found: list[int] = slots[self.cached_len[slots] < self.entry_len[slots]].tolist()
        return found

    def flags(self, slots: IndexArray) -> SamplingFlags:
        """Return the union of the flags of the slots' requests."""
        return SamplingFlags(int(np.bitwise_or.reduce(self._flags[slots])))

    def constrained(self, slots: IndexArray) -> BoolArray:
        """Return a mask of the slots whose requests have a grammar."""
        have: BoolArray = (self._flags[slots] & SamplingFlags.CONSTRAINED) != 0
        return have

    def request(self, slot: int) -> Request:
        """Return the request in a slot, which must have one."""
        request = self.requests[slot]
        assert request is not None
        return request

    def row_pages(self, slot: int) -> Int32Array:
        return self.pages[slot, : self.num_pages[slot]]

    def extend_pages(self, slots: IndexArray, counts: Int32Array, pages: Int32Array) -> Int32Array:
        """Append `counts[i]` of `pages` to the row of `slots[i]`; return [k, 3] (slot, index, page).

        Say the slots [3, 5] have 2 pages and none: counts [1, 2] of the pages [7, 8, 9] are (3, 2, 7), (5, 0, 8) and
        (5, 1, 9), which is also what the device writes to its page table.
        """
        owners = np.repeat(slots, counts)
        first_of_row = np.repeat(np.cumsum(counts) - counts, counts)
        index = self.num_pages[owners] + np.arange(len(pages), dtype=np.int32) - first_of_row.astype(np.int32)
        self.pages[owners, index] = pages
        self.num_pages[slots] += counts
        return np.stack([owners, index, pages], axis=1).astype(np.int32, copy=False)
