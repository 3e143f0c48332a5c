"""Unit tests of EngineClient without sockets: open requests, aborts, and merged deltas."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from minisgl.message.logprobs import LogprobRows, PackedLogprobs, PositionLogprobs, TokenLogprob, pack_positions
from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import Abort, ProcessCounts, StatsReport, StatsRequest, TextOptions
from minisgl.message.to_api import Accepted, Flushed, OutputDelta, OutputDeltas, Refused
from minisgl.message.to_tokenizer import FlushCache, Generate, TextPrompt, ToTokenizer
from minisgl.sampling_params import SamplingParams
from minisgl.seeds import choice_seed
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.requests import open_request
from minisgl.server.api.requests.engine_client import MAX_OPTION_BYTES, PROMPTS_A_TURN, EngineClient
from minisgl.server.api.requests.open_request import ClientGone, Delta, Job, OpenRequest
from minisgl.server.api.tracing import MAX_TRACED_SEQUENCES, LogLimit, Tracer


class Outbox:
    def __init__(self) -> None:
        self.sent: list[ToTokenizer] = []

    def send(self, message: ToTokenizer, /) -> None:
        self.sent.append(message)


def make(num_tokenizers: int = 1, max_sequences: int = 100) -> tuple[EngineClient, list[Outbox]]:
    outboxes = [Outbox() for _ in range(num_tokenizers)]
    return EngineClient(outboxes, max_sequences), outboxes


def job(*prompts: str, n: int = 1, **sampling: Any) -> Job:
    return Job(
        SamplingParams(**sampling), TextOptions(), prompts=[TextPrompt(text) for text in prompts or ("hello",)], n=n
    )


def piece(seq_id: int, text: str, finish: str | None = None) -> OutputDeltas:
    return OutputDeltas([OutputDelta(seq_id, pack_ids([1]), text, finish)])  # type: ignore[arg-type]


def idle(client: EngineClient) -> bool:
    counts = client.counts().counts
    return not any(count for name, count in counts.items() if name.startswith(("open_", "held_")))


class Reader:
    """A sink that records what it receives, and can be made slow."""

    def __init__(self, *, keeps_logprobs: bool = False) -> None:
        self.keeps_logprobs = keeps_logprobs
        self.repeats_logprobs = False
        self.taken: list[list[tuple[int, str, str | None]]] = []
        self.not_behind = asyncio.Event()
        self.not_behind.set()
        self.in_thread: list[list[int]] = []  # numbers of log-probabilities
        self.taking, self.may_end = asyncio.Event(), asyncio.Event()  # in a thread

    @property
    def is_behind(self) -> bool:
        return not self.not_behind.is_set()

    async def caught_up(self) -> None:
        await self.not_behind.wait()

    def take(self, deltas: Iterable[Delta]) -> None:
        self.taken.append([(delta.index, delta.text, delta.finish) for delta in deltas])
        if self.taken[-1][0][1] == "bug":
            raise ValueError("what a writer of events may raise")

    async def take_in_thread(self, deltas: Iterable[Delta], num_logprobs: int) -> None:
        self.in_thread.append([len([*delta.prompt_logprobs, *delta.logprobs]) for delta in deltas])
        self.taking.set()
        await self.may_end.wait()

    def take_taken(self) -> list[list[tuple[int, str, str | None]]]:
        taken, self.taken = self.taken, []
        return taken


def test_a_slow_reader_gets_one_merged_delta_per_choice() -> None:
    async def main() -> None:
        client, _ = make()
        with client.open(job(n=2)) as request:
            first, second = request.seq_ids
            client.dispatch([Accepted(list(request.seq_ids), pack_ids([5, 6])), piece(first, "a")])
            reader = Reader()
            streaming = asyncio.create_task(request.stream_to(reader))
            await asyncio.sleep(0)
            assert reader.take_taken() == [[(0, "a", None)]], "deltas from before the reader came"
            client.dispatch([piece(first, "b"), piece(second, "B"), piece(first, "c")])
            assert reader.take_taken() == [[(0, "bc", None), (1, "B", None)]], "without a turn of its task"

            reader.not_behind.clear()
            for text in "def":
                client.dispatch([piece(second, text.upper())])
                client.dispatch([piece(first, text)])
                await asyncio.sleep(0)
            client.dispatch([piece(first, "g", "stop")])
            assert reader.taken == []
            reader.not_behind.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert reader.take_taken() == [[(1, "DEF", None), (0, "defg", "stop")]]
            assert not streaming.done()
            client.dispatch([piece(second, "", "length")])
            await streaming
            assert reader.taken == [[(1, "", "length")]]
            assert (request.prompt_tokens, request.completion_tokens) == (2, 12)
        assert idle(client)

    asyncio.run(main())


async def begin_stream(client: EngineClient, request: OpenRequest, reader: Reader) -> asyncio.Task[None]:
    """Accept the request's prompts, and let the reader wait for its output."""
    client.dispatch([Accepted(list(request.seq_ids), pack_ids([5]))])
    streaming = asyncio.create_task(request.stream_to(reader))
    await asyncio.sleep(0)
    return streaming


