"""Queries to the workers that are no requests: encode and decode text, flush the cache, count what processes hold.

An answer carries its query's id. Answers that come after the timeout are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from minisgl.message.shared import ProcessCounts, StatsReport, StatsRequest
from minisgl.message.socket import Sender
from minisgl.message.to_api import Reply, Unanswered
from minisgl.message.to_tokenizer import Query, ToTokenizer
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.http.errors import ApiError, no_answer, worker_failed

R = TypeVar("R", bound=Reply)


class Queries:
    """Queries that have not been answered. `tokenizers` are the outboxes to the tokenizer workers."""

    def __init__(self, tokenizers: Sequence[Sender[ToTokenizer]]) -> None:
        self._tokenizers = tokenizers
        self._round_robin = itertools.cycle(tokenizers)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by the id of the query
        self.dropped_reports = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, query: Callable[[int], Query], answer_type: type[R], timeout_seconds: float) -> R:
        """Ask one tokenizer worker and wait for the answer. `query` makes the message from a query id.

        InvalidRequest if the worker answers that the query is wrong, ApiError if it does not answer in time or fails.
        """
        try:
            with self._sent(next(self._round_robin), query) as waiting:
                async with asyncio.timeout(timeout_seconds):
                    answer = await waiting
        except TimeoutError:
            raise no_answer(timeout_seconds) from None
        if isinstance(answer, Unanswered):
            if answer.status == 400:
                raise InvalidRequest(answer.field, answer.message)
            raise worker_failed(answer.status, answer.message)
        if not isinstance(answer, answer_type):
            raise TypeError(f"a worker answered with {type(answer).__name__}, not {answer_type.__name__}")
        return answer

    async def ask_counts(self, timeout_seconds: float) -> tuple[list[ProcessCounts], bool]:
        """Return the counts of every worker, by name, and True if all of them answered in time."""
        with ExitStack() as stack:
            waiting = [stack.enter_context(self._sent(outbox, StatsRequest)) for outbox in self._tokenizers]
            done, _ = await asyncio.wait(waiting, timeout=timeout_seconds)
        reports = [answer.result() for answer in done if answer.exception() is None]
        # A query goes through its tokenizer, the scheduler and the detokenizer, so these two report several times.
        merged = {counts.process: counts for report in reports for counts in report.counts}
        return [merged[name] for name in sorted(merged)], len(reports) == len(waiting)

    @contextmanager
    def _sent(self, outbox: Sender[ToTokenizer], query: Callable[[int], ToTokenizer]) -> Iterator[asyncio.Future[Any]]:
        """Send a query, and yield the future of its answer, which is awaited within the `with` block."""
        query_id = next(self._ids)
        answer = self._waiting[query_id] = asyncio.get_running_loop().create_future()
        try:
            outbox.send(query(query_id))
            yield answer
        finally:
            del self._waiting[query_id]

    def answer(self, answer: Reply | StatsReport) -> None:
        """Give an answer to the coroutine that waits for it, if one still does."""
        waiting = self._waiting.get(answer.query_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
        elif isinstance(answer, StatsReport):
            self.dropped_reports += 1

    def fail(self, error: ApiError) -> None:
        """Fail all queries that wait for an answer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # or asyncio logs it if a shutdown cancels the task that asked for counts
