"""The engine as the API server sees it: requests go out to the tokenizer workers, their answers come in.

`EngineClient` owns every open request. The map from sequence to request is the truth: a sequence is in it from before
its Generate is sent until its last piece arrives, it is refused, or it is aborted. Whoever takes it out of the map
does the one thing that belongs to that, so each sequence ends exactly once, and what comes after is dropped and
counted. Prompts that wait for the tokenizer have a map of their own, because Accepted and Pieces come from different
processes and nothing orders them.

`OpenRequest` collects what has come for one HTTP request. A reader that is behind finds everything since its last
visit merged into one `Delta` a choice: memory is bounded by the length of the answer, and nobody waits for anybody.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from minisgl.core import FinishReason, InvalidRequest, SamplingParams
from minisgl.message.to_api import Accepted, Piece, Pieces, Refused, Report, ToApi
from minisgl.message.to_tokenizer import Abort, ChatPrompt, Generate, IdsPrompt, Query, TextPrompt, ToTokenizer
from minisgl.message.types import ProcessCounts, TextOptions
from minisgl.seeds import choice_seed, random_seed
from minisgl.server.api.errors import ApiError, ended_early, invalid, invalid_request, overloaded, shutting_down

ID_BYTES = 4  # of a packed token id


class Sender(Protocol):
    """The one thing asked of an outbox."""

    def send(self, message: ToTokenizer, /) -> None: ...


class ClientGone(Exception):
    """The HTTP client has left: there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks for: each prompt, answered n times. Choice i answers prompt i // n."""

    prompts: Sequence[TextPrompt | IdsPrompt | ChatPrompt]
    n: int
    sampling: SamplingParams
    text: TextOptions
    priority: int = 0
    field_names: Mapping[str, str] = field(default_factory=dict)  # our name of a field -> the client's

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class Delta:
    """What one choice got since its reader last looked."""

    __slots__ = ("_texts", "finish", "index", "stop_reason")

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._texts: list[str] = []

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        if piece.finish is not None:
            self.finish = piece.finish
            self.stop_reason = piece.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)


class OpenRequest:
    """One HTTP request, from its admission to its answer: what has arrived for it, and the way to wait for more."""

    def __init__(self, job: Job, first_sequence: int, tokenizer: int) -> None:
        self.job = job
        self.sequences = range(first_sequence, first_sequence + job.num_choices)
        self.tokenizer = tokenizer  # all its messages go to this one, in order
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._num_accepted = 0
        self._num_finished = 0
        self._cached_tokens: dict[int, int] = {}  # by prompt; n choices share what was found for the first of them
        self._pending: dict[int, Delta] = {}  # by choice, in order of arrival
        self._failure: ApiError | ClientGone | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for: Callable[[OpenRequest], bool] = OpenRequest._is_pending

    # What the reader asks.

    async def accepted(self) -> None:
        """Wait until every prompt is valid and on its way."""
        await self._until(OpenRequest._is_accepted)

    async def deltas(self) -> list[Delta]:
        """Wait until something has come; take all of it."""
        await self._until(OpenRequest._is_pending)
        pending, self._pending = self._pending, {}
        return list(pending.values())

    async def complete(self) -> list[Delta]:
        """Wait for the end of every choice; take them in order."""
        await self._until(OpenRequest._is_complete)
        pending, self._pending = self._pending, {}
        return sorted(pending.values(), key=lambda delta: delta.index)

    @property
    def exhausted(self) -> bool:
        """Everything has come and has been taken."""
        return self._is_complete() and not self._pending

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens.values())

    # What the client tells it.

    def accept(self, prompt_tokens: int) -> None:
        """One prompt is accepted."""
        self.prompt_tokens += prompt_tokens
        self._num_accepted += 1
        self._wake()

    def put(self, piece: Piece) -> None:
        """A choice has got something."""
        if piece.finish == "abort" or piece.finish == "error":
            self.fail(ended_early(piece.finish))
            return
        index = piece.sequence - self.sequences.start
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = Delta(index)
        delta.add(piece)
        self.completion_tokens += len(piece.ids) // ID_BYTES
        if piece.finish is not None:
            prompt = index // self.job.n
            cached = self._cached_tokens.get(prompt, piece.cached_tokens)
            self._cached_tokens[prompt] = min(cached, piece.cached_tokens)
            self._num_finished += 1
        self._wake()

    def fail(self, failure: ApiError | ClientGone) -> None:
        """The request as a whole has ended without an answer. The first failure counts."""
        if self._failure is None:
            self._failure = failure
        self._wake()

    def _is_accepted(self) -> bool:
        return self._num_accepted == len(self.job.prompts)

    def _is_pending(self) -> bool:
        return bool(self._pending)

    def _is_complete(self) -> bool:
        return self._num_finished == len(self.sequences) and self._is_accepted()

    async def _until(self, condition: Callable[[OpenRequest], bool]) -> None:
        """Wait for the condition, or raise the failure."""
        while self._failure is None and not condition(self):
            self._waits_for = condition
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        """Wake the reader if what it waits for is there: a reader of the whole answer is not woken by each token."""
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._failure is not None or self._waits_for(self)):
            waiter.set_result(None)


