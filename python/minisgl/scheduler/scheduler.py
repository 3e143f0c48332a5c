"""The scheduler's decisions: admission, and the plan of each step.

It knows no device: `schedule` makes plans and `complete` takes their tokens, in the same order but not necessarily
before the next plan is made (overlap). `steps.results` applies the tokens to their requests, `steps.recovery` undoes
plans for which the device had too little memory, and only `lifecycle` changes a request's state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.core import AnyArray, Batch, CacheNode, FinishReason, Int32Array, NewRow, StepResult
from minisgl.kvcache.base import CacheHandle
from minisgl.message.engine_state import SequenceState
from minisgl.message.shared import TextOptions
from minisgl.message.to_detokenizer import StepOutput
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.cache_pools import CachePools
from minisgl.scheduler.requests.lifecycle import RequestLifecycle
from minisgl.scheduler.requests.request import Awaited, Request, RequestState
from minisgl.scheduler.requests.request_pages import RequestPages
from minisgl.scheduler.requests.state_snapshots import StateSnapshots
from minisgl.scheduler.requests.table import SlotTable
from minisgl.scheduler.steps.batch_policy import Chunks, longest_first, make_batch_policy
from minisgl.scheduler.steps.limits import StepLimits
from minisgl.scheduler.steps.recovery import StepRecovery
from minisgl.scheduler.steps.results import StepResults
from minisgl.scheduler.steps.token_scores import scored_tokens
from minisgl.step_cost import StepCost
from minisgl.structured_output.protocol import Grammars, NoGrammars

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _change(method: Callable[Concatenate[Scheduler, P], T]) -> Callable[Concatenate[Scheduler, P], T]:
    """Return a method of the scheduler that sets `is_broken` if an exception ends it."""

    @wraps(method)
    def whole(self: Scheduler, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.is_broken = True
        result = method(self, *args, **kwargs)
        self.is_broken = False
        return result

    return whole


class Scheduler:
    """Continuous batching with chunked prefill over a paged, prefix-shared KV cache.

    Pages are promised for a request's known tokens only. When the running requests outgrow the pool, the youngest (the
    last to arrive, of the lowest priority) is retracted: its computed pages go to the cache, and it waits again with
    its tokens. The oldest is never retracted, so there is always progress.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: CachePools,
        *,
        num_slots: int,
        max_seq_len: int,
        eos_token_ids: tuple[int, ...],
        grammars: Grammars | None = None,
        cost: StepCost | None = None,
        makes_vectors: bool = False,
    ) -> None:
        """`makes_vectors`: the model makes a vector of each prompt instead of tokens, which ends the request."""
        self._makes_vectors = makes_vectors
        self._limits = StepLimits(config.max_prefill_tokens, num_slots)
        self._batch_policy = make_batch_policy(config, cost)
        self._table = SlotTable(num_slots, max_seq_len, pools.pages.cache.page_size)
        self._pages = RequestPages(pools, self._table, config.max_prefill_tokens)
        self._snapshots = None
        if pools.snapshots is not None:
            self._snapshots = StateSnapshots(
                pools.snapshots, self._pages, self._table, distance=config.state_snapshot_distance
            )
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars or NoGrammars()
        self._requests = RequestLifecycle(config.schedule_policy, self._table, self._pages, self._snapshots)
        self._results = StepResults(self._table, self._requests, eos_token_ids, self._grammars)
        self._recovery = StepRecovery(self._table, self._pages, self._requests, self._snapshots, self._limits)
        self._arrived_tokens = 0  # prompt tokens that have arrived
        self._next_step = 0
        self._completed_step = -1
        self.is_broken = False  # an exception, such as that of Ctrl-C, has left pages or requests half changed

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(
        self,
        seq_id: int,
        prompt_ids: Int32Array,
        sampling: SamplingParams,
        seed: int,
        priority: int = 0,
        salt: bytes = b"",
        text: TextOptions | None = None,
        request_id: str = "",
    ) -> None:
        """Queue a validated request: prompt and max_tokens fit the context."""
        assert sampling.max_tokens is not None, "max_tokens is resolved where the request is validated"
        request = Request(
            seq_id,
            prompt_ids,
            sampling,
            seed,
            max_len=len(prompt_ids) + (1 if self._makes_vectors else sampling.max_tokens),
            arrival=self._arrived_tokens,
            prompt_len=len(prompt_ids),
            text=text or TextOptions(),
            priority=priority,
            salt=salt,
            request_id=request_id,
        )
        request.prompt_scored = sampling.prompt_logprobs is None or len(prompt_ids) == 1
        if sampling.grammar is not None:
            request.matcher = self._grammars.start(sampling)
        self._arrived_tokens += len(prompt_ids)
        self._requests.add(request)
        if request.prompt_scored and request.max_len == len(prompt_ids):
            self._requests.end(request, "length")  # there is nothing to compute

    @_change
    def end(self, seq_id: int, reason: FinishReason) -> None:
        """End a request for a reason outside of the scheduler (abort, stop string), unless it has ended already."""
        request = self._requests.find(seq_id)
        if request is not None:
            self._requests.end(request, reason)

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or an ended one still holds its slot."""
        return self._requests.has_work

    @property
    def retractions(self) -> int:
        """Number of retractions since the start."""
        return self._requests.retractions

    @property
    def failed_steps(self) -> int:
        """Number of steps for which the device had too little memory."""
        return self._recovery.failed_steps

    @property
    def is_compiling(self) -> bool:
        """True if a waiting request's grammar is still being compiled."""
        return any(request.is_compiling for request in self._requests.waiting)

    # --- a step is planned ------------------------------------------------------------------------------------

    @_change
    def schedule(self) -> Batch | None:
        """Plan the next step; None if nothing can run, at least until the steps in flight are complete."""
        self._requests.retire(self._completed_step)
        if self._snapshots is not None:
            self._snapshots.save(len(self._requests.running))
        if not self._make_room():
            return None
        running, table = self._requests.running, self._table
        chunks = self._batch_policy.chunks(
            table.cached_len[running], table.remaining(running), self._limits.prefill_tokens
        )
        new_rows = self._admit(chunks)
        running = self._requests.running
        # A snapshot that a waiting request wants may have made chunks shorter than `chunks` knows.
        remaining = table.remaining(running)
        query_lens = np.minimum(self._batch_policy.query_lens(remaining, chunks), remaining)
        chosen = query_lens > 0
        if not chosen.any():
            return None
        slots, query_lens = running[chosen], query_lens[chosen]
        if int(query_lens.max()) == 1:
            slots = longest_first(slots, table.cached_len[slots])
        step = self._next_step
        self._next_step += 1

        start_pos = table.cached_len[slots]
        new_len = start_pos + query_lens
        new_pages = self._pages.allocate(slots, self._pages.missing(slots, new_len))
        needs_sample = new_len == table.device_len[slots]
        sampling_slots = slots[needs_sample]
        batch = Batch(
            step=step,
            slots=slots.astype(np.int32),
            start_pos=start_pos,
            query_lens=query_lens,
            needs_sample=needs_sample,
            new_pages=new_pages,
            new_rows=new_rows,
            flags=table.flags(sampling_slots),
            logprobs=scored_tokens(table, slots, start_pos, new_len, sampling_slots),
            state_copies=[] if self._snapshots is None else self._snapshots.take_copies(),
        )
        table.cached_len[slots] = new_len
        table.device_len[sampling_slots] += 1
        table.last_step[slots] = step
        if self._snapshots is not None:
            self._snapshots.advance(slots, new_len)
        self._pages.planned(slots, new_len)
        return batch

    def fill(self, mask: Int32Array, batch: Batch) -> None:
        """Write the grammar bitmask of a constrained plan's sampling rows; all steps before it must be complete."""
        slots = batch.slots[batch.needs_sample].astype(np.intp)
        constrained = self._table.live[slots] & self._table.constrained(slots)
        rows = zip(slots.tolist(), constrained.tolist(), strict=True)
        self._grammars.fill(mask, [self._table.request(slot).matcher if wanted else None for slot, wanted in rows])

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self, chunks: Chunks) -> list[NewRow]:
        """Give slots to waiting requests while the step has tokens and the pool has pages; add them to `chunks`.

        If a long prompt fills the step, a short one may still join it, unless the long one has higher priority.
        """
        table = self._table
        new_rows: list[NewRow] = []
        if not self._requests.waiting or chunks.is_full:
            return new_rows
        prompts = self._requests.running[table.remaining(self._requests.running) > 1].tolist()
        highest = max((table.request(slot).priority for slot in prompts), default=-math.inf)
        for request in self._requests.waiting.candidates(
            lambda request: not request.is_compiling and not self._still_waits(request),
            lambda request: self._pages.match(request).cached_len,
        ):
            if not table.num_free or len(self._requests.running) >= self._limits.running or chunks.is_full:
                break
            if chunks.is_crowded and request.priority < highest:
                break
            prefix = self._pages.match(request)
            if request.prompt_scored and not self._requests.waiting.is_overdue(request):
                request.awaited = self._coming(request, prefix.cached_len)
                if request.awaited is not None:
                    continue
            highest = max(highest, request.priority)
            remaining = min(len(request.token_ids), request.max_len - 1) - prefix.cached_len  # as `SlotTable.remaining`
            if not chunks.accepts(prefix.cached_len, remaining):
                continue
            if not self._pages.reserve(request, prefix, len(self._requests.running)):
                break
            new_rows.append(self._enter(request, prefix))
            remaining = int(table.remaining(self._requests.running[-1:])[0])  # a snapshot may cut it
            if remaining > 1:
                chunks.add(prefix.cached_len, remaining)
        return new_rows

    def _coming(self, request: Request, cached_len: int) -> Awaited | None:
        """Return more of the request's tokens than are cached, if a running prefill will soon put them there."""
        if self._snapshots is not None:
            return self._snapshots.coming(request, cached_len, self._requests.running)
        return self._pages.coming(request, cached_len, self._requests.running)

    def _still_waits(self, request: Request) -> bool:
        """Return True if a running prefill has not come as far as the prefix for which the request waits."""
        if request.awaited is None or self._requests.waiting.is_overdue(request):
            return False
        other = self._requests.find(request.awaited.seq_id)
        if other is None or other.state is not RequestState.RUNNING:
            return False
        return bool(self._table.cached_len[other.slot] < request.awaited.length)

    def _enter(self, request: Request, prefix: CacheHandle) -> NewRow:
        window_pages = self._requests.enter(request, prefix)
        sampling = request.sampling
        stop_ids: tuple[int, ...] = ()
        if sampling.min_tokens:
            stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)
        return NewRow(
            slot=request.slot,
            token_ids=request.token_ids,
            pages=prefix.pages,
            sampling=sampling,
            seed=request.seed,
            prompt_len=request.prompt_len,
            stop_ids=stop_ids,
            window_pages=window_pages,
        )

    def _make_room(self) -> bool:
        """Retract requests until every decode can get its next page; False if steps in flight must complete first.

        Say pages have 4 tokens, and three requests of 16 tokens each hold 4 of the pool's 12 pages: each needs a fifth
        page for its next token, and none is available. The result is False while a step in flight may still end one of
        them. Then the youngest is retracted: of its 4 pages the other two get one each, and it waits with its 16
        tokens.
        """
        while True:
            running, table = self._requests.running, self._table
            if len(running) <= self._pages.unpromised:
                return True  # a decode needs one page at most
            decodes = running[table.remaining(running) == 1]
            missing = self._pages.missing(decodes, table.cached_len[decodes] + 1)
            # These include prompts with one token left, whose page is promised already.
            promised = sum(table.request(slot).reserved_pages > 0 for slot in decodes[missing > 0].tolist())
            if int(missing.sum()) - promised <= self._pages.unpromised:
                return True
            if self._completed_step < self._next_step - 1:
                return False  # steps in flight may end requests, and they name the slot that would be retracted
            youngest = max(map(table.request, running.tolist()), key=lambda request: request.precedence)
            self._requests.retract(youngest)

    # --- a step is complete -----------------------------------------------------------------------------------

    @_change
    def complete(self, batch: Batch, result: StepResult[AnyArray]) -> None:
        """Apply a step's result: a token or vector for each row that samples, in row order, and log-probabilities."""
        self._results.take(batch, result)
        self._completed_step = batch.step
        self._limits.completed()
        self._requests.retire(self._completed_step)

    def record(self, batch: Batch, seconds: float) -> None:
        """Tell the batch policy how long a completed step ran on the device."""
        self._batch_policy.record(batch, seconds)

    @_change
    def take_back(self, batches: Sequence[Batch]) -> None:
        """Undo plans that were not executed, as `StepRecovery.take_back`; all steps before must be complete."""
        self._completed_step = batches[-1].step
        self._recovery.take_back(batches)

    def take_output(self) -> StepOutput:
        """Return the events since the last call, at most one step's tokens among them."""
        return self._requests.take_output()

    # --- state for reports and checks -------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the number of pages and requests by state, for /server_info."""
        return {
            **self._pages.counts(),
            **({} if self._snapshots is None else self._snapshots.counts()),
            **self._requests.counts(),
            "failed_steps": self.failed_steps,
        }

    def seq_ids(self, batch: Batch) -> list[int]:
        """Return the sequence of each row of a step that is not yet complete."""
        found: list[int] = self._table.seq_id[batch.slots].tolist()
        return found

    def sequences(self, limit: int) -> list[SequenceState]:
        """Return up to `limit` running requests, oldest admission first, then up to `limit` waiting ones."""
        return self._requests.sequences(limit)

    def tree(self, max_nodes: int) -> list[CacheNode]:
        """Return the largest nodes of the tree of cached prefixes."""
        return self._pages.tree(max_nodes)

    def flush_cache(self) -> int:
        """Remove every cached prefix that is not locked; return the number of freed pages."""
        return self._pages.flush_cache()

    def check_balance(self) -> None:
        """Log an error if free and cached pages do not add up to all pages although nothing runs."""
        counts = self.counts()
        if counts["pages_free"] + counts["pages_cached"] != counts["pages"] or counts["pages_locked"]:
            logger.critical("pages are lost or held at idle: %s", counts)

    def check_idle(self) -> None:
        """Raise if a page or sequence is held although nothing runs; for tests, slow."""
        self._pages.check_idle()
        if self.counts()["sequences"]:
            raise RuntimeError(f"held at idle: {self.counts()}")
