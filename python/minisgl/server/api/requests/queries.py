"""Queries to the workers that are no requests: encode and decode text, flush the cache, count what processes hold.

An answer carries its query's id. Answers that come after the timeout are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from minisgl.message.shared import ProcessCounts, StatsReport, StatsRequest
from minisgl.message.socket import Sender
from minisgl.message.to_api import Reply, Unanswered
from minisgl.message.to_tokenizer import Query, ToTokenizer
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.http.errors import ApiError, no_answer, refused

R = TypeVar("R", bound=Reply)


class Queries:
    """Queries that have not been answered. `tokenizers` are the outboxes to the tokenizer workers."""

    def __init__(self, tokenizers: Sequence[Sender[ToTokenizer]]) -> None:
        self._tokenizers = tokenizers
        self._round_robin = itertools.cycle(tokenizers)
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._reports: dict[int, asyncio.Future[list[ProcessCounts]]] = {}
        self.dropped_reports = 0

    def __len__(self) -> int:
        return len(self._replies) + len(self._reports)

    async def ask(self, query: Callable[[int], Query], answer_type: type[R], timeout_seconds: float) -> R:
        """Ask one tokenizer worker and wait for the answer. `query` makes the message from a query id.

        ApiError if the worker does not answer in time, or answers that the query is wrong.
        """
        query_id = next(self._ids)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[query_id] = reply
        try:
            next(self._round_robin).send(query(query_id))
            async with asyncio.timeout(timeout_seconds):
                answer = await reply
        except TimeoutError:
            raise no_answer(timeout_seconds) from None
        finally:
            self._replies.pop(query_id, None)
        if isinstance(answer, Unanswered):
            raise refused(answer.status, InvalidRequest(answer.field, answer.message))
        if not isinstance(answer, answer_type):
            raise TypeError(f"a worker answered with {type(answer).__name__}, not {answer_type.__name__}")
        return answer

    async def ask_counts(self, timeout_seconds: float) -> tuple[list[ProcessCounts], bool]:
        """Return the counts of every worker, by name, and True if all of them answered in time."""
        loop = asyncio.get_running_loop()
        reports: dict[int, asyncio.Future[list[ProcessCounts]]] = {}
        for outbox in self._tokenizers:
            query_id = next(self._ids)
            reports[query_id] = self._reports[query_id] = loop.create_future()
            outbox.send(StatsRequest(query_id))
        try:
            done, missing = await asyncio.wait(reports.values(), timeout=timeout_seconds)
        finally:
            for query_id in reports:
                self._reports.pop(query_id, None)
        # A query goes through its tokenizer, the scheduler and the detokenizer, so these two report several times.
        merged = {counts.process: counts for report in done for counts in report.result()}
        return [merged[name] for name in sorted(merged)], not missing

    def answer(self, answer: Reply | StatsReport) -> None:
        """Give an answer to the coroutine that waits for it, if one still does."""
        if isinstance(answer, StatsReport):
            report = self._reports.pop(answer.query_id, None)
            if report is None or report.done():
                self.dropped_reports += 1
            else:
                report.set_result(answer.counts)
        else:
            reply = self._replies.pop(answer.query_id, None)
            if reply is not None and not reply.done():
                reply.set_result(answer)

    def fail(self, error: ApiError) -> None:
        """Fail all queries that wait for a reply."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
