"""The engine as the API server sees it: requests go out to the tokenizer workers, their answers come in.

`EngineClient` owns every open request. The map from sequence to request is the truth: a sequence is in it from before
its Generate is sent until its last output arrives, it is refused, or it is aborted. Whoever takes it out of the map
does the one thing that belongs to that, so each sequence ends exactly once, and what comes after is dropped and
counted. Prompts that wait for the tokenizer have a map of their own, because Accepted and OutputDeltas come from
different processes and nothing orders them. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from minisgl.core import InvalidRequest
from minisgl.message.socket import Sender
from minisgl.message.to_api import Accepted, OutputDelta, OutputDeltas, Refused, ToApi
from minisgl.message.to_tokenizer import Generate, GenerateOptions, Query, ToTokenizer
from minisgl.message.types import Abort, ProcessCounts
from minisgl.seeds import choice_seed, random_seed
from minisgl.server.api.http.errors import aborted, invalid, overloaded, refused, shutting_down
from minisgl.server.api.metrics import RequestMetrics
from minisgl.server.api.requests.open_request import ClientGone, Delta, Job, OpenRequest
from minisgl.server.api.requests.queries import Queries, R
from minisgl.server.api.tracing import Tracer

MAX_OPTION_BYTES = 64 * 1024 * 1024  # all choices of a request: each carries the request's options to the scheduler
HEARTBEAT_SECONDS = 1.0  # between an answer and the next query
HEARTBEAT_TIMEOUT = 30.0  # seconds to wait for an answer before asking again: a step of a slow device may take long
PROMPTS_A_TURN = 64  # are sent of a request, which may have thousands, or as many as make
OPTION_BYTES_A_TURN = 1024 * 1024


class EngineClient:
    """Owns every open request. `tokenizers` are the outboxes to the tokenizer workers, `tracer` records its end."""

    def __init__(
        self, tokenizers: Sequence[Sender[ToTokenizer]], max_sequences: int, tracer: Tracer | None = None
    ) -> None:
        self.tracer = tracer
        self._tokenizers = tokenizers
        self._max_sequences = max_sequences
        self._next_seq_id = 1
        self._round_robin = itertools.cycle(range(len(tokenizers)))
        self._by_seq_id: dict[int, OpenRequest] = {}  # requests that have not ended
        self._prompts: dict[int, OpenRequest] = {}  # neither accepted nor refused yet, by their first sequence
        self._open: set[OpenRequest] = set()
        self._num_admitted = 0  # choices of open requests: also those that have ended but wait for a slow client
        self._reached: set[OpenRequest] = set()  # by messages, but not yet their readers
        self._names: dict[str, set[OpenRequest]] = {}  # the open requests by what clients know of them
        self.metrics = RequestMetrics()
        self._queries = Queries(tokenizers)
        self._shutdown_reason: str | None = None
        self.is_shut_down = False
        self._dropped_pieces = 0

    @contextmanager
    def open(self, job: Job, names: Sequence[str] = ()) -> Iterator[OpenRequest]:
        """Send a request on its way. However the block ends, what has not finished by then is aborted.

        `names` are the ids by which `abort` finds it; the first is its id in logs.
        """
        prompts_a_turn = self._admit(job)
        request_id = names[0] if names else ""
        request = OpenRequest(job, self._next_seq_id, next(self._round_robin), self.metrics, request_id)
        self._next_seq_id += job.num_choices
        self._num_admitted += job.num_choices
        self._open.add(request)
        for name in set(names):
            self._names.setdefault(name, set()).add(request)
        try:
            self._submit(request, prompts_a_turn)
            yield request
        finally:
            self._release(request)
            for name in set(names):
                self._names[name].discard(request)
                if not self._names[name]:
                    del self._names[name]
            self._open.discard(request)
            self._num_admitted -= job.num_choices

    def _admit(self, job: Job) -> int:
        """Return the prompts that one turn of the event loop may send; ApiError if the request may not come in."""
        if self.is_shut_down:
            raise shutting_down(self._shutdown_reason)
        if job.num_choices > self._max_sequences:
            param = "n" if job.n > 1 else "prompt"
            text = f"{param}: {job.num_choices} answers are asked for, the server gives {self._max_sequences} at a time"
            raise invalid(param, text)
        if self._num_admitted + job.num_choices > self._max_sequences:
            raise overloaded(self._max_sequences)
        if job.num_choices == 1:
            return 1
        # Options are sent with each prompt, and kept of each choice.
        option_bytes = len(msgspec.msgpack.encode((job.sampling, job.text)))
        if job.num_choices * option_bytes > MAX_OPTION_BYTES:
            param = "n" if job.n > 1 else "prompt"
            text = f"{param}: {job.num_choices} answers with {option_bytes} bytes of grammar, ids and strings each"
            raise invalid(param, f"{text} are too many: together they may have {MAX_OPTION_BYTES}")
        return min(PROMPTS_A_TURN, OPTION_BYTES_A_TURN // option_bytes + 1)

    def _submit(self, request: OpenRequest, prompts_a_turn: int, first: int = 0) -> None:
        """Send its prompts from the first on, so many in each turn of the event loop, as long as it is open."""
        if request not in self._open or request.has_failed:
            return
        job, outbox = request.job, self._tokenizers[request.tokenizer]
        end = min(first + prompts_a_turn, len(job.prompts))
        shared = {name: getattr(job, name) for name in GenerateOptions.__struct_fields__}
        for index in range(first, end):
            start = request.seq_ids.start + index * job.n
            seq_ids = list(range(start, start + job.n))
            self._by_seq_id.update(dict.fromkeys(seq_ids, request))
            self._prompts[start] = request
            seed = random_seed() if job.sampling.seed is None else job.sampling.seed
            seeds = [choice_seed(seed, choice) for choice in range(job.n)]
            prompt = job.prompts[index]
            outbox.send(Generate(**shared, seq_ids=seq_ids, seeds=seeds, prompt=prompt, request_id=request.id))
        if end < len(job.prompts):
            asyncio.get_running_loop().call_soon(self._submit, request, prompts_a_turn, end)

    def _release(self, request: OpenRequest) -> None:
        """Abort what has not ended. Harmless when repeated."""
        for start in request.seq_ids[:: request.job.n]:
            self._prompts.pop(start, None)
        unfinished = [seq_id for seq_id in request.seq_ids if self._by_seq_id.pop(seq_id, None) is not None]
        for seq_id in unfinished:
            request.aborted(seq_id)
        if unfinished:
            self._tokenizers[request.tokenizer].send(Abort(unfinished))

    async def run(self, job: Job, timeout_seconds: float) -> list[Delta]:
        """Return a job's whole answer; TimeoutError, and the job aborted, if it is not there in time."""
        with self.open(job) as request:
            async with asyncio.timeout(timeout_seconds):
                return await request.complete()

    def abandon(self, request: OpenRequest) -> None:
        """Abort a request whose HTTP client has left, at once, without waiting for whoever is answering."""
        self._release(request)
        request.fail(ClientGone())

    def abort(self, name: str) -> int:
        """End the open requests of this id, which clients may give to several, with an error; return their number."""
        requests = self._names.get(name, set())
        for request in requests:
            self._release(request)
            request.fail(aborted())
        return len(requests)

    def abort_all(self) -> int:
        """End every open request with an error; return their number."""
        for request in self._open:
            self._release(request)
            request.fail(aborted())
        return len(self._open)

    def dispatch(self, messages: Iterable[ToApi]) -> None:
        """Take in messages of the API inbox. Then each request gives its reader all that they brought, at once."""
        for message in messages:
            self._dispatch(message)
        reached, self._reached = self._reached, set()
        for request in reached:
            request.deliver()

    def _dispatch(self, message: ToApi) -> None:
        match message:
            case OutputDeltas(deltas):
                self._dispatch_deltas(deltas)
            case Accepted(seq_ids):
                request = self._prompts.pop(seq_ids[0], None)
                if request is not None:
                    request.accept(message)
                    self._reached.add(request)
            case Refused():
                self._dispatch_refused(message)
            case _:
                self._queries.answer(message)

    def _dispatch_deltas(self, deltas: list[OutputDelta]) -> None:
        by_seq_id, reached = self._by_seq_id, self._reached
        now = time.perf_counter()
        for delta in deltas:
            request = by_seq_id.get(delta.seq_id)
            if request is None:  # a step or two after an abort
                self._dropped_pieces += 1
                continue
            if delta.finish is not None:
                del by_seq_id[delta.seq_id]
            request.put(delta, now)
            reached.add(request)

    def _dispatch_refused(self, message: Refused) -> None:
        self._prompts.pop(message.seq_ids[0], None)
        error = InvalidRequest(message.field, message.message, message.code)
        for seq_id in message.seq_ids:
            request = self._by_seq_id.pop(seq_id, None)
            if request is not None:
                request.fail(refused(message.status, error, request.field_names(seq_id)))

    def shut_down(self, reason: str | None) -> None:
        """End every open request with an error and admit no other."""
        self.is_shut_down, self._shutdown_reason = True, reason
        for request in self._open:
            request.fail(shutting_down(reason))
        self._queries.fail(shutting_down(reason))

    def counts(self) -> ProcessCounts:
        """Return what this process holds."""
        return ProcessCounts(
            "api",
            {
                "open_requests": len(self._open),
                "open_sequences": len(self._by_seq_id),
                "open_prompts": len(self._prompts),
                "open_queries": len(self._queries),
                "dropped_pieces": self._dropped_pieces,
                "dropped_reports": self._queries.dropped_reports,
            },
        )

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._open)

    @property
    def has_room(self) -> bool:
        """True if another sequence would be admitted."""
        return self._num_admitted < self._max_sequences

    async def ask(self, query: Callable[[int], Query], answer_type: type[R], timeout_seconds: float) -> R:
        """Return one tokenizer worker's answer to a query; `query` makes the message of an id."""
        if self.is_shut_down:
            raise shutting_down(self._shutdown_reason)
        return await self._queries.ask(query, answer_type, timeout_seconds)

    async def query_counts(self, timeout_seconds: float) -> tuple[list[ProcessCounts], bool]:
        """Return what every process holds, and True if all of them answered in time."""
        own = self.counts()
        others, complete = await self._queries.ask_counts(timeout_seconds)
        return [own, *others], complete


class Heartbeat:
    """The server's pulse: once a second every process on a request's way is asked for its counts.

    Of several ranks that is the first, which waits for the others in every step. An answer shows that tokenizers,
    scheduler and detokenizer take messages, so /health asks nobody, and the counts are at hand for /metrics.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._last = time.monotonic()
        self.counts: dict[str, dict[str, int]] = {}  # last answer by process
        self.generation_rate = 0.0  # tokens/s that came between the last two answers
        self._generated = client.metrics.generation_tokens

    async def beat_forever(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def beat(self) -> None:
        """Ask once; if not all answer, the last answer grows older."""
        processes, complete = await self._client.query_counts(HEARTBEAT_TIMEOUT)
        self.counts |= {process.process: process.counts for process in processes}
        if complete:
            generated, now = self._client.metrics.generation_tokens, time.monotonic()
            self.generation_rate = (generated - self._generated) / max(now - self._last, 1e-3)
            self._generated, self._last = generated, now

    def note(self, counts: dict[str, int]) -> None:
        """Take counts of the scheduler that came with another answer: /metrics tells the newest."""
        self.counts["scheduler-0"] = counts

    @property
    def age(self) -> float:
        """Seconds since all processes last answered."""
        return time.monotonic() - self._last
