"""Send conversations that are made to be expensive, and measure what they do to other clients and to the memory.

    python benchmark/hostile_conversations.py               # all of them, to a server of the demo model
    python benchmark/hostile_conversations.py references

For each it prints the status, the seconds to the answer, the longest time in which /ping (answered by the API process)
and a short /tokenize (answered by the tokenizer worker too) got no answer, and how much the two processes grew at most.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx

from hostile_grammars import DemoServer
from measuring.server_process import exit_on_sigterm

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = {"role": "user", "content": "hello"}
WORKERS = ("minisgl.server.api.api_process:run", "minisgl.tokenizer.tokenizer_worker:run")
SLOW_REGEX = "(((a{99}){99}){99}){2}"  # refused after 2 s
Send = Callable[[str], str]  # from the server's address to the status


class Watch:
    """Longest time to an answer of each route, while it is watched."""

    def __init__(self, url: str) -> None:
        self.longest = {"/ping": 0.0, "/tokenize": 0.0}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url, path)) for path in self.longest]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        time.sleep(0.3)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.3)
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str, path: str) -> None:
        with httpx.Client(timeout=300) as client:
            while not self._over.wait(0.02):
                begin = time.perf_counter()
                with suppress(httpx.HTTPError):
                    client.post(url + path, json={"prompt": "a"})
                self.longest[path] = max(self.longest[path], time.perf_counter() - begin)


def post(path: str, **fields: Any) -> Send:
    def send(url: str) -> str:
        answer = httpx.post(url + path, json=fields, timeout=300)
        return f"{answer.status_code}, {len(answer.content):,} bytes"

    return send


def response(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + RESPONSES, json={"max_output_tokens": 1, **fields}, timeout=300)


def stored(url: str) -> str:
    """Return the id of a response to 7.8 MB of input, all but the last message of which the model does not see."""
    parts = [{"type": "input_text", "text": "x" * 3_900_000}] * 2
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "hello"}]
    return str(response(url, input=messages, truncation="auto").raise_for_status().json()["id"])


def references(url: str) -> str:
    """Refer 200 times to one stored item."""
    item = {"type": "item_reference", "id": f"msg_{stored(url).removeprefix('resp_')}_i0"}
    return str(response(url, input=[item] * 200).status_code)


def many_with_tools(url: str) -> str:
    """Send 150 conversations that end at once, each with tools that the template writes for a tenth of a second."""
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": "d", "parameters": parameters}}
        for i in range(3300)
    ]
    body = json.dumps({"messages": [HELLO], "tools": tools, "max_tokens": 1}).encode()
    server = httpx.URL(url)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    connections = [socket.create_connection((server.host, server.port), timeout=300) for _ in range(150)]
    for connection in connections:
        connection.sendall(head.encode() + body[:-1])
    for connection in connections:
        connection.sendall(body[-1:])
    return str(Counter(connection.makefile("rb").readline().split()[1].decode() for connection in connections))


def idle(_: str) -> str:
    time.sleep(1)
    return ""


def function(index: int) -> dict[str, str]:
    return {"type": "function", "name": f"f{index:06}"}


def attacks() -> Iterator[tuple[str, Send]]:
    """Yield name and sender of each attack."""
    yield "none, for a second", idle
    reasoning = [{"type": "reasoning", "content": "x" * 970}] * 8190
    yield "8,190 reasoning items", post(RESPONSES, input=reasoning, max_output_tokens=1)
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [function(6399)] * 6400}
    tools = [function(index) for index in range(6400)]
    yield "6,400 allowed tools", post(RESPONSES, input="a", tools=tools, tool_choice=choice, max_output_tokens=1)
    yield "262,000 numbers for messages", post(CHAT, messages=[0] * 262_000)
    yield "a model's name of 8 MB", post(CHAT, messages=[HELLO], model="\U0010ffff" * 690_000)
    called = {"name": "f", "arguments": json.dumps({"a": [[]] * 2_000_000})}
    calls = [{"id": "a", "type": "function", "function": called}]
    yield (
        "2 million lists in a call's arguments",
        post(CHAT, messages=[HELLO, {"role": "assistant", "tool_calls": calls}]),
    )
    yield "8,192 prompts with one slow grammar", post(COMPLETIONS, prompt=["a"] * 8192, guided_regex=SLOW_REGEX)
    yield "200 references to an item of 7.8 MB", references
    yield "150 conversations with 3,300 tools", many_with_tools
    ids = [[7] * 3000] * 64
    yield "log-probabilities of 64 prompts", post(COMPLETIONS, prompt=ids, prompt_logprobs=20, max_tokens=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="part of the names of those to send (default: all)")
    name_part: str = parser.parse_args().name
    exit_on_sigterm()
    print("| what | answer | seconds | longest /ping, s | longest /tokenize, s | API, tokenizer: MB more |")
    print("|---|---|---|---|---|---|")
    for name, send in attacks():
        if name_part not in name:
            continue
        with tempfile.TemporaryDirectory() as folder, DemoServer("--response-store", f"{folder}/store.db") as server:
            post(COMPLETIONS, prompt="a", max_tokens=1, guided_regex="a|b")(server.base_url)  # starts what starts late
            before = [server.peak_megabytes(worker) for worker in WORKERS]
            with Watch(server.base_url) as watch:
                begin = time.perf_counter()
                status = send(server.base_url)
                seconds = time.perf_counter() - begin
            more = [server.peak_megabytes(worker) - was for worker, was in zip(WORKERS, before, strict=True)]
            waits = " | ".join(f"{longest:.2f}" for longest in watch.longest.values())
            print(f"| {name} | {status} | {seconds:.1f} | {waits} | {more[0]:.0f}, {more[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