def scored(seq_id: int, prompt: int = 0, tokens: int = 0) -> OutputDeltas:
    """Output with log-probabilities of so many tokens of the prompt and of the answer."""
    position = PositionLogprobs(TokenLogprob(1, b"a", -1.0), 1, [])
    logprobs = pack_positions([position] * tokens) if tokens else b""
    return OutputDeltas(
        [OutputDelta(seq_id, pack_ids([1] * tokens), "a", logprobs=logprobs, prompt_logprobs=of_prompt(prompt))]
    )


def of_prompt(count: int) -> PackedLogprobs | None:
    """Log-probabilities of so many tokens of a prompt."""
    if count == 0:
        return None
    values = np.zeros(count, "<f4").tobytes()
    rows = LogprobRows([1], [count], [0], pack_ids([1] * count), values, pack_ids([1] * count), b"", b"")
    return PackedLogprobs(rows, {1: b"a"}, frozenset())


@pytest.mark.parametrize("of_prompt", [True, False])
def test_many_log_probabilities_are_written_in_a_thread_and_in_order(
    monkeypatch: pytest.MonkeyPatch, of_prompt: bool
) -> None:
    """They belong to a prompt, or to an answer whose client has read slowly."""
    monkeypatch.setattr(open_request, "SMALL_LOGPROBS", 10)

    async def main() -> None:
        client, _ = make()
        with client.open(job(prompt_logprobs=5, logprobs=5)) as request:
            (sequence,) = request.seq_ids
            reader = Reader()
            streaming = await begin_stream(client, request, reader)
            reader.not_behind.clear()
            client.dispatch([scored(sequence, prompt=1) if of_prompt else scored(sequence, tokens=1)])
            client.dispatch([scored(sequence, tokens=1)])
            reader.not_behind.set()
            await reader.taking.wait()
            client.dispatch([piece(sequence, "b")])
            client.dispatch([piece(sequence, "c", "stop")])
            await asyncio.sleep(0)
            assert (reader.in_thread, reader.taken) == ([[2]], []), "the thread has not ended"
            reader.may_end.set()
            await streaming
            assert (reader.in_thread, reader.taken) == ([[2]], [[(0, "bc", "stop")]])
        assert idle(client)

    asyncio.run(main())


