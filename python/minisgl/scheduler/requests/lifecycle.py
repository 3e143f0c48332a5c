"""Requests from their arrival to their end: makes every state transition that the docstring of `request` draws.

`end` only marks a request; `retire` gives back its slot, pages and locks once the last step that names them is
complete.
"""

from __future__ import annotations

import time
from itertools import islice

import numpy as np

from minisgl.config.scheduler import SchedulePolicy
from minisgl.core import ErrorCause, FinishReason, IndexArray, Int32Array
from minisgl.kvcache.base import CacheHandle
from minisgl.message.engine_state import SequenceState
from minisgl.message.to_detokenizer import End, Open, StepOutput
from minisgl.scheduler.requests.request import Request, RequestState, sequence_state
from minisgl.scheduler.requests.request_pages import RequestPages
from minisgl.scheduler.requests.state_snapshots import StateSnapshots
from minisgl.scheduler.requests.table import SlotTable
from minisgl.scheduler.requests.waiting_queue import WaitingQueue


class RequestLifecycle:
    """All requests by state, and the output since it was last taken."""

    def __init__(
        self, policy: SchedulePolicy, table: SlotTable, pages: RequestPages, snapshots: StateSnapshots | None
    ) -> None:
        self._table = table
        self._pages = pages
        self._snapshots = snapshots
        self.waiting = WaitingQueue(policy)
        self.running: IndexArray = np.empty(0, dtype=np.intp)  # slots, oldest admission first
        self._retiring: list[int] = []  # slots of ended requests that a step in flight may still name
        self._by_seq_id: dict[int, Request] = {}
        self.output = StepOutput()  # events since the last `take_output`
        self.retractions = 0
        self._prefix_tokens_queried = 0  # prompt tokens of all requests that entered
        self._prefix_tokens_hit = 0  # of these, tokens found in the cache

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or an ended one still holds its slot."""
        return bool(self.waiting or len(self.running) or self._retiring or self.output.ended)

    def find(self, seq_id: int) -> Request | None:
        """Return the request, unless it has ended."""
        return self._by_seq_id.get(seq_id)

    def add(self, request: Request) -> None:
        """Add a new request to the waiting queue."""
        self._by_seq_id[request.seq_id] = request
        self.waiting.add(request)

    def enter(self, request: Request, prefix: CacheHandle) -> Int32Array | None:
        """Give a slot to a request whose pages are reserved; return the windowed pages of its prefix, if any."""
        if request.state is RequestState.WAITING:
            self._report_open(request, prefix.cached_len)
            self._prefix_tokens_queried += len(request.token_ids)
            self._prefix_tokens_hit += prefix.cached_len
        self.waiting.admitted(request)
        request.hit_tokens = prefix.cached_len
        request.state = RequestState.RUNNING
        window_pages = self._pages.enter(request, prefix)
        self.running = np.append(self.running, request.slot)
        if self._snapshots is not None:
            self._snapshots.enter(request, prefix)
        return window_pages

    def retract(self, request: Request) -> None:
        """Take slot and pages from a running request, which waits again with its tokens. No step may be in flight."""
        slot = request.slot
        request.token_ids = self._table.tokens[slot, : self._table.known_len[slot]].copy()
        request.state = RequestState.RETRACTED
        request.prompt_scores.clear()
        self._stop_running(slot)
        self._pages.give_back(request)
        self.waiting.add(request)
        self.retractions += 1

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        cause: ErrorCause | None = None,
    ) -> None:
        """Mark the request as ended; `retire` gives back what it holds."""
        del self._by_seq_id[request.seq_id]
        self.output.ended.append(End(request.seq_id, reason, stop_token, cause))
        if request.state is RequestState.RUNNING:
            self._pages.record_outcome(request, is_finite=cause != "logits_not_finite")
            self._stop_running(request.slot)
            self._retiring.append(request.slot)
        else:
            self.waiting.remove(request)
            if request.state is RequestState.WAITING:
                self._report_open(request, 0)
        request.state = RequestState.FINISHED

    def retire(self, completed_step: int) -> None:
        """Give back slots, pages and locks of ended requests that no step after `completed_step` names."""
        if not self._retiring:
            return
        last_step = self._table.last_step
        for slot in [slot for slot in self._retiring if last_step[slot] <= completed_step]:
            self._retiring.remove(slot)
            self._pages.give_back(self._table.request(slot))

    def take_output(self) -> StepOutput:
        """Return the events since the last call, at most one step's tokens among them."""
        output, self.output = self.output, StepOutput()
        return output

    def counts(self) -> dict[str, int]:
        """Return the number of requests by state, and totals since the start."""
        return {
            "requests_waiting": len(self.waiting),
            "tokens_waiting": sum(len(request.token_ids) for request in self.waiting),
            "requests_running": len(self.running),
            "requests_retiring": len(self._retiring),
            "sequences": len(self._by_seq_id),
            "retractions": self.retractions,
            "prefix_tokens_queried": self._prefix_tokens_queried,
            "prefix_tokens_hit": self._prefix_tokens_hit,
        }

    def sequences(self, limit: int) -> list[SequenceState]:
        """Return up to `limit` running requests, oldest admission first, then up to `limit` waiting ones."""
        table = self._table
        running = map(table.request, self.running[:limit].tolist())
        found = [
            sequence_state(request, int(table.cached_len[request.slot]), int(table.known_len[request.slot]))
            for request in running
        ]
        return found + [sequence_state(request, 0, len(request.token_ids)) for request in islice(self.waiting, limit)]

    def _report_open(self, request: Request, cached_tokens: int) -> None:
        now = time.perf_counter()
        self.output.opened.append(Open(request.seq_id, request.text, cached_tokens, request.sampling.min_tokens, now))

    def _stop_running(self, slot: int) -> None:
        self._table.live[slot] = False
        self.running = self.running[self.running != slot]
