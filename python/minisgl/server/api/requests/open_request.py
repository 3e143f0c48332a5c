"""One HTTP request while the engine works on it: its job, its output so far, and how its reader waits for more.

Output that a slow reader has not taken is merged into one `Delta` a choice: memory is bounded by the length of the
answer, and a slow client delays no other. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from minisgl.core import FinishReason
from minisgl.message.logprobs import PackedPositions, PositionLogprobs, unpack_positions
from minisgl.message.packed_ids import PackedIds, num_ids, unpack_ids
from minisgl.message.to_api import Accepted, OutputDelta
from minisgl.message.to_tokenizer import GenerateOptions, Prompt
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.http.errors import generation_error, invalid_request, too_many_logprobs
from minisgl.server.api.metrics import RequestMetrics, SequenceClock

MAX_HELD_LOGPROBS = 2**24  # of a request until they are written: 0.4 GB, and then 1.3 GB of JSON
# Of all open requests, each 20 bytes. Their number is not known before they come: a request of 8 MB may get a hundred
# million from its prompts.
MAX_HELD_LOGPROBS_IN_ALL = 2**25
# A request may hold so many whatever others do, for a stream holds those of a step. If more must be written at a time,
# a thread does it and not the event loop.
SMALL_LOGPROBS = 4096
SMALL_TOKENS = 4096  # tokens whose reasoning and calls are parsed in 10 to 30 ms; if they are more, a thread does it


class Delta(msgspec.Struct, eq=False):
    """Output of one choice that its reader has not taken yet."""

    index: int
    stop_ids: Sequence[int] = ()  # stop tokens that the request named
    finish: FinishReason | None = None
    ended_by: str | int | None = None  # stop string or token that ended the choice
    packed_logprobs: list[PackedPositions] = []  # one position for each id, if requested
    # One for each id of the prompt but the first, if requested; in one delta only.
    prompt_logprobs: Iterable[PositionLogprobs] = ()
    vector: bytes = b""  # vector of a pooled prompt: little-endian float32
    texts: list[str] = []
    ids: list[PackedIds] = []  # ids of each text

    def add(self, output: OutputDelta) -> None:
        self.texts.append(output.text)
        self.ids.append(output.ids)
        self.packed_logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish is not None:
            self.finish = output.finish
            self.ended_by = output.stop_reason
            self.vector = output.vector

    @property
    def stop_reason(self) -> str | int | None:
        """Stop string or token of the request that ended the choice; None if a token of the model's own did."""
        asked = isinstance(self.ended_by, str) or self.ended_by in self.stop_ids
        return self.ended_by if asked else None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def pieces(self) -> Iterator[tuple[str, int]]:
        """Text in the pieces in which it came, each with its number of ids."""
        return zip(self.texts, map(num_ids, self.ids), strict=True)

    @property
    def logprobs(self) -> Iterator[PositionLogprobs]:
        """Log-probabilities, one for each id, if requested."""
        return unpack_positions(self.packed_logprobs)

    def split(self) -> Iterator[Delta]:
        """Return a delta for each piece, with its text, ids and log-probabilities; the last has the finish reason."""
        pieces = zip(self.texts, self.ids, self.packed_logprobs, strict=True)
        for number, (text, ids, logprobs) in enumerate(pieces, start=1):
            piece = Delta(self.index, self.stop_ids, packed_logprobs=[logprobs], texts=[text], ids=[ids])
            if number == len(self.texts):
                piece.finish, piece.ended_by = self.finish, self.ended_by
            yield piece

    @property
    def token_ids(self) -> list[int]:
        """Ids of this delta; they may be ahead of the text, a part of which may be held back."""
        ids: list[int] = unpack_ids(b"".join(self.ids)).tolist()
        return ids


class ClientGone(Exception):
    """The HTTP client has closed its connection."""


class Job(GenerateOptions, frozen=True, kw_only=True):
    """Work of one HTTP request for the engine: n answers to each prompt. Choice i answers prompt i // n."""

    prompts: Sequence[Prompt]
    n: int = 1
    field_names: Mapping[str, str] = {}  # our name of a field -> the client's
    prompt_fields: Sequence[str] = ()  # the client's name of each prompt; (): `prompt`, or `prompt.0`, `prompt.1` ...
    pools: bool = False  # each prompt is answered by a vector, not by text

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def under_names(self, names: Mapping[str, str]) -> Job:
        """Return the job with the client's field names, for a body of another API that was translated."""
        found = {ours: names.get(theirs, theirs) for ours, theirs in self.field_names.items()}
        return msgspec.structs.replace(self, field_names={**found, **names})