def test_many_tokens_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their client has read slowly, and their calls must be parsed."""
    monkeypatch.setattr(open_request, "SMALL_TOKENS", 2)

    async def main() -> None:
        client, _ = make()
        with client.open(job()) as request:
            (sequence,) = request.seq_ids
            reader = Reader()
            streaming = await begin_stream(client, request, reader)
            reader.not_behind.clear()
            client.dispatch([piece(sequence, "a") for _ in range(3)])
            reader.not_behind.set()
            for _ in range(3):
                await asyncio.sleep(0)
            assert (reader.in_thread, reader.taken) == ([[0]], [])
            reader.may_end.set()
            client.dispatch([piece(sequence, "b", "stop")])
            await streaming
            assert (reader.in_thread, reader.taken) == ([[0]], [[(0, "b", "stop")]])

    asyncio.run(main())


def test_log_probabilities_that_are_held_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_request, "MAX_HELD_LOGPROBS", 100)
    monkeypatch.setattr(open_request, "MAX_HELD_LOGPROBS_IN_ALL", 150)
    monkeypatch.setattr(open_request, "SMALL_LOGPROBS", 40)

    async def main() -> None:
        client, _ = make()
        with client.open(job(prompt_logprobs=4)) as first, client.open(job(logprobs=1)) as second:
            client.dispatch([Accepted([one.seq_ids[0]], pack_ids([5])) for one in (first, second)])
            client.dispatch([scored(first.seq_ids[0], prompt=20), scored(second.seq_ids[0], tokens=25)])
            assert [one.has_failed for one in (first, second)] == [False, False]
            with client.open(job(logprobs=1)) as small:
                client.dispatch([Accepted([small.seq_ids[0]], pack_ids([5]))])
                client.dispatch([scored(small.seq_ids[0], tokens=20)])
                assert not small.has_failed, "it holds few"
                client.dispatch([scored(second.seq_ids[0], tokens=1)])
                with pytest.raises(ApiError, match="holds 150 log-probabilities") as overloaded:
                    await second.complete()
                assert overloaded.value.status == 503
            assert client.counts().counts["held_logprobs"] == 152
        with client.open(job(prompt_logprobs=4)) as large, client.open(job(logprobs=9)) as streamed:
            client.dispatch([Accepted([one.seq_ids[0]], pack_ids([5])) for one in (large, streamed)])
            streaming = asyncio.create_task(streamed.stream_to(Reader()))
            for _ in range(20):  # what has been written is no longer held
                await asyncio.sleep(0)
                client.dispatch([scored(streamed.seq_ids[0], tokens=4)])
            client.dispatch([scored(large.seq_ids[0], prompt=21)])
            with pytest.raises(ApiError, match="prompt_logprobs of this answer are more than 100") as refused:
                await large.complete()
            assert refused.value.status == 400
            client.dispatch([piece(streamed.seq_ids[0], "", "stop")])
            await streaming
        with client.open(job(logprobs=9)) as kept:  # the last events will repeat them
            reader = Reader(keeps_logprobs=True)
            reader.may_end.set()
            streaming = await begin_stream(client, kept, reader)
            for tokens in (5, 5, 1):
                await asyncio.sleep(0)
                assert not kept.has_failed
                client.dispatch([scored(kept.seq_ids[0], tokens=tokens)])
            with pytest.raises(ApiError, match=r"^logprobs of this answer are more than 100"):
                await streaming
        assert idle(client)

    asyncio.run(main())


def test_log_probabilities_that_come_while_a_thread_writes_others_stay_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_request, "MAX_HELD_LOGPROBS", 100)
    monkeypatch.setattr(open_request, "SMALL_LOGPROBS", 50)

    async def main() -> None:
        client, _ = make()
        with client.open(job(prompt_logprobs=0, logprobs=0)) as request:
            (sequence,) = request.seq_ids
            reader = Reader()
            streaming = await begin_stream(client, request, reader)
            client.dispatch([scored(sequence, prompt=60)])
            await reader.taking.wait()
            client.dispatch([scored(sequence, tokens=40)])
            reader.not_behind.clear()
            reader.may_end.set()
            for _ in range(5):
                await asyncio.sleep(0)
            client.dispatch([scored(sequence, tokens=60)])
            assert not request.has_failed, "those of the prompt are written"
            client.dispatch([scored(sequence, tokens=1)])
            assert request.has_failed
            reader.not_behind.set()
            with pytest.raises(ApiError, match="more than 100"):
                await streaming
        assert idle(client)

    asyncio.run(main())


def test_a_request_that_fails_is_aborted_while_its_client_reads_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader waits for the client, and learns of the failure only then."""
    monkeypatch.setattr(open_request, "MAX_HELD_LOGPROBS", 10)

    async def main() -> None:
        client, (outbox,) = make()
        with client.open(job(logprobs=0, n=2)) as request:
            first, second = request.seq_ids
            reader = Reader()
            reader.not_behind.clear()
            streaming = await begin_stream(client, request, reader)
            client.dispatch([scored(first, tokens=8)])
            await asyncio.sleep(0)
            assert not any(isinstance(message, Abort) for message in outbox.sent)
            client.dispatch([scored(second, tokens=8)])
            assert [message.seq_ids for message in outbox.sent if isinstance(message, Abort)] == [[first, second]]
            reader.not_behind.set()
            with pytest.raises(ApiError, match="more than 10"):
                await streaming
        assert idle(client)
        assert [type(message) for message in outbox.sent] == [Generate, Abort]

    asyncio.run(main())


