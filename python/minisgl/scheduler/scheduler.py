"""The scheduler's decisions: admission, the plan of each step, what a finished step means, and giving things back.

It knows no device: `schedule` makes plans and `complete` takes the tokens they brought, in the same order but not
necessarily before the next plan is made (overlap). Whatever ends a request only marks it; `_retire` is the one place
where slots, pages and locks are given back, and only after the last step that names them is complete.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.core import (
    Batch,
    EnteringRow,
    FinishReason,
    Int32Array,
    SamplingParams,
    pages_for,
)
from minisgl.kvcache.base import CacheManager
from minisgl.kvcache.pages import PagePool
from minisgl.message.to_detokenizer import End
from minisgl.scheduler import policy
from minisgl.scheduler.request import Request, RequestState
from minisgl.scheduler.table import SlotTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entered:
    """A request has entered a slot, or ends without ever having done so: its tokens may come from now on."""

    sequence: int
    cached_tokens: int  # of its prompt, found in the cache


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the world learns after a step: who entered, one new token each for `sequences`, and who ended."""

    entered: list[Entered]
    sequences: list[int]
    tokens: Int32Array
    ended: list[End]

    def __bool__(self) -> bool:
        return bool(self.entered or self.sequences or self.ended)


class Scheduler:
    """Continuous batching with chunked prefill over a paged, prefix-shared KV cache."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        cache: CacheManager,
        num_pages: int,
        num_slots: int,
        max_seq_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._max_prefill_tokens = config.max_prefill_tokens
        self._page_size = cache.page_size
        self._cache = cache
        self._pages = PagePool(num_pages, cache)
        self._table = SlotTable(num_slots, max_seq_len, cache.page_size)
        self._eos = np.asarray(eos_token_ids, dtype=np.int32)
        self._waiting: deque[Request] = deque()
        self._running: list[int] = []  # slots, oldest first
        self._running_array: Int32Array = np.empty(0, dtype=np.int32)  # the same, rebuilt when it changes
        self._retiring: list[int] = []  # slots of ended requests that a step in flight may still name
        self._by_sequence: dict[int, Request] = {}
        self._reserved_pages = 0  # promised to running requests and not yet allocated
        self._next_step = 0
        self._completed_step = -1
        # Since the last report:
        self._entered: list[Entered] = []
        self._new_sequences: list[int] = []
        self._new_tokens: Int32Array = np.empty(0, dtype=np.int32)
        self._ended: list[End] = []

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, sequence: int, prompt_ids: Int32Array, sampling: SamplingParams, seed: int) -> None:
        """Queue a validated request: prompt and max_tokens fit the context."""
        assert sampling.max_tokens is not None, "max_tokens is resolved where the request is validated"
        request = Request(sequence, prompt_ids, sampling, seed, max_len=len(prompt_ids) + sampling.max_tokens)
        self._by_sequence[sequence] = request
        self._waiting.append(request)

    def end(self, sequence: int, reason: FinishReason) -> None:
        """End a request from outside (abort, stop string). One that has ended already is passed over."""
        request = self._by_sequence.get(sequence)
        if request is not None:
            self._end(request, reason)

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or has to be given back."""
        return bool(self._waiting or self._running or self._retiring or self._ended)

    # --- a step is planned ------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Plan the next step, or None when there is nothing that could run now."""
        self._retire()
        entering = self._admit()
        running = self._running_array
        table = self._table
        lengths = policy.prefill_first(table.remaining(running), self._max_prefill_tokens)
        chosen = lengths > 0
        if not chosen.any():
            return None
        slots, lengths = running[chosen], lengths[chosen]
        step = self._next_step
        self._next_step += 1

        starts = table.cached_len[slots]
        new_len = starts + lengths
        new_pages = self._allocate(slots, -(-new_len // self._page_size) - table.num_pages[slots])
        samples = new_len == table.device_len[slots]
        sampling_slots = slots[samples]
        batch = Batch(
            step=step,
            slots=slots,
            starts=starts,
            lengths=lengths,
            samples=samples,
            new_pages=new_pages,
            entering=entering,
            greedy=not table.sampled[sampling_slots].any(),
            filtered=bool(table.filtered[sampling_slots].any()),
        )
        table.cached_len[slots] = new_len
        table.device_len[sampling_slots] += 1
        table.last_step[slots] = step
        self._share_prompts(slots[new_len == table.prompt_len[slots]])
        return batch

    def _admit(self) -> list[EnteringRow]:
        """Move requests from the queue's head to slots while a step's prefill budget and the pages last."""
        table = self._table
        remaining = table.remaining(self._running_array)
        budget = self._max_prefill_tokens - int(remaining[remaining > 1].sum())
        entering: list[EnteringRow] = []
        while self._waiting and table.num_free and budget > 0:
            request = self._waiting[0]
            # At least the last prompt token is computed, because its logits choose the first new one.
            prefix = self._cache.match(request.prompt_ids[:-1])
            self._cache.lock(prefix)
            # The last token of a request is never written to the cache.
            needed = pages_for(request.max_len - 1, self._page_size) - len(prefix.pages)
            if needed > self._pages.available - self._reserved_pages:
                self._cache.unlock(prefix)
                break
            self._waiting.popleft()
            request.state = RequestState.RUNNING
            request.prefix = prefix
            self._entered.append(Entered(request.sequence, prefix.cached_len))
            request.reserved_pages = needed
            self._reserved_pages += needed
            self._running.append(table.enter(request, prefix.pages))
            budget -= len(request.prompt_ids) - prefix.cached_len
            entering.append(self._entering_row(request))
        if entering:
            self._running_array = np.asarray(self._running, dtype=np.int32)
        return entering

    def _entering_row(self, request: Request) -> EnteringRow:
        assert request.prefix is not None
        return EnteringRow(
            slot=request.slot,
            token_ids=request.prompt_ids,
            pages=request.prefix.pages,
            sampling=request.sampling,
            seed=request.seed,
        )

    def _allocate(self, slots: Int32Array, counts: Int32Array) -> Int32Array:
        """Pages for the rows that cross a page boundary: [k, 3] (slot, index in the row, page)."""
        if not counts.any():
            return np.empty((0, 3), dtype=np.int32)
        crossing = counts > 0
        slots, counts = slots[crossing], counts[crossing].astype(np.int32)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            request = self._request(slot)
            request.reserved_pages -= count
        total = int(counts.sum())
        self._reserved_pages -= total
        return self._table.extend_pages(slots, counts, self._pages.allocate(total))

    def _share_prompts(self, slots: Int32Array) -> None:
        """Put prompts whose last chunk is planned into the cache: any later step may read what this one writes.

        Where another request came first with the same prefix, this one keeps its own pages until it ends: its row
        must not change under a running step, and locking the other's pages too would take memory that admission
        has promised to others.
        """
        for slot in slots.tolist():
            request = self._request(slot)
            assert request.prefix is not None
            prompt = request.prompt_ids
            if self._cache.match(prompt).cached_len > request.prefix.cached_len:
                continue
            whole = len(prompt) // self._page_size
            shared = self._cache.insert(prompt[: whole * self._page_size], self._table.pages[slot, :whole]).handle
            self._cache.lock(shared)
            self._cache.unlock(request.prefix)
            request.prefix = shared

    # --- a step is complete -----------------------------------------------------------------------------------

    def complete(self, batch: Batch, tokens: Int32Array) -> None:
        """Take the tokens that a step sampled, one for each row that samples, in row order."""
        table = self._table
        slots = batch.slots[batch.samples]
        live = table.live[slots]  # the others ended while the step ran: their tokens are dropped
        slots, tokens = slots[live], tokens[live]
        table.tokens[slots, table.known_len[slots]] = tokens
        table.known_len[slots] += 1

        stop = np.isin(tokens, self._eos) & table.stops_at_eos[slots]
        for row in np.flatnonzero(table.own_stop_ids[slots]).tolist():
            stop[row] |= int(tokens[row]) in self._request(int(slots[row])).sampling.stop_token_ids
        full = table.known_len[slots] == table.max_len[slots]
        for row in np.flatnonzero(stop | full).tolist():
            request = self._request(int(slots[row]))
            if stop[row]:
                self._end(request, "stop", stop_token=int(tokens[row]))
            else:
                self._end(request, "length")
        self._new_sequences = table.sequence[slots].tolist()
        self._new_tokens = tokens
        self._completed_step = batch.step
        self._retire()

    def report(self) -> StepReport:
        """What happened since the last report."""
        report = StepReport(self._entered, self._new_sequences, self._new_tokens, self._ended)
        self._entered = []
        self._new_sequences, self._new_tokens, self._ended = [], np.empty(0, dtype=np.int32), []
        return report

    # --- a request ends ---------------------------------------------------------------------------------------

    def _end(self, request: Request, reason: FinishReason, stop_token: int | None = None) -> None:
        """Mark the request as ended. What it holds is given back by `_retire`."""
        del self._by_sequence[request.sequence]
        self._ended.append(End(request.sequence, reason, stop_token))
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._entered.append(Entered(request.sequence, cached_tokens=0))
        else:
            self._table.live[request.slot] = False
            self._running.remove(request.slot)
            self._running_array = np.asarray(self._running, dtype=np.int32)
            self._retiring.append(request.slot)
        request.state = RequestState.FINISHED

    def _retire(self) -> None:
        """Give back slots, pages and locks of ended requests that no incomplete step names."""
        if not self._retiring:
            return
        last_step = self._table.last_step
        for slot in [slot for slot in self._retiring if last_step[slot] <= self._completed_step]:
            self._retiring.remove(slot)
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        table = self._table
        request = self._request(slot)
        assert request.prefix is not None
        # Of a discarded late step, the KV of a token that never reached the host is not worth keeping.
        whole = min(int(table.cached_len[slot]), int(table.known_len[slot])) // self._page_size
        pages = table.row_pages(slot)
        result = self._cache.insert(table.tokens[slot, : whole * self._page_size], pages[:whole])
        self._cache.unlock(request.prefix)
        request.prefix = None
        self._pages.free(result.duplicates)
        self._pages.free(pages[whole:])
        self._reserved_pages -= request.reserved_pages
        table.leave(slot)

    # --- what others may ask ----------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Pages and requests by state, for /server_info."""
        return {
            "pages": self._pages.num_pages,
            "pages_free": self._pages.allocator.num_free,
            "pages_cached": self._cache.cached_pages,
            "pages_locked": self._cache.locked_pages,
            "pages_reserved": self._reserved_pages,
            "requests_waiting": len(self._waiting),
            "requests_running": len(self._running),
            "requests_retiring": len(self._retiring),
            "sequences": len(self._by_sequence),
        }

    def check_balance(self) -> None:
        """Say so if, with nothing to do, free + cached pages are not all pages. Costs nothing."""
        counts = self.counts()
        if counts["pages_free"] + counts["pages_cached"] != counts["pages"] or counts["pages_locked"]:
            logger.critical("pages are lost or held at idle: %s", counts)

    def check_idle(self) -> None:
        """Raise if anything is held although nothing runs: free + cached pages must be all pages."""
        self._cache.check()
        self._pages.check_idle()
        if self._by_sequence or self._reserved_pages or self._cache.locked_pages:
            raise RuntimeError(f"held at idle: {self.counts()}")

    def _request(self, slot: int) -> Request:
        request = self._table.requests[slot]
        assert request is not None
        return request
