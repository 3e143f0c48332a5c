"""The engine as the API server sees it: requests go out to the tokenizer workers, and their output comes in.

`EngineClient` owns every open request. The map from sequence to request is the single source of truth: a sequence is in
it from before its Generate is sent until its last output arrives, it is refused, or it is aborted. The code that
removes it from the map also ends it, so each sequence ends exactly once; output that comes later is dropped and
counted. Prompts that wait for the tokenizer have a map of their own, because Accepted and OutputDeltas come from
different processes and in no order. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from minisgl.message.shared import Abort, ProcessCounts
from minisgl.message.socket import Sender
from minisgl.message.to_api import Accepted, OutputDelta, OutputDeltas, Refused, ToApi
from minisgl.message.to_tokenizer import Generate, GenerateOptions, Query, ToTokenizer
from minisgl.sampling_params import InvalidRequest
from minisgl.seeds import choice_seed, random_seed
from minisgl.server.api.http.errors import (
    ApiError,
    aborted,
    invalid_request,
    overloaded,
    shutting_down,
    worker_failed,
)
from minisgl.server.api.metrics import RequestMetrics
from minisgl.server.api.requests.open_request import ClientGone, Job, OpenRequest
from minisgl.server.api.requests.queries import Queries, R
from minisgl.server.api.tracing import Tracer

MAX_OPTION_BYTES = 64 * 1024 * 1024  # of all choices of a request, each of which carries the options to the scheduler
HEARTBEAT_SECONDS = 1.0  # between an answer and the next query
HEARTBEAT_TIMEOUT = 30.0  # seconds to wait for an answer before asking again: a step of a slow device may take long
# Bounds on what one request, which may have thousands of prompts, sends in one turn of the event loop.
PROMPTS_A_TURN = 64
OPTION_BYTES_A_TURN = 1024 * 1024


class EngineClient:
    """Owns every open request. `tokenizers` are the outboxes to the tokenizer workers; `tracer` records each end."""

    def __init__(
        self, tokenizers: Sequence[Sender[ToTokenizer]], max_sequences: int, tracer: Tracer | None = None
    ) -> None:
        self.tracer = tracer
        self._tokenizers = tokenizers
        self._max_sequences = max_sequences
        self._next_seq_id = 1
        self._round_robin = itertools.cycle(range(len(tokenizers)))
        self._by_seq_id: dict[int, OpenRequest] = {}  # request of each sequence that has not ended
        self._prompts: dict[int, OpenRequest] = {}  # request of each prompt not yet accepted, by its first sequence
        self._open: set[OpenRequest] = set()
        self._num_admitted = 0  # choices of open requests, also of those that have ended and wait for a slow client
        self._reached: set[OpenRequest] = set()  # requests with output that their readers have not been given yet
        self._names: dict[str, set[OpenRequest]] = {}  # open requests by the ids that clients may abort them with
        self.metrics = RequestMetrics()
        self._queries = Queries(tokenizers)
        self._shutdown_reason: str | None = None
        self.is_shut_down = False
        self._dropped_pieces = 0

    @contextmanager
    def open(self, job: Job, names: Sequence[str] = ()) -> Iterator[OpenRequest]:
        """Send a request to the engine. When the block ends, whatever the reason, unfinished sequences are aborted.

        `names` are the ids by which `abort` finds it; the first is its id in logs.
        """
        prompts_a_turn = self._admit(job)
        request_id = names[0] if names else ""
        tokenizer = next(self._round_robin)
        request = OpenRequest(job, self._next_seq_id, tokenizer, self.metrics, request_id)
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
            request.release_logprobs()
            for name in set(names):
                self._names[name].discard(request)
                if not self._names[name]:
                    del self._names[name]
            self._open.discard(request)
            self._num_admitted -= job.num_choices

    def _admit(self, job: Job) -> int:
        """Return the number of prompts to send in a turn of the event loop; ApiError if the request is refused."""
        if self.is_shut_down:
            raise shutting_down(self._shutdown_reason)
        param = "n" if job.n > 1 else "prompt"
        if job.num_choices > self._max_sequences:
            text = f"{param}: {job.num_choices} answers are asked for, the server gives {self._max_sequences} at a time"
            raise ApiError(400, text, param=param)
        if self._num_admitted + job.num_choices > self._max_sequences:
            raise overloaded(self._max_sequences)
        if job.num_choices == 1:
            return 1
        # Options are sent with each prompt, and the scheduler keeps them for each choice.
        option_bytes = len(msgspec.msgpack.encode((job.sampling, job.text)))
        if job.num_choices * option_bytes > MAX_OPTION_BYTES:
            text = f"{param}: {job.num_choices} answers with {option_bytes} bytes of grammar, ids and strings each"
            raise ApiError(400, f"{text} are too many: together they may have {MAX_OPTION_BYTES}", param=param)
        return min(PROMPTS_A_TURN, OPTION_BYTES_A_TURN // option_bytes + 1)

    def _submit(self, request: OpenRequest, prompts_a_turn: int, first: int = 0) -> None:
        """Send the prompts from number `first` on, `prompts_a_turn` at a time, as long as the request is open."""
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
        """Abort the sequences that have not ended. May be called repeatedly."""
        for start in request.seq_ids[:: request.job.n]:
            self._prompts.pop(start, None)
        unfinished = [seq_id for seq_id in request.seq_ids if self._by_seq_id.pop(seq_id, None) is not None]
        for seq_id in unfinished:
            request.aborted(seq_id)
        if unfinished:
            self._tokenizers[request.tokenizer].send(Abort(unfinished))

    def abandon(self, request: OpenRequest) -> None:
        """End a request whose HTTP client has left, without waiting for the task that answers it."""
        self._end(request, ClientGone())

    def abort(self, name: str) -> int:
        """End the open requests with this id (clients may give several the same) with an error; return their number."""
        requests = self._names.get(name, set())
        for request in requests:
            self._end(request, aborted())
        return len(requests)

    def abort_all(self) -> int:
        """End every open request with an error; return their number."""
        for request in self._open:
            self._end(request, aborted())
        return len(self._open)

    def _end(self, request: OpenRequest, error: Exception) -> None:
        self._release(request)
        request.fail(error)

    def dispatch(self, messages: Iterable[ToApi]) -> None:
        """Handle messages of the API inbox, then deliver to each request's reader all that they brought, at once."""
        for message in messages:
            self._dispatch(message)
        reached, self._reached = self._reached, set()
        for request in reached:
            request.deliver()
            if request.has_failed:  # its reader may wait for a slow client, while the engine would go on
                self._release(request)

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
            if request is None:  # output of a step or two after an abort
                self._dropped_pieces += 1
                continue
            if delta.finish is not None:
                del by_seq_id[delta.seq_id]
            request.put(delta, now)
            reached.add(request)

    def _dispatch_refused(self, message: Refused) -> None:
        self._prompts.pop(message.seq_ids[0], None)
        for seq_id in message.seq_ids:
            request = self._by_seq_id.pop(seq_id, None)
            if request is None:
                continue
            if message.status == 400:
                error = InvalidRequest(message.field, message.message, message.code)
                request.fail(invalid_request(error, request.field_names(seq_id)))
            else:
                request.fail(worker_failed(message.status, message.message))

    def shut_down(self, reason: str | None) -> None:
        """End every open request with an error and admit no other."""
        self.is_shut_down, self._shutdown_reason = True, reason
        for request in self._open:
            request.fail(shutting_down(reason))
        self._queries.fail(shutting_down(reason))

    def counts(self) -> ProcessCounts:
        """Return the counts of this process."""
        return ProcessCounts(
            "api",
            {
                "open_requests": len(self._open),
                "open_sequences": len(self._by_seq_id),
                "open_prompts": len(self._prompts),
                "open_queries": len(self._queries),
                "held_logprobs": self.metrics.held_logprobs,
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
        """Return one tokenizer worker's answer to a query; `query` makes the message from a query id."""
        if self.is_shut_down:
            raise shutting_down(self._shutdown_reason)
        return await self._queries.ask(query, answer_type, timeout_seconds)

    async def query_counts(self, timeout_seconds: float) -> tuple[list[ProcessCounts], bool]:
        """Return the counts of every process, and True if all of them answered in time."""
        own = self.counts()
        others, complete = await self._queries.ask_counts(timeout_seconds)
        return [own, *others], complete


class Heartbeat:
    """Asks every process that requests pass through for its counts, once a second.

    Of several ranks only the first is asked, which waits for the others in every step. Answers show that tokenizers,
    scheduler and detokenizer handle messages, so /health and /metrics use the last ones and ask no process.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._last = time.monotonic()
        self.scheduler_counts: dict[str, int] = {}  # last answer of the first rank
        self.generation_rate = 0.0  # tokens/s that came between the last two answers
        self._generated = client.metrics.generation_tokens

    async def beat_forever(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def beat(self) -> None:
        """Ask once; `age` starts anew only if all processes answer."""
        processes, complete = await self._client.query_counts(HEARTBEAT_TIMEOUT)
        counts = {process.process: process.counts for process in processes}
        self.scheduler_counts = counts.get("scheduler-0", self.scheduler_counts)
        if complete:
            generated, now = self._client.metrics.generation_tokens, time.monotonic()
            self.generation_rate = (generated - self._generated) / max(now - self._last, 1e-3)
            self._generated, self._last = generated, now

    @property
    def age(self) -> float:
        """Seconds since all processes last answered."""
        return time.monotonic() - self._last