def test_an_error_of_one_reader_is_its_own() -> None:
    async def main() -> None:
        client, _ = make()
        with client.open(job()) as broken, client.open(job()) as sound:
            readers = Reader(), Reader()
            tasks = [asyncio.create_task(one.stream_to(to)) for one, to in zip((broken, sound), readers, strict=True)]
            await asyncio.sleep(0)
            accepted = [Accepted(list(request.seq_ids), pack_ids([5])) for request in (broken, sound)]
            client.dispatch(
                [*accepted, piece(broken.seq_ids[0], "bug", "stop"), piece(sound.seq_ids[0], "fine", "stop")]
            )
            with pytest.raises(ValueError):
                await tasks[0]
            await tasks[1]
            assert readers[1].taken == [[(0, "fine", "stop")]]
        assert idle(client)

    asyncio.run(main())


def test_a_reader_of_the_whole_answer_wakes_once() -> None:
    async def main() -> None:
        client, _ = make()
        with client.open(job(n=2)) as request:
            reader = asyncio.create_task(request.complete())
            await asyncio.sleep(0)
            client.dispatch([Accepted(list(request.seq_ids), pack_ids([5]))])
            waiter = request._waiter
            for seq_id in reversed(request.seq_ids):
                client.dispatch([piece(seq_id, "x")])
                assert waiter is not None
                assert not waiter.done()
                client.dispatch([piece(seq_id, f"{seq_id}", "stop")])
            assert [delta.text for delta in await reader] == [f"x{seq_id}" for seq_id in request.seq_ids]
            assert request._waiter is waiter

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])
def test_however_the_block_ends_the_request_is_aborted_once(error: type[BaseException]) -> None:
    client, (outbox,) = make()

    def handle() -> None:
        with client.open(job(n=3)) as request:
            client.dispatch([piece(request.seq_ids[1], "x", "stop")])
            raise error

    with pytest.raises(error):
        handle()
    assert [message for message in outbox.sent if isinstance(message, Abort)] == [Abort([1, 3])]
    assert idle(client)


def test_cancelled_while_waiting() -> None:
    async def main() -> None:
        client, (outbox,) = make()

        async def handle() -> None:
            with client.open(job()) as request:
                await request.complete()

        task = asyncio.create_task(handle())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert outbox.sent[-1] == Abort([1])
        assert idle(client)

    asyncio.run(main())


def test_abandoned_request_ends_its_reader() -> None:
    async def main() -> None:
        client, (outbox,) = make()
        with client.open(job()) as request:
            reader = asyncio.create_task(request.complete())
            await asyncio.sleep(0)
            client.abandon(request)
            client.abandon(request)
            assert outbox.sent[-1] == Abort([1]), "at once, not when the reader gets its turn"
            with pytest.raises(ClientGone):
                await reader
        assert len(outbox.sent) == 2
        assert idle(client)

    asyncio.run(main())


def test_refused_is_not_aborted() -> None:
    async def main() -> None:
        client, (outbox,) = make()
        with client.open(job("a", "b", n=2)) as request:
            client.dispatch([Refused(list(request.seq_ids)[2:], "prompt", "prompt is too long")])
            with pytest.raises(ApiError) as caught:
                await request.accepted()
        assert caught.value.detail.param == "prompt.1"
        assert outbox.sent[-1] == Abort([1, 2])
        assert idle(client)

    asyncio.run(main())


def test_a_failed_send_leaves_nothing() -> None:
    class Broken(Outbox):
        def send(self, message: ToTokenizer, /) -> None:
            super().send(message)
            if len(self.sent) == 2:
                raise OSError("no more")

    outbox = Broken()
    client = EngineClient([outbox], 100)
    with pytest.raises(OSError), client.open(job("a", "b", "c")):
        pass
    assert idle(client)


