"""Recovery from a step for which the device had too little memory: undoes its plan and all later ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from minisgl.core import Batch, Int32Array
from minisgl.scheduler.requests.lifecycle import RequestLifecycle
from minisgl.scheduler.requests.request import Request, RequestState
from minisgl.scheduler.requests.request_pages import RequestPages
from minisgl.scheduler.requests.state_snapshots import StateSnapshots
from minisgl.scheduler.requests.table import SlotTable
from minisgl.scheduler.steps.limits import StepLimits, is_small

logger = logging.getLogger(__name__)

MAX_FAILURES = 2  # small steps of a request alone that may fail before it ends with an error


class StepRecovery:
    """Retracts the requests of undone steps, and lowers the bounds on the next steps."""

    def __init__(
        self,
        table: SlotTable,
        pages: RequestPages,
        requests: RequestLifecycle,
        snapshots: StateSnapshots | None,
        limits: StepLimits,
    ) -> None:
        self._table = table
        self._pages = pages
        self._requests = requests
        self._snapshots = snapshots
        self._limits = limits
        self.failed_steps = 0

    def take_back(self, batches: Sequence[Batch]) -> None:
        """Undo plans that were not executed: the step for which the device had too little memory, and all later ones.

        All steps before must be complete. The requests of these steps are retracted, so that the device gets all their
        rows anew; they come back in smaller steps, the oldest first. A request that fails alone in a small step,
        MAX_FAILURES times without a token in between, ends with an error.
        """
        failed, table = batches[0], self._table
        alone = table.request(int(failed.slots[0])) if is_small(failed) else None
        self.failed_steps += 1
        self._limits.lower(failed)
        logger.warning(
            "out of memory in a step of %d requests and %d tokens; next: at most %d requests, prefills of %d tokens",
            *(len(failed.slots), failed.num_tokens, self._limits.running, self._limits.prefill_tokens),
        )
        for batch in reversed(batches):
            table.cached_len[batch.slots] = batch.start_pos
        named = {slot for batch in batches for slot in batch.slots.tolist()}
        named |= {row.slot for batch in batches for row in batch.new_rows}
        requests = [request for slot in sorted(named) if (request := table.requests[slot]) is not None]
        self._retract_unwritten(requests, batches[-1].step)
        if self._snapshots is not None:
            self._snapshots.take_back(batches)
        if alone is not None and alone.state is RequestState.RETRACTED:
            alone.failures += 1
            if alone.failures == MAX_FAILURES:
                name = {"request_id": alone.request_id}
                logger.error("the device has too little memory for request %(request_id)s alone", name, extra=name)
                self._requests.end(alone, "error")

    def _retract_unwritten(self, requests: Sequence[Request], last_step: int) -> None:
        """Retract requests, and remove their cached pages whose K and V were never written.

        A chunk's pages are in the cache from its plan on. A retraction puts even unwritten ones there, so they are
        removed afterwards. Requests that shared them entered in one of the undone steps, so they are retracted too. No
        step is in flight: `last_step` is the last that was planned.
        """
        table = self._table
        unwritten: list[tuple[Request, int]] = []
        unwritten_pages: list[Int32Array] = []
        for request in requests:
            assert request.prefix is not None
            written = int(table.cached_len[request.slot])
            unwritten_pages.append(request.prefix.pages[written // table.page_size :])
            length = self._pages.unwritten(request, written)
            if length is not None:
                table.cached_len[request.slot] = request.prefix.cached_len
                unwritten.append((request, length))
        for request in requests:
            if request.state is RequestState.RUNNING:
                if int(table.known_len[request.slot]) > len(request.token_ids):
                    request.failures = 0
                self._requests.retract(request)
        self._requests.retire(last_step)
        for pages in unwritten_pages:
            self._pages.forget_windows(pages)
        for request, length in unwritten:
            self._pages.forget(request, length)