class EngineClient:
    """Owns every open request. `tokenizers` are the outboxes to the tokenizer workers."""

    def __init__(self, tokenizers: Sequence[Sender], max_sequences: int) -> None:
        self._tokenizers = tokenizers
        self._max_sequences = max_sequences
        self._next_sequence = 1
        self._round_robin = itertools.cycle(range(len(tokenizers)))
        self._sequences: dict[int, OpenRequest] = {}  # that have not ended
        self._prompts: dict[int, OpenRequest] = {}  # neither accepted nor refused yet, by their first sequence
        self._open: set[OpenRequest] = set()
        self._num_admitted = 0  # choices of open requests: also those that have ended but wait for a slow client
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[list[ProcessCounts]]] = {}
        self._shutdown_reason: str | None = None
        self.is_shut_down = False
        self._dropped_pieces = 0
        self._dropped_reports = 0

    @contextmanager
    def open(self, job: Job) -> Iterator[OpenRequest]:
        """Send a request on its way. However the block ends, what has not finished by then is aborted."""
        self._admit(job)
        request = OpenRequest(job, self._next_sequence, next(self._round_robin))
        self._next_sequence += job.num_choices
        self._num_admitted += job.num_choices
        self._open.add(request)
        try:
            self._submit(request)
            yield request
        finally:
            self._release(request)
            self._open.discard(request)
            self._num_admitted -= job.num_choices

    def _admit(self, job: Job) -> None:
        if self.is_shut_down:
            raise shutting_down(self._shutdown_reason)
        if job.num_choices > self._max_sequences:
            param = "n" if job.n > 1 else "prompt"
            text = f"{param}: {job.num_choices} answers are asked for, the server gives {self._max_sequences} at a time"
            raise invalid(param, text)
        if self._num_admitted + job.num_choices > self._max_sequences:
            raise overloaded(self._max_sequences)

    def _submit(self, request: OpenRequest) -> None:
        job, outbox = request.job, self._tokenizers[request.tokenizer]
        for index, prompt in enumerate(job.prompts):
            start = request.sequences.start + index * job.n
            sequences = list(range(start, start + job.n))
            self._sequences.update(dict.fromkeys(sequences, request))
            self._prompts[start] = request
            seed = random_seed() if job.sampling.seed is None else job.sampling.seed
            seeds = [choice_seed(seed, choice) for choice in range(job.n)]
            outbox.send(Generate(sequences, seeds, prompt, job.sampling, job.text, job.priority))

    def _release(self, request: OpenRequest) -> None:
        """Abort what has not ended. Harmless when repeated."""
        for start in request.sequences[:: request.job.n]:
            self._prompts.pop(start, None)
        unfinished = [sequence for sequence in request.sequences if self._sequences.pop(sequence, None) is not None]
        if unfinished:
            self._tokenizers[request.tokenizer].send(Abort(unfinished))

    def abandon(self, request: OpenRequest) -> None:
        """Its HTTP client has left: abort at once, without waiting for whoever is answering."""
        self._release(request)
        request.fail(ClientGone())

    def dispatch(self, message: ToApi) -> None:
        """Take in one message of the API inbox."""
        match message:
            case Pieces(pieces):
                self._dispatch_pieces(pieces)
            case Accepted(sequences, prompt_ids):
                request = self._prompts.pop(sequences[0], None)
                if request is not None:
                    request.accept(len(prompt_ids) // ID_BYTES)
            case Refused():
                self._dispatch_refused(message)
            case Report(query, counts):
                waiter = self._queries.pop(query, None)
                if waiter is None or waiter.done():
                    self._dropped_reports += 1
                else:
                    waiter.set_result(counts)

    def _dispatch_pieces(self, pieces: list[Piece]) -> None:
        sequences = self._sequences
        for piece in pieces:
            request = sequences.get(piece.sequence)
            if request is None:  # a step or two after an abort
                self._dropped_pieces += 1
                continue
            if piece.finish is not None:
                del sequences[piece.sequence]
            request.put(piece)

    def _dispatch_refused(self, refused: Refused) -> None:
        self._prompts.pop(refused.sequences[0], None)
        for sequence in refused.sequences:
            request = self._sequences.pop(sequence, None)
            if request is not None:
                job = request.job
                names = dict(job.field_names)
                if len(job.prompts) > 1:
                    names["prompt"] = f"prompt.{(sequence - request.sequences.start) // job.n}"
                request.fail(invalid_request(InvalidRequest(refused.field, refused.message), names))

    def shut_down(self, reason: str | None) -> None:
        """End every open request with an error and admit no other."""
        self.is_shut_down, self._shutdown_reason = True, reason
        for request in self._open:
            request.fail(shutting_down(reason))

    def counts(self) -> ProcessCounts:
        """What this process holds."""
        return ProcessCounts(
            "api",
            {
                "open_requests": len(self._open),
                "open_sequences": len(self._sequences),
                "open_prompts": len(self._prompts),
                "open_queries": len(self._queries),
                "dropped_pieces": self._dropped_pieces,
                "dropped_reports": self._dropped_reports,
            },
        )

    async def query_counts(self, timeout_seconds: float) -> tuple[list[ProcessCounts], bool]:
        """What every process holds, and whether all of them answered in time."""
        own = self.counts()
        loop = asyncio.get_running_loop()
        waiters: dict[int, asyncio.Future[list[ProcessCounts]]] = {}
        for outbox in self._tokenizers:
            query = next(self._query_ids)
            waiters[query] = self._queries[query] = loop.create_future()
            outbox.send(Query(query))
        try:
            done, missing = await asyncio.wait(waiters.values(), timeout=timeout_seconds)
        finally:
            for query in waiters:
                self._queries.pop(query, None)
        # Each route passes the scheduler and the detokenizer: the last report of a process counts.
        merged = {counts.process: counts for waiter in done for counts in waiter.result()}
        return [own, *(merged[name] for name in sorted(merged))], not missing