def test_admission_counts_unread_answers() -> None:
    """Memory is bounded even if clients do not read and the engine is quick."""
    client, _ = make(max_sequences=2)
    with client.open(job(n=2)) as request:
        for seq_id in request.seq_ids:
            client.dispatch([piece(seq_id, "x", "stop")])
        assert client.counts().counts["open_sequences"] == 0
        with pytest.raises(ApiError) as caught, client.open(job()):
            pass
        assert caught.value.status == 503
    with client.open(job(n=2)):
        pass


def test_shutdown_reaches_a_request_that_waits_for_accepted_alone() -> None:
    async def main() -> None:
        client, _ = make()
        with client.open(job()) as request:
            client.dispatch([piece(1, "x", "stop")])
            client.shut_down("why")
            with pytest.raises(ApiError, match="why"):
                await request.complete()
        with pytest.raises(ApiError, match="why"), client.open(job()):
            pass

    asyncio.run(main())


def test_prompts_of_a_request_share_a_seed_or_have_their_own() -> None:
    client, (outbox,) = make()
    seeded = Job(SamplingParams(seed=9), TextOptions(), prompts=[TextPrompt("a"), TextPrompt("b")], n=2)
    with client.open(seeded):
        pass
    with client.open(job("a", "b")):
        pass
    seeds = [message.seeds for message in outbox.sent if isinstance(message, Generate)]
    assert seeds[0] == seeds[1] == [choice_seed(9, 0), choice_seed(9, 1)]
    assert seeds[2] != seeds[3]