class Sink(Protocol):
    """Reader of a stream, which is given each delta as it comes."""

    keeps_logprobs: bool  # True if it keeps the log-probabilities that it has taken
    repeats_logprobs: bool  # True if it writes with each delta all log-probabilities that it has taken

    @property
    def is_behind(self) -> bool:
        """True if it cannot take more at the moment."""

    async def caught_up(self) -> None:
        """Wait until it can take more."""

    def take(self, deltas: Iterable[Delta]) -> None:
        """Write the deltas, at most one of each choice."""

    async def take_in_thread(self, deltas: Iterable[Delta], num_logprobs: int) -> None:
        """Write deltas with so many log-probabilities, while the event loop goes on.

        It must not be given others meanwhile.
        """


class OpenRequest:
    """One HTTP request, from its admission to the end of its answer."""

    def __init__(self, job: Job, first_seq_id: int, tokenizer: int, metrics: RequestMetrics, request_id: str) -> None:
        self.job = job
        self.id = request_id  # in logs and traces
        self.seq_ids = range(first_seq_id, first_seq_id + job.num_choices)
        self.tokenizer = tokenizer  # all its messages go to this one, in order
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._metrics = metrics
        self.prompts: dict[int, Accepted] = {}  # accepted prompts, by number
        now = time.perf_counter()
        self.clocks = [SequenceClock(metrics, now, now) for _ in self.seq_ids]
        self.num_logprobs = 0  # that it holds, also in its sink
        self._num_pending_logprobs = 0  # of these, the ones in `_pending`
        self._num_pending_tokens = 0
        self._num_finished = 0
        self._cached_tokens: dict[int, int] = {}  # by prompt: the least among its choices, which the first one has
        self._pending: dict[int, Delta] = {}  # by choice, in order of arrival
        self._failure: Exception | None = None
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for: Callable[[OpenRequest], bool] = OpenRequest._is_complete

    # Methods for the reader.

    async def accepted(self) -> None:
        """Wait until the tokenizer has accepted every prompt; raises the error if it refuses one."""
        await self._until(OpenRequest._is_accepted)

    async def stream_to(self, sink: Sink) -> None:
        """Give all output to the sink, up to the end.

        While the sink keeps up, `deliver` gives it everything, and no task has to be woken for each token.
        """
        self._sink = sink
        await self._until(OpenRequest._is_pending_or_over)
        while self._pending:
            await sink.caught_up()
            if self._writes_many(sink):
                self._sink, num_written = None, self._num_to_write(sink)
                deltas, num_logprobs = self._take_pending()  # more may come while the thread writes these
                await sink.take_in_thread(deltas, num_written)
                self._sink = sink
                self._written_to(sink, num_logprobs)
            else:
                self._give_to(sink)
            await self._until(OpenRequest._is_pending_or_over)

    async def complete(self) -> list[Delta]:
        """Wait for the end of every choice; return one whole delta of each, in order."""
        await self._until(OpenRequest._is_complete)
        deltas, _ = self._take_pending()
        return sorted(deltas, key=lambda delta: delta.index)

    @property
    def has_failed(self) -> bool:
        """True if it has ended without an answer."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the error with which it has ended, if any: for instance because its client has left."""
        if self._failure is not None:
            raise self._failure

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens.values())

    # Methods for the engine client.

    def accept(self, accepted: Accepted) -> None:
        """Record that the tokenizer has accepted a prompt."""
        self.prompts[self._prompt_of(accepted.seq_ids[0])] = accepted
        num_tokens = num_ids(accepted.prompt_ids)
        self.prompt_tokens += num_tokens
        self._metrics.prompt(num_tokens)

    def put(self, output: OutputDelta, now: float) -> None:
        """Add output of a choice; `now` is the time of `perf_counter` at which it came."""
        index = output.seq_id - self.seq_ids.start
        clock = self.clocks[index]
        if output.ids:
            clock.tokens(num_ids(output.ids), now)
        if output.finish is not None:
            clock.end(output.finish, now, output.admitted)
            if output.finish in ("abort", "error"):
                self.fail(generation_error(output.cause, self.field_names(output.seq_id)))
                return
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = Delta(index, self.job.sampling.stop_token_ids)
        delta.add(output)
        if output.logprobs or output.prompt_logprobs is not None:
            self._hold_logprobs(output)
        self.completion_tokens += num_ids(output.ids)
        self._num_pending_tokens += num_ids(output.ids)
        if output.finish is not None:
            prompt = index // self.job.n
            cached = self._cached_tokens.get(prompt, output.cached_tokens)
            self._cached_tokens[prompt] = min(cached, output.cached_tokens)
            self._num_finished += 1
            if self._num_finished == len(self.clocks):
                longest = max(clock.num_tokens for clock in self.clocks)
                self._metrics.request_max_num_generation_tokens.observe(longest)

    def deliver(self) -> None:
        """Give the sink the pending output, or wake the reader if what it waits for is there."""
        sink = self._sink
        if sink is not None and self._failure is None and not sink.is_behind and not self._writes_many(sink):
            self._give_to(sink)
        self._wake()

    def fail(self, failure: Exception) -> None:
        """End the whole request with an error. Only the first call has an effect."""
        if self._failure is None:
            self._failure = failure
        self._wake()

    def aborted(self, seq_id: int) -> None:
        """Count a choice that was aborted."""
        self.clocks[seq_id - self.seq_ids.start].end("abort", time.perf_counter())

    def release_logprobs(self) -> None:
        """Count no log-probabilities of this request as held any more, because it has ended."""
        self._metrics.held_logprobs -= self.num_logprobs
        self.num_logprobs = 0

    def break_cycles(self) -> None:
        """Drop references to objects that refer to this request, which has been answered.

        Otherwise it would keep its body in memory until the garbage collector finds it, minutes later after a long
        answer.
        """
        self._sink = None
        if self._failure is not None:
            self._failure.__traceback__ = None  # its frames have the request

    def _hold_logprobs(self, output: OutputDelta) -> None:
        """Count the log-probabilities of an output; the request fails if it, or all requests, hold too many.

        A few large answers must not end the streams of other clients, so a request that holds few does not fail.
        """
        sampling = self.job.sampling
        count = num_ids(output.ids) * (1 + (sampling.logprobs or 0)) if output.logprobs else 0
        if output.prompt_logprobs is not None:
            count += len(output.prompt_logprobs) * (1 + (sampling.prompt_logprobs or 0))
        self._num_pending_logprobs += count
        self.num_logprobs += count
        self._metrics.held_logprobs += count
        if self.num_logprobs > MAX_HELD_LOGPROBS:
            field = "logprobs" if output.prompt_logprobs is None else "prompt_logprobs"
            text = f"{field} of this answer are more than {MAX_HELD_LOGPROBS}: ask for fewer at a time, or for a stream"
            self.fail(invalid_request(InvalidRequest(field, text), self.field_names(output.seq_id)))
        elif self._metrics.held_logprobs > MAX_HELD_LOGPROBS_IN_ALL and self.num_logprobs > SMALL_LOGPROBS:
            self.fail(too_many_logprobs(MAX_HELD_LOGPROBS_IN_ALL))

    def field_names(self, seq_id: int) -> dict[str, str]:
        """Return our name of a field -> the client's, for errors about this sequence."""
        names = dict(self.job.field_names)
        if self.job.prompt_fields:
            names["prompt"] = self.job.prompt_fields[self._prompt_of(seq_id)]
        elif len(self.job.prompts) > 1:
            names["prompt"] = f"prompt.{self._prompt_of(seq_id)}"
        return names

    def _prompt_of(self, seq_id: int) -> int:
        return (seq_id - self.seq_ids.start) // self.job.n

    def _is_accepted(self) -> bool:
        return len(self.prompts) == len(self.job.prompts)

    def _is_pending_or_over(self) -> bool:
        return bool(self._pending) or self._is_complete()

    def _is_complete(self) -> bool:
        return self._num_finished == len(self.seq_ids) and self._is_accepted()

    def _take_pending(self) -> tuple[Collection[Delta], int]:
        """Return the pending deltas and the number of their log-probabilities; none are pending any more."""
        deltas, self._pending = self._pending.values(), {}
        num_logprobs, self._num_pending_logprobs = self._num_pending_logprobs, 0
        self._num_pending_tokens = 0
        return deltas, num_logprobs

    def _num_to_write(self, sink: Sink) -> int:
        """Return the number of log-probabilities that the sink writes when it is given what is pending."""
        return self.num_logprobs if sink.repeats_logprobs else self._num_pending_logprobs

    def _writes_many(self, sink: Sink) -> bool:
        """Return True if the sink would take so long that a thread must do it."""
        return self._num_to_write(sink) > SMALL_LOGPROBS or self._num_pending_tokens > SMALL_TOKENS

    def _give_to(self, sink: Sink) -> None:
        deltas, num_logprobs = self._take_pending()
        try:
            if deltas:
                sink.take(deltas)
                self._written_to(sink, num_logprobs)
        except Exception as error:  # fails this request, not the task that handles all messages
            self.fail(error)

    def _written_to(self, sink: Sink, num_logprobs: int) -> None:
        """Count log-probabilities that the sink has written as no longer held, unless it keeps them."""
        if not sink.keeps_logprobs:
            self._metrics.held_logprobs -= num_logprobs
            self.num_logprobs -= num_logprobs

    async def _until(self, condition: Callable[[OpenRequest], bool]) -> None:
        """Wait for the condition, or raise the failure."""
        while self._failure is None and not condition(self):
            self._waits_for = condition
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.raise_failure()

    def _wake(self) -> None:
        """Wake the reader if its condition holds: one that waits for the whole answer is not woken by each token."""
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._failure is not None or self._waits_for(self)):
            waiter.set_result(None)
