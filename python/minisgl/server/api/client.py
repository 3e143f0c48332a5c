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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from minisgl.core import FinishReason, InvalidRequest, SamplingParams
from minisgl.message.to_api import Accepted, Echo, Piece, Pieces, Refused, Reply, Report, ToApi, Unanswered
from minisgl.message.to_tokenizer import (
    Abort,
    ChatPrompt,
    Generate,
    IdsPrompt,
    Query,
    Question,
    TextPrompt,
    ToTokenizer,
)
from minisgl.message.types import PackedIds, PositionLogprobs, ProcessCounts, TextOptions, unpack_ids
from minisgl.seeds import choice_seed, random_seed
from minisgl.server.api.errors import (
    ApiError,
    aborted,
    ended_early,
    invalid,
    invalid_request,
    no_answer,
    overloaded,
    shutting_down,
)
from minisgl.server.api.metrics import RequestMetrics, SequenceClock

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
    truncate: int | None = None  # tokens of each prompt to keep; -1: as many as fit
    echo: bool = False  # the prompts' texts are wanted back
    cache_salt: str = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class Delta:
    """What one choice got since its reader last looked."""

    __slots__ = ("_ids", "_texts", "finish", "index", "logprobs", "prompt_logprobs", "stop_reason")

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: list[PositionLogprobs] = []  # of the ids, if asked for
        self.prompt_logprobs: list[PositionLogprobs] = []  # of all but the prompt's first id, if asked for; once
        self._texts: list[str] = []
        self._ids: list[PackedIds] = []

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._ids.append(piece.ids)
        if piece.logprobs:
            self.logprobs += piece.logprobs
        if piece.prompt_logprobs:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finish is not None:
            self.finish = piece.finish
            self.stop_reason = piece.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def pieces(self) -> Iterator[tuple[str, int]]:
        """The text as it came, piece by piece, each with its number of ids."""
        return zip(self._texts, [len(ids) // ID_BYTES for ids in self._ids], strict=True)

    @property
    def token_ids(self) -> list[int]:
        """May be ahead of the text, of which some may be held back."""
        ids: list[int] = unpack_ids(b"".join(self._ids)).tolist()
        return ids


class OpenRequest:
    """One HTTP request, from its admission to its answer: what has arrived for it, and the way to wait for more."""

    def __init__(self, job: Job, first_sequence: int, tokenizer: int, metrics: RequestMetrics) -> None:
        self.job = job
        self.sequences = range(first_sequence, first_sequence + job.num_choices)
        self.tokenizer = tokenizer  # all its messages go to this one, in order
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.prompt_ids: dict[int, PackedIds] = {}  # by prompt
        self.prompt_ends: dict[int, str] = {}  # by prompt: how a conversation's prompt ends
        self.echoes: dict[int, Echo] = {}  # by prompt, of those who asked
        now = time.perf_counter()
        self._clocks = [SequenceClock(metrics, now) for _ in self.sequences]
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

    def put(self, piece: Piece, now: float) -> None:
        """A choice has got something, at this time of `perf_counter`."""
        index = piece.sequence - self.sequences.start
        clock = self._clocks[index]
        if piece.ids:
            clock.tokens(len(piece.ids) // ID_BYTES, now)
        if piece.finish is not None:
            clock.end(piece.finish, now)
            if piece.finish == "abort" or piece.finish == "error":
                self.fail(ended_early(piece.finish))
                return
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

    def aborted(self, sequence: int) -> None:
        """A choice has been given up."""
        self._clocks[sequence - self.sequences.start].end("abort", time.perf_counter())

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
        self._names: dict[str, OpenRequest] = {}  # the open requests by what clients know of them
        self.metrics = RequestMetrics()
        self._query_ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}  # to questions
        self._queries: dict[int, asyncio.Future[list[ProcessCounts]]] = {}
        self._shutdown_reason: str | None = None
        self.is_shut_down = False
        self._dropped_pieces = 0
        self._dropped_reports = 0

    @contextmanager
    def open(self, job: Job, names: Sequence[str] = ()) -> Iterator[OpenRequest]:
        """Send a request on its way. However the block ends, what has not finished by then is aborted.

        `names` are the ids by which `abort` finds it.
        """
        self._admit(job)
        request = OpenRequest(job, self._next_sequence, next(self._round_robin), self.metrics)
        self._next_sequence += job.num_choices
        self._num_admitted += job.num_choices
        self._open.add(request)
        names = [name for name in names if name not in self._names]  # an id that a client sent twice is the first's
        self._names.update(dict.fromkeys(names, request))
        try:
            self._submit(request)
            yield request
        finally:
            self._release(request)
            for name in names:
                del self._names[name]
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
            outbox.send(
                Generate(
                    sequences,
                    seeds,
                    prompt,
                    job.sampling,
                    job.text,
                    job.priority,
                    job.truncate,
                    job.echo,
                    job.cache_salt,
                )
            )

    def _release(self, request: OpenRequest) -> None:
        """Abort what has not ended. Harmless when repeated."""
        for start in request.sequences[:: request.job.n]:
            self._prompts.pop(start, None)
        unfinished = [sequence for sequence in request.sequences if self._sequences.pop(sequence, None) is not None]
        for sequence in unfinished:
            request.aborted(sequence)
        if unfinished:
            self._tokenizers[request.tokenizer].send(Abort(unfinished))

    async def run(self, job: Job, timeout_seconds: float) -> list[Delta]:
        """A job's whole answer; TimeoutError, and the job aborted, if it is not there in time."""
        with self.open(job) as request:
            async with asyncio.timeout(timeout_seconds):
                return await request.complete()

    def abandon(self, request: OpenRequest) -> None:
        """Its HTTP client has left: abort at once, without waiting for whoever is answering."""
        self._release(request)
        request.fail(ClientGone())

    def abort(self, name: str) -> bool:
        """End the open request of this id with an error; False if there is none."""
        request = self._names.get(name)
        if request is not None:
            self._release(request)
            request.fail(aborted())
        return request is not None

    def abort_all(self) -> int:
        """End every open request with an error; how many there were."""
        for request in self._open:
            self._release(request)
            request.fail(aborted())
        return len(self._open)

    def dispatch(self, message: ToApi) -> None:
        """Take in one message of the API inbox."""
        match message:
            case Pieces(pieces):
                self._dispatch_pieces(pieces)
            case Accepted(sequences, prompt_ids, echo, prompt_end):
                request = self._prompts.pop(sequences[0], None)
                if request is not None:
                    prompt = (sequences[0] - request.sequences.start) // request.job.n
                    request.prompt_ids[prompt] = prompt_ids
                    request.prompt_ends[prompt] = prompt_end
                    num_tokens = len(prompt_ids) // ID_BYTES
                    if echo is not None:
                        request.echoes[prompt] = echo
                    request.accept(num_tokens)
                    self.metrics.prompt_tokens += num_tokens
                    self.metrics.request_prompt_tokens.observe(num_tokens)
            case Refused():
                self._dispatch_refused(message)
            case Report(query, counts):
                waiter = self._queries.pop(query, None)
                if waiter is None or waiter.done():
                    self._dropped_reports += 1
                else:
                    waiter.set_result(counts)
            case _:
                reply = self._replies.pop(message.query, None)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    def _dispatch_pieces(self, pieces: list[Piece]) -> None:
        sequences = self._sequences
        now = time.perf_counter()
        for piece in pieces:
            request = sequences.get(piece.sequence)
            if request is None:  # a step or two after an abort
                self._dropped_pieces += 1
                continue
            if piece.finish is not None:
                del sequences[piece.sequence]
            request.put(piece, now)

    def _dispatch_refused(self, refused: Refused) -> None:
        self._prompts.pop(refused.sequences[0], None)
        for sequence in refused.sequences:
            request = self._sequences.pop(sequence, None)
            if request is not None:
                job = request.job
                names = dict(job.field_names)
                if len(job.prompts) > 1:
                    names["prompt"] = f"prompt.{(sequence - request.sequences.start) // job.n}"
                request.fail(invalid_request(InvalidRequest(refused.field, refused.message, refused.code), names))

    def shut_down(self, reason: str | None) -> None:
        """End every open request with an error and admit no other."""
        self.is_shut_down, self._shutdown_reason = True, reason
        for request in self._open:
            request.fail(shutting_down(reason))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(shutting_down(reason))

    def counts(self) -> ProcessCounts:
        """What this process holds."""
        return ProcessCounts(
            "api",
            {
                "open_requests": len(self._open),
                "open_sequences": len(self._sequences),
                "open_prompts": len(self._prompts),
                "open_queries": len(self._queries) + len(self._replies),
                "dropped_pieces": self._dropped_pieces,
                "dropped_reports": self._dropped_reports,
            },
        )

    async def ask(self, question: Callable[[int], Question], timeout_seconds: float) -> Reply:
        """Ask one tokenizer worker and wait for the answer. `question` makes the message for a query's number."""
        if self.is_shut_down:
            raise shutting_down(self._shutdown_reason)
        query = next(self._query_ids)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[query] = reply
        try:
            self._tokenizers[next(self._round_robin)].send(question(query))
            async with asyncio.timeout(timeout_seconds):
                answer = await reply
        except TimeoutError:
            raise no_answer(timeout_seconds) from None
        finally:
            self._replies.pop(query, None)
        if isinstance(answer, Unanswered):
            raise invalid(answer.field, answer.message)
        return answer

    @property
    def has_room(self) -> bool:
        """Another sequence would be admitted."""
        return self._num_admitted < self._max_sequences

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