def test_choice_seeds_are_splitmix64() -> None:
    """The published outputs for the seed 1234567, without the lowest bit."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [choice_seed(1234567, choice) for choice in range(4)] == [output >> 1 for output in published]
    assert choice_seed(-1, 0) == choice_seed(2**64 - 1, 0)
    assert len({choice_seed(seed, choice) for seed in range(-50, 50) for choice in range(64)}) == 6400


def test_counts_are_merged_and_late_reports_counted() -> None:
    async def main() -> None:
        client, outboxes = make(num_tokenizers=2)
        asking = asyncio.create_task(client.query_counts(5))
        await asyncio.sleep(0)
        sent = [message for outbox in outboxes for message in outbox.sent]
        queries = [message.query_id for message in sent if isinstance(message, StatsRequest)]
        assert client.counts().counts["open_queries"] == 2
        for index, query in enumerate(queries):
            counts = [ProcessCounts(f"tokenizer-{index}", {"x": index}), ProcessCounts("scheduler", {"y": 1})]
            client.dispatch([StatsReport(query, counts)])
        counts, complete = await asking
        assert [process.process for process in counts] == ["api", "scheduler", "tokenizer-0", "tokenizer-1"]
        assert complete
        _, complete = await client.query_counts(0.01)
        assert not complete
        client.dispatch([StatsReport(3, [])])
        assert client.counts().counts["dropped_reports"] == 1
        assert idle(client)

    asyncio.run(main())


def test_an_answer_in_the_turn_in_which_its_query_ends_is_dropped() -> None:
    """An error would end the task that receives all messages."""

    async def main() -> None:
        client, _ = make()
        asking = asyncio.create_task(client.ask(FlushCache, Flushed, 60))
        await asyncio.sleep(0)
        asking.cancel()  # as a timeout does
        client.dispatch([Flushed(1, 5)])
        with pytest.raises(asyncio.CancelledError):
            await asking
        client.dispatch([Flushed(1, 5)])  # another one, or one that comes after its query's end
        cancelled, failed = (asyncio.create_task(client.ask(FlushCache, Flushed, 60)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        client.shut_down("why")
        client.dispatch([Flushed(2, 5), Flushed(3, 5)])
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(ApiError, match="why"):
            await failed

    asyncio.run(main())


def test_counts_asked_for_at_a_shutdown_log_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        client, _ = make(num_tokenizers=2)
        asking, cancelled = (asyncio.create_task(client.query_counts(60)) for _ in range(2))
        await asyncio.sleep(0)
        client.shut_down("why")
        cancelled.cancel()  # as the server does with requests whose answers have not begun
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        counts, complete = await asking
        assert [process.process for process in counts] == ["api"]
        assert not complete
        assert idle(client)

    asyncio.run(main())
    assert caplog.records == []


def test_many_prompts_are_sent_in_many_turns() -> None:
    async def main() -> None:
        client, (outbox,) = make(max_sequences=10_000)
        with client.open(job(*["hello"] * 1000, n=2)):
            for sent in (PROMPTS_A_TURN, 2 * PROMPTS_A_TURN, 3 * PROMPTS_A_TURN):
                assert len(outbox.sent) == sent
                await asyncio.sleep(0)
            while len(outbox.sent) < 1000:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            generates = [message for message in outbox.sent if isinstance(message, Generate)]
            assert [one.seq_ids[0] for one in generates] == list(range(1, 2000, 2))
        assert idle(client)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["client leaves", "abort", "abort all"])
def test_an_ended_request_sends_no_more_prompts_and_aborts_the_others_at_once(how: str) -> None:
    """Its reader may wait for a slow client for minutes."""

    async def main() -> None:
        client, (outbox,) = make(max_sequences=10_000)
        with client.open(job(*["hello"] * 1000), ["name"]) as request:
            match how:
                case "client leaves":
                    client.abandon(request)
                case "abort":
                    assert client.abort("name") == 1
                case _:
                    assert client.abort_all() == 1
            assert isinstance(outbox.sent[-1], Abort)
            for _ in range(10):
                await asyncio.sleep(0)
        assert client.abort("name") == client.abort_all() == 0, "it has gone"
        *generates, abort = outbox.sent
        assert len(generates) == PROMPTS_A_TURN
        assert abort == Abort([one.seq_ids[0] for one in generates if isinstance(one, Generate)])
        assert idle(client)

    asyncio.run(main())


def test_options_are_not_multiplied_without_bound() -> None:
    """Each choice carries them to the scheduler: a body of 1 MB could become gigabytes."""
    allowed = tuple(range(250_000))
    large = Job(SamplingParams(allowed_token_ids=allowed), TextOptions(), prompts=[TextPrompt("a")] * 1000)
    client, (outbox,) = make(max_sequences=10_000)
    with pytest.raises(ApiError) as caught, client.open(large):
        pass
    assert caught.value.detail.param == "prompt"
    assert str(MAX_OPTION_BYTES) in caught.value.detail.message
    assert not outbox.sent
    assert idle(client)
    with (
        pytest.raises(ApiError, match=r"^n: "),
        client.open(Job(large.sampling, large.text, prompts=large.prompts[:1], n=1000)),
    ):
        pass

    async def main() -> None:
        with client.open(Job(large.sampling, large.text, prompts=large.prompts[:40])):
            for sent in range(1, 41):
                assert len(outbox.sent) == sent, "one of more than OPTION_BYTES_A_TURN in a turn"
                await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="needs the extra otel")
def test_a_request_of_many_choices_makes_few_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands would hold the event loop, and push out the spans of other requests."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")  # none is sent
    tracer, started = Tracer("http://127.0.0.1:9", "m"), []
    start = tracer._tracer.start_span
    monkeypatch.setattr(tracer._tracer, "start_span", lambda *args, **more: started.append(1) or start(*args, **more))

    async def main() -> None:
        client, _ = make(max_sequences=1000)
        with client.open(job(n=1000)) as request:
            client.dispatch([piece(seq_id, "a", "stop") for seq_id in request.seq_ids])
            tracer.record(request, "id", {"headers": [], "path": "/v1/completions"})

    asyncio.run(main())
    assert len(started) == 1 + MAX_TRACED_SEQUENCES


@pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="needs the extra otel")
def test_a_collector_that_does_not_answer_does_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger().addHandler(handler)
    try:
        Tracer("http://127.0.0.1:9", "m")
        for number in range(3):
            logging.getLogger("opentelemetry.exporter.otlp").warning("retry %d", number)
            logging.getLogger("minisgl.server").warning("ours %d", number)
    finally:
        logging.getLogger().removeHandler(handler)
    assert written.getvalue().split("\n") == ["retry 0", "ours 0", "ours 1", "ours 2", ""]

    seconds = range(0, 200, 3)
    limit = LogLimit(iter(map(float, seconds)).__next__)
    record = logging.LogRecord("opentelemetry.sdk", logging.ERROR, "", 0, "", None, None)
    assert [now for now in seconds if limit.filter(record)] == [0, 60, 120, 180], "then one line a minute"
