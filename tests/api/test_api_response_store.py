"""Stored responses are found only by their owner, are bounded in number, and delay no other request."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_harness import RawClient, RunningServer
from fake_engine import wait_until
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from minisgl.config import ConfigError
from minisgl.message.to_tokenizer import Generate
from minisgl.server.api.http.connection import MAX_WRITE_BYTES
from minisgl.server.api.responses.store import Entry, MissingResponse, ResponseStore, TooMuchStored

PATH = "/v1/responses"
KEYS = ("key-one", "key-two")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def server(start_server: Callable[..., RunningServer], file: Path) -> RunningServer:
    return start_server(response_store=str(file), api_keys=KEYS)


def client(server: RunningServer, key: str = KEYS[0]) -> openai.OpenAI:
    options: Any = {"_strict_response_validation": True}
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120, **options)


def say(text: str) -> dict[str, Any]:
    return {"model": "test-model", "input": f"say {json.dumps([text])}"}


def roles_and_texts(server: RunningServer) -> list[tuple[str, str]]:
    """Return the messages that the engine got last."""
    return [(message["role"], message["content"]) for message in server.engine.of_type(Generate)[-1].prompt.messages]


def test_a_conversation_goes_on_from_a_response(server: RunningServer) -> None:
    ours = client(server)
    first = ours.responses.create(**say("one"), instructions="Be kind.")
    assert ours.responses.retrieve(first.id) == first
    with ours.responses.create(**say("two"), previous_response_id=first.id, stream=True) as stream:
        *_, last = stream
    assert last.type == "response.completed"
    second = last.response
    assert (second.previous_response_id, ours.responses.retrieve(second.id)) == (first.id, second)

    ours.responses.create(**say("three"), previous_response_id=second.id)
    conversation = [("user", 'say ["one"]'), ("assistant", "one"), ("user", 'say ["two"]'), ("assistant", "two")]
    assert roles_and_texts(server) == [*conversation, ("user", 'say ["three"]')]

    # Without new input, as OpenAI allows.
    asked: Any = {"model": "test-model", "previous_response_id": first.id}
    for absent in ({}, {"input": None}, {"input": []}):
        again = ours.responses.create(**asked, extra_body=absent)
        assert roles_and_texts(server) == conversation[:2]
        assert again.usage is not None
        counted = ours.responses.input_tokens.count(**asked, extra_body=absent)
        assert counted.input_tokens == again.usage.input_tokens

    reference: Any = {"type": "item_reference", "id": second.output[0].id}
    unknown: Any = {**reference, "id": second.output[0].id.replace("_0", "_1")}
    ours.responses.create(model="test-model", input=[reference, {"role": "user", "content": 'say ["four"]'}])
    assert roles_and_texts(server) == [("assistant", "two"), ("user", 'say ["four"]')]
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.id: there is no item"):
        ours.responses.create(model="test-model", input=[unknown])

    null: Any = {"role": "user", "content": "x", "id": None, "type": None}
    kept = ours.responses.create(model="test-model", input=[null])
    assert [item.id for item in ours.responses.input_items.list(kept.id)] == [f"msg_{kept.id[5:]}_i0"]

    pages = ours.responses.input_items.list(second.id, limit=1, order="asc")
    assert [item.to_dict()["content"][0]["text"] for item in pages] == [text for _, text in conversation[:3]]  # type: ignore[index]
    newest = ours.responses.input_items.list(second.id)
    assert [item.id for item in newest] == [item.id for item in pages][::-1]
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
        response = server.get(f"{PATH}/{second.id}/input_items?{query}", headers={"authorization": "Bearer key-one"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_response_that_is_cancelled_while_it_ends_has_one_end(server: RunningServer) -> None:
    """Its last events wait for the writer thread, which is busy with another answer."""
    ours, may_end = client(server), threading.Event()
    body: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 400}
    other = server.write_in_thread(lambda: b"other" * may_end.wait())
    try:
        with ours.responses.create(model="test-model", input="a", stream=True, **body) as stream:
            created = next(stream)
            assert created.type == "response.created"
            wait_until(lambda: len(server.writer_thread._small) == 1)
            cancelled = ours.responses.cancel(created.response.id)
            may_end.set()
            *_, last = stream
    finally:
        may_end.set()
    assert other.result(120) == b"other"
    assert last.type == "response.failed"
    assert cancelled.status == "cancelled"
    assert cancelled == last.response == ours.responses.retrieve(created.response.id)


def test_a_large_response_is_sent_in_many_turns(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """To encrypt 200 MB takes a tenth of a second."""
    stored = client(server).responses.create(**say("x" * 1_000_000))
    sizes: list[int] = []
    send = RequestResponseCycle.send

    async def record(cycle: RequestResponseCycle, message: Any) -> None:
        sizes.append(len(message.get("body", b"")))
        await send(cycle, message)

    monkeypatch.setattr(RequestResponseCycle, "send", record)
    assert client(server).responses.retrieve(stored.id) == stored
    assert max(sizes) == MAX_WRITE_BYTES


def test_a_response_belongs_to_its_key(server: RunningServer) -> None:
    ours, theirs = client(server), client(server, KEYS[1])
    response = ours.responses.create(**say("mine"))
    for call in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        theirs.responses.input_items.list(response.id)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        theirs.responses.create(**say("x"), previous_response_id=response.id)
    reference: Any = {"type": "item_reference", "id": response.output[0].id}
    with pytest.raises(openai.BadRequestError, match="there is no item"):
        theirs.responses.create(model="test-model", input=[reference])
    with theirs.responses.create(model="test-model", input="endless", stream=True) as stream:
        created = next(stream)
        assert created.type == "response.created"
        with pytest.raises(openai.NotFoundError):
            ours.responses.cancel(created.response.id)
        theirs.responses.cancel(created.response.id)
        *_, last = stream
    assert last.type == "response.failed"
    assert theirs.responses.retrieve(created.response.id).status == "cancelled"

    with pytest.raises(openai.BadRequestError, match="has ended"):
        ours.responses.cancel(response.id)
    ours.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        ours.responses.retrieve(response.id)


def test_store_false_keeps_nothing(server: RunningServer, file: Path) -> None:
    response = client(server).responses.create(**say("secret"), store=False)
    with pytest.raises(openai.NotFoundError):
        client(server).responses.retrieve(response.id)
    assert b"secret" not in b"".join(path.read_bytes() for path in file.parent.glob("responses.db*"))
    assert {path.stat().st_mode & 0o777 for path in file.parent.glob("responses.db*")} == {0o600}


def test_a_slow_disk_delays_no_other_request(server: RunningServer, file: Path) -> None:
    """While another process has locked the file, a response waits for it, and chats are answered."""
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        found: list[str] = []
        waiting = threading.Thread(target=lambda: found.append(client(server).responses.create(**say("late")).id))
        waiting.start()
        server.engine.wait_for(Generate)
        body = {"messages": [{"role": "user", "content": 'say ["early"]'}]}
        for _ in range(3):
            chat = server.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer key-one"})
            assert chat.status_code == 200
        assert not found
        other.execute("COMMIT")
    waiting.join(120)
    assert client(server).responses.retrieve(found[0]).output_text == "late"


def test_an_answer_reaches_its_client_when_the_file_is_broken(
    server: RunningServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(file) as other:
        other.execute("DROP TABLE responses")
    response = client(server).responses.create(**say("still there"))
    assert (response.output_text, as_not_stored(response)) == ("still there", True)
    assert f"{file} cannot be used, so responses are not stored: no such table" in caplog.text
    headers = {"authorization": "Bearer key-one"}
    lost: httpx.Response = server.get(f"{PATH}/{response.id}", headers=headers)
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "response_store_failed")


def as_not_stored(response: openai.types.responses.Response) -> bool:
    """Return True if the response says that it is not stored, and why."""
    told = response.to_dict()
    return (told["store"], told.get("warnings")) == (False, ["store: the response could not be stored"])


def test_a_file_may_vanish_and_come_back(
    start_server: Callable[..., RunningServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its folder gone nothing is stored, and that is said; afterwards the file is created anew."""
    folder = tmp_path / "store"
    folder.mkdir()
    server = start_server(response_store=str(folder / "responses.db"), api_keys=KEYS)
    ours = client(server)
    before = ours.responses.create(**say("before"))
    shutil.rmtree(folder)
    for _ in range(2):
        lost = ours.responses.create(**say("lost"))
        assert (lost.output_text, as_not_stored(lost)) == ("lost", True)
    with ours.responses.create(**say("streamed"), stream=True) as stream:
        *_, last = stream
    assert last.type == "response.completed"
    assert (last.response.output_text, as_not_stored(last.response)) == ("streamed", True)
    for id in (before.id, lost.id, last.response.id):
        for call in (ours.responses.retrieve, ours.responses.delete, ours.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(id)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        ours.responses.create(**say("x"), previous_response_id=lost.id)

    folder.mkdir()
    after = ours.responses.create(**say("after"))
    assert ours.responses.retrieve(after.id) == after
    with pytest.raises(openai.NotFoundError):
        ours.responses.retrieve(lost.id)
    lines = [record.getMessage() for record in caplog.records if "--response-store" in record.getMessage()]
    assert [line.partition(str(folder))[2] for line in lines] == [
        f"/responses.db cannot be used, so responses are not stored: [Errno 2] No such file or directory: "
        f"'{folder}/responses.db'",
        "/responses.db was deleted or replaced, and has been opened anew",
        "/responses.db can be used again",
    ]
    assert "Traceback" not in caplog.text


def test_a_response_too_large_to_be_stored_says_so(start_server: Callable[..., RunningServer], file: Path) -> None:
    server = start_server(response_store=str(file), response_store_bytes=10)
    response = server.post(PATH, json=say("much")).json()
    assert response["store"] is False
    assert "--response-store-bytes" in response["warnings"][0]
    assert server.get(f"{PATH}/{response['id']}").status_code == 404


def entry(number: int, text: str = "", previous: str | None = None) -> Entry:
    item = json.dumps([{"id": f"msg_{number:032x}_i0", "type": "message", "role": "user", "content": text}])
    response = json.dumps({"output": [{"id": f"msg_{number:032x}_0", "text": text}]})
    return Entry(f"resp_{number:032x}", "me", previous, item.encode(), response.encode())


def held(count: int) -> None:
    """Count nothing."""


def test_the_oldest_make_room(file: Path) -> None:
    size = len(entry(0, "x" * 3000).input) + len(entry(0, "x" * 3000).response)
    store = ResponseStore(str(file), 10 * size, max_read_bytes=10 * size)

    async def fill() -> None:
        for number in range(100):
            await store.put(entry(number, "x" * 3000))
        for number in range(90, 100):
            await store.get(entry(number).id, "me", held)
        with pytest.raises(MissingResponse):
            await store.get(entry(89).id, "me", held)
        await store.put(entry(100, "x" * 11 * size))  # larger than all that may be kept
        with pytest.raises(MissingResponse):
            await store.get(entry(100).id, "me", held)
        await store.get(entry(99).id, "me", held)

    asyncio.run(fill())
    store.close()
    assert file.stat().st_size < 30 * size
    store = ResponseStore(str(file), 10 * size, max_read_bytes=10 * size)  # after a restart
    assert asyncio.run(store.get(entry(99).id, "me", held)) == entry(99, "x" * 3000)
    store.close()


def test_an_owner_pushes_out_no_responses_of_one_who_stores_less(file: Path) -> None:
    size = len(entry(0).input) + len(entry(0).response)
    store = ResponseStore(str(file), 100 * size, max_read_bytes=size)
    numbers = iter(range(10**6, 10**7))

    def put(owner: str, count: int, text: str = "") -> None:
        for _ in range(count):
            asyncio.run(store.put(replace(entry(next(numbers), text), owner=owner)))

    def stored() -> list[tuple[str, int, int]]:
        with sqlite3.connect(file) as database:
            query = "SELECT owner, count(*), max(number) - min(number) + 1 FROM responses GROUP BY owner ORDER BY owner"
            return database.execute(query).fetchall()

    put("a", 20)
    put("b", 300)
    assert stored() == [("a", 20, 20), ("b", 80, 80)], "the newest of b"
    put("a", 60)
    assert [count for _, count, _ in stored()] == [50, 50], "both store as much"
    put("c", 10)
    assert [(owner, count) for owner, count, _ in stored()] == [("a", 45), ("b", 45), ("c", 10)]
    put("d", 1, "x" * 40 * size)  # one response that is larger than all of another owner
    assert stored()[-1] == ("d", 1, 1)
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT sum(bytes) FROM responses").fetchone()[0] <= 100 * size
    store.close()


def test_a_smaller_limit_takes_from_each_owner_its_share(file: Path) -> None:
    size = len(entry(0).input) + len(entry(0).response)
    store = ResponseStore(str(file), 2**30, max_read_bytes=size)
    with sqlite3.connect(file) as database:
        database.executemany(INSERT, rows(range(10**6, 10**6 + 6000)))
        database.execute("UPDATE responses SET owner = CAST(number % 3 AS TEXT)")
        for made in ("TABLE owners", "TRIGGER owner_stored", "TRIGGER owner_deleted"):
            database.execute(f"DROP {made}")
    store.close()
    store = ResponseStore(str(file), 301 * size, max_read_bytes=size)
    asyncio.run(store.put(entry(10**6 + 7000)))
    with sqlite3.connect(file) as database:
        counts = database.execute("SELECT owner, count(*) FROM responses GROUP BY owner ORDER BY owner").fetchall()
    assert counts == [("0", 100), ("1", 100), ("2", 100), ("me", 1)]
    store.close()


INSERT = "INSERT INTO responses (id, owner, previous, bytes, input, response) VALUES (?, ?, ?, ?, ?, ?)"


def rows(numbers: range) -> Iterator[tuple[object, ...]]:
    for one in map(entry, numbers):
        yield one.id, one.owner, one.previous, len(one.input) + len(one.response), one.input, one.response


def test_a_response_is_stored_as_fast_in_a_full_file(file: Path) -> None:
    """The sizes of all stored responses were added up for each new one."""
    store = ResponseStore(str(file), 2**30, max_read_bytes=1000)
    with sqlite3.connect(file) as database:
        database.executemany(INSERT, rows(range(100_000)))

    async def put() -> None:
        for number in range(100_000, 100_200):
            await store.put(entry(number))

    begin = time.process_time()
    asyncio.run(put())
    assert time.process_time() - begin < 0.5  # 1 s before
    store.close()


def test_responses_of_other_servers_count(file: Path) -> None:
    """Two servers may share a file, of which an older one may have kept no total."""
    size = len(entry(0).input) + len(entry(0).response)
    ResponseStore(str(file), 100 * size, max_read_bytes=size).close()
    with sqlite3.connect(file) as database:
        for made in ("TABLE owners", "TRIGGER owner_stored", "TRIGGER owner_deleted"):
            database.execute(f"DROP {made}")
        database.executemany(INSERT, rows(range(10, 60)))
    store = ResponseStore(str(file), 100 * size, max_read_bytes=size)
    with sqlite3.connect(file) as database:
        database.executemany(INSERT, rows(range(60, 100)))
        database.execute("DELETE FROM responses WHERE id = ?", (entry(99).id,))
    numbers = range(10, 99)
    for added in range(100, 120):
        asyncio.run(store.put(entry(added)))
    with sqlite3.connect(file) as database:
        left = [id for (id,) in database.execute("SELECT id FROM responses ORDER BY number")]
    assert left == [entry(number).id for number in [*numbers, *range(100, 120)]][-100:]
    store.close()


def test_a_full_store_grows_no_further(file: Path) -> None:
    """SQLite's log grows to 4 MB before it is written back into the file, and then begins anew."""
    store = ResponseStore(str(file), 100_000, max_read_bytes=100_000)

    async def put_many() -> None:
        for number in range(1000):
            await store.put(entry(number, "x" * 9_000))

    asyncio.run(put_many())
    assert sum(path.stat().st_size for path in file.parent.iterdir()) < 6_000_000
    store.close()


def test_a_conversation_is_read_within_bounds(file: Path) -> None:
    size = len(entry(0).input) + len(entry(0).response)
    store = ResponseStore(str(file), 100_000_000, max_read_bytes=3 * size)

    async def converse() -> None:
        for number in range(4):
            await store.put(entry(number, previous=entry(number - 1).id if number else None))
        assert len(await store.conversation(entry(2).id, "me", held)) == 6
        assert len(await store.input(entry(2).id, "me", held)) == 5
        with pytest.raises(TooMuchStored):
            await store.conversation(entry(3).id, "me", held)
        with pytest.raises(TooMuchStored):
            await store.find([f"msg_{number % 4:032x}_0" for number in range(12)], "me", held)
        await store.delete(entry(1).id, "me")
        with pytest.raises(MissingResponse) as missing:
            await store.conversation(entry(2).id, "me", held)
        assert missing.value.id == entry(1).id

    asyncio.run(converse())
    store.close()


def test_an_item_counts_each_time_that_it_is_referred_to(file: Path) -> None:
    """One small request could otherwise hold the same stored text thousands of times."""
    size = len(entry(0, "x" * 1000).input) + len(entry(0, "x" * 1000).response)
    store = ResponseStore(str(file), 100_000_000, max_read_bytes=2 * size)

    async def refer() -> None:
        await store.put(entry(0, "x" * 1000))
        item = f"msg_{0:032x}_0"
        assert (await store.find([item] * 3, "me", held)).keys() == {item}
        with pytest.raises(TooMuchStored):
            await store.find([item] * 5, "me", held)

    asyncio.run(refer())
    store.close()


def test_a_long_conversation_of_references_goes_on(start_server: Callable[..., RunningServer], file: Path) -> None:
    """Each response stores its input with all earlier items, of which only those referred to count."""
    server = start_server(response_store=str(file), max_body_bytes=200_000)
    items: list[dict[str, Any]] = []
    for number in range(40):
        items.append({"role": "user", "content": f'say ["{number}"]' + " " * 4000})
        response = server.post(PATH, json={"input": items, "truncation": "auto"})
        assert response.status_code == 200, (number, response.text)
        items.append({"type": "item_reference", "id": response.json()["output"][0]["id"]})
    assert server.engine.of_type(Generate)[-1].prompt.messages[1]["content"] == "0"


def test_items_are_found_among_others_without_an_id_of_text(file: Path) -> None:
    store = ResponseStore(str(file), 100_000, max_read_bytes=100_000)
    mine = f"msg_{0:032x}_i2"
    items = [{"id": 5}, {"id": [mine]}, {"id": mine, "type": "message"}]

    async def refer() -> None:
        await store.put(Entry(f"resp_{0:032x}", "me", None, json.dumps(items).encode(), b'{"output": []}'))
        assert await store.find([mine], "me", held) == {mine: items[2]}
        assert await store.find([mine], "you", held) == {}

    asyncio.run(refer())
    store.close()


def test_the_values_of_items_count_each_time_that_they_are_referred_to(file: Path) -> None:
    store = ResponseStore(str(file), 100_000_000, max_read_bytes=100_000_000)
    parts = [{"type": "input_text", "text": ""}] * 3000
    items = [{"id": f"msg_{0:032x}_i0", "type": "message", "role": "user", "content": parts}]
    stored = Entry(f"resp_{0:032x}", "me", None, json.dumps(items).encode(), b'{"output": []}')

    async def refer() -> None:
        await store.put(stored)
        await store.find([items[0]["id"]] * 4, "me", held)
        with pytest.raises(TooMuchStored):
            await store.find([items[0]["id"]] * 5, "me", held)

    asyncio.run(refer())
    store.close()


def test_responses_are_read_one_at_a_time_until_they_are_too_large(file: Path) -> None:
    """References to many large responses could otherwise bring the whole file into memory."""
    store = ResponseStore(str(file), 100_000_000, max_read_bytes=1_000_000)

    async def refer() -> None:
        for number in range(30):
            await store.put(entry(number, "x" * 1_000_000))
        tracemalloc.start()
        with pytest.raises(TooMuchStored):
            await store.find([f"msg_{number:032x}_0" for number in range(30)], "me", held)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()

    asyncio.run(refer())
    store.close()


def test_what_is_read_from_the_store_counts_like_bodies(
    start_server: Callable[..., RunningServer], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 requests of 150 bytes held 1.5 GB, because each continued a conversation of 7.8 MB."""
    monkeypatch.setattr("minisgl.server.api.app.LARGEST_BODIES", 3)
    server = start_server(response_store=str(file), max_body_bytes=2**20)
    first = server.post(PATH, json={"input": "say []" + " " * 900_000}).json()["id"]
    body = {"input": "hold", "previous_response_id": first}
    clients = [RawClient(server.port) for _ in range(3)]
    for index, client in enumerate(clients):
        client.post(PATH, body)
        server.engine.wait_for(Generate, index + 2)
    for refused in (
        server.post(PATH, json=body),
        server.get(f"{PATH}/{first}"),
        server.get(f"{PATH}/{first}/input_items"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert server.post(PATH, json={"input": "say []"}).status_code == 200
    for client in clients:
        client.leave()
    server.assert_idle()
    assert server.get(f"{PATH}/{first}").status_code == 200


def test_tools_that_each_response_repeats_do_not_end_a_conversation(file: Path) -> None:
    """With 40 tools of 100 values, a conversation was too long after 16 responses."""
    store = ResponseStore(str(file), 100_000_000, max_read_bytes=100_000)
    tools = [{"name": f"t{number}", "parameters": ["x"] * 100} for number in range(40)]

    async def converse() -> None:
        previous = None
        for number in range(60):
            plain = entry(number, previous=previous)
            response = json.dumps({"tools": tools} | json.loads(plain.response))
            await store.put(Entry(plain.id, plain.owner, previous, plain.input, response.encode()))
            previous = plain.id
        assert len(await store.conversation(entry(29).id, "me", held)) == 60
        with pytest.raises(TooMuchStored):  # eight times as many bytes have been read as a conversation may have
            await store.conversation(entry(59).id, "me", held)

    asyncio.run(converse())
    store.close()


def test_log_probabilities_do_not_end_a_conversation(start_server: Callable[..., RunningServer], file: Path) -> None:
    """With 5 alternatives, a conversation was too long after 1,400 tokens."""
    server = start_server(response_store=str(file))
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 5}
    first = server.post(PATH, json={"input": f"say {json.dumps(['a '] * 2000)}"} | asked).json()
    assert len(first["output"][0]["content"][0]["logprobs"]) == 2000
    assert server.get(f"{PATH}/{first['id']}").json()["output"] == first["output"]
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    user = {"role": "user", "content": "say []"}
    for fields in ({"previous_response_id": first["id"], "input": "say []"}, {"input": [item, user]}):
        second = server.post(PATH, json=fields)
        assert second.status_code == 200, second.text
        listed = server.get(f"{PATH}/{second.json()['id']}/input_items").json()["data"]
        answer = next(one for one in listed if one["id"] == item["id"])
        assert answer["content"][0]["text"] == "a " * 2000
        assert answer["content"][0]["logprobs"] == []


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("x" * 10_000)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE mine (x)")
    for path in (text, foreign, tmp_path):
        with pytest.raises(ConfigError, match=f"--response-store {path}"):
            ResponseStore(str(path), 1000, max_read_bytes=1000)
    with sqlite3.connect(foreign) as database:
        assert [name for (name,) in database.execute("SELECT name FROM sqlite_master")] == ["mine"]
