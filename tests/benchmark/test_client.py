"""The load generator against servers that do as they like: whatever happens is in the record."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from measuring.client import RequestRecord, Target, ask
from measuring.load import LoadRun, run_load
from measuring.statistics import Slo
from measuring.workload import TimedRequest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
REQUEST = TimedRequest(0.0, np.arange(3, dtype=np.int32), 2)
EVENTS = (
    b'data: {"choices": [{"text": "ab"}]}\n\n: a comment\n\ndata: {"choices": [{"text": ""}]}\n\n'
    b'data: {"choices": [{"text": "c", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}}\n\n'
    b"data: [DONE]\n\n"
)

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answered_by(answer: Answer, timeout: float = 10.0) -> RequestRecord:
    """The record of one request to a server that answers so."""

    async def run() -> RequestRecord:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = Target(f"http://127.0.0.1:{port}", "m", timeout=timeout)
            record = RequestRecord(0, 0.0, 3, 2)
            await ask(target, target.encode(REQUEST), record, asyncio.get_running_loop().time())
            return record

    return asyncio.run(run())


def sending(*parts: bytes) -> Answer:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


@pytest.mark.parametrize("size", [1000, 7, 1])
def test_events_are_found_wherever_they_are_cut(size: int):
    chunks = [EVENTS[at : at + size] for at in range(0, len(EVENTS), size)]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
    record = answered_by(sending(head, chunked))
    assert record.error is None
    assert len(record.times) == 2
    assert record.sizes == array("i", [2, 1])
    assert (record.completion_tokens, record.cached_tokens) == (2, 3)


def test_tokens_without_text_came_at_the_end():
    events = EVENTS.replace(b'"ab"', b'""').replace(b'"c"', b'""')
    head = HEAD.replace(b"connection: close", b"content-length: %d" % len(events))
    record = answered_by(sending(head + events))
    assert (record.error, len(record.times), record.sizes) == (None, 1, array("i", [0]))
    nothing = b"data: [DONE]\n\n"
    assert (
        answered_by(sending(HEAD.replace(b"close", b"close\r\ncontent-length: 14") + nothing)).error == "no text came"
    )


def test_a_wrong_number_of_tokens_is_an_error():
    events = EVENTS.replace(b'"completion_tokens": 2', b'"completion_tokens": 1')
    head = HEAD.replace(b"connection: close", b"content-length: %d" % len(events))
    assert answered_by(sending(head + events)).error == "1 tokens came, 2 were asked for"


def test_failures_are_errors():
    refusal = b'HTTP/1.1 400 Bad Request\r\ncontent-length: 16\r\n\r\n{"error": "no!"}'
    assert answered_by(sending(refusal)).error == 'status 400: {"error": "no!"}'
    assert "not understood" in str(answered_by(sending(b"what?\r\n\r\n")).error)
    head = HEAD.replace(b"connection: close", b"content-length: 1000")
    assert "lost" in str(answered_by(sending(head + EVENTS[:40])).error)
    failed = b'data: {"error": {"message": "x"}}\n\n'
    assert answered_by(sending(head + failed)).error == 'error in the stream: {"message":"x"}'


def test_a_request_without_an_end_is_given_up():
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    assert answered_by(silent, timeout=0.2).error == "no end after 0.2 s"


def test_a_load_without_a_server_has_only_errors():
    load = [TimedRequest(0.01 * index, REQUEST.prompt, 2) for index in range(5)]
    records = run_load(Target("http://127.0.0.1:1", "m"), load, processes=2).records
    assert [record.index for record in records] == [0, 1, 2, 3, 4]
    assert all("no connection" in str(record.error) for record in records)


def test_a_load_ends_when_it_has_shown_enough():
    load = [TimedRequest(at, REQUEST.prompt, 2) for at in (0.0, 0.0, 3600.0, 3600.0)]
    run = run_load(Target("http://127.0.0.1:1", "m"), load, processes=2, enough=lambda records: len(records) == 2)
    assert run.stopped
    assert [record.index for record in run.records] == [0, 1]


def test_a_load_ends_a_while_after_all_are_answered():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        with contextlib.suppress(OSError):
            while not writer.is_closing():
                writer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
                await writer.drain()
                await asyncio.sleep(0)  # tokens come while the connections are closed, too

    async def run() -> LoadRun:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            target = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")
            load = [TimedRequest(0.0, REQUEST.prompt, 9), TimedRequest(0.3, REQUEST.prompt, 9)]
            return await asyncio.to_thread(run_load, target, load, processes=2, seconds=after)

    after = 0.4
    done = asyncio.run(run())
    assert done.records == []
    assert [record.index for record in done.cut] == [0, 1]
    assert all(record.completion_tokens == len(record.times) for record in done.cut)
    assert done.stopped_at is not None
    assert done.stopped_at >= after + max(record.times[0] for record in done.cut)


def test_a_load_ends_when_requests_that_run_are_lost():
    async def handle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def run() -> LoadRun:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            target = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")
            load = [TimedRequest(at, REQUEST.prompt, 9) for at in (0.0, 0.0, 0.0, 3600.0)]
            lost = Slo(ttft_ms=200, ttft_ms_per_1k=0, tpot_ms=100).lost_by
            return await asyncio.to_thread(
                run_load, target, load, processes=2, enough=lambda records: len(records) == 3, lost=lost
            )

    done = asyncio.run(run())
    assert done.stopped
    assert done.records == []
    assert sorted(record.index for record in done.lost) == [0, 1, 2]
    assert all(record.error == "lost" for record in done.lost)
    assert [record.index for record in done.cut] == [0, 1, 2]


def test_addresses_and_paths_of_base_urls():
    assert Target("https://example.org", "m").address == ("example.org", 443, True)
    assert Target("http://127.0.0.1:1919", "m").address == ("127.0.0.1", 1919, False)
    with pytest.raises(ValueError, match="address"):
        _ = Target("example.org", "m").address
    assert b"POST /base/v1/completions HTTP/1.1\r\n" in Target("http://h/base", "m").encode(REQUEST)
