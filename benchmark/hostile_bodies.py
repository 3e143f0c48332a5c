"""Send bodies that are made to block the API process, and watch the stream of another client meanwhile.

    python benchmark/hostile_bodies.py                   # all bodies, to a server of the demo model
    python benchmark/hostile_bodies.py arrays --rounds 5

For each body it prints the status, the seconds to the answer, and the longest time in which the stream got nothing. The
first line is without any body, which shows the delays of the machine itself. CPU seconds are those of the API process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import httpx

from hostile_grammars import DemoServer
from measuring.server_process import cpu_seconds, exit_on_sigterm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGE = '{"messages":[{"role":"user","content":"hello"}],"max_tokens":1,'
PROMPT = '{"prompt":"a","max_tokens":1,'
MEGABYTE = 10**6
JSON = {"content-type": "application/json"}


def filled(before: str, item: str, size: int) -> bytes:
    """Return a body of this size: `before`, which opens a list in an object, as many items as fit, and their ends."""
    return (before + ",".join([item] * (size // (len(item) + 1))) + "]}").encode()


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield name, route and body of each request."""
    for size in (30 * MEGABYTE, 7 * MEGABYTE):
        megabytes = f"{size // MEGABYTE} MB of"
        yield f"{megabytes} arrays in metadata", CHAT, filled(MESSAGE + '"metadata":[', "[]", size)
        yield f"{megabytes} objects in metadata", CHAT, filled(MESSAGE + '"metadata":[', '{"a":1}', size)
        yield f"{megabytes} ids", COMPLETIONS, filled('{"max_tokens":1,"prompt":[', "1", size)
        yield f"{megabytes} messages", CHAT, filled('{"messages":[', '{"role":"user","content":"a"}', size)
        yield f"{megabytes} tool calls", CHAT, filled(MESSAGE + '"tools":[', '{"function":{"name":"f"}}', size)
        yield f"{megabytes} escapes in a prompt", COMPLETIONS, b'{"prompt":"%b"}' % (b"\\n" * (size // 2))
    yield "65,000 arrays in metadata", CHAT, filled(MESSAGE + '"metadata":[', "[]", 3 * 65_000)
    names = json.dumps({f"{index:06}": 1 for index in range(65_000)})
    yield "65,000 names in metadata", CHAT, f'{MESSAGE}"metadata":{names}}}'.encode()
    yield "262,000 numbers in metadata", CHAT, filled(MESSAGE + '"metadata":[', "123456", 7 * 262_000)
    yield "262,000 ids", COMPLETIONS, filled('{"prompt":[', "1", 2 * 262_000)
    yield "8,192 messages", CHAT, filled('{"messages":[', '{"role":"user","content":"a"}', 30 * 8192)
    yield "8,000 prompts", COMPLETIONS, filled('{"max_tokens":1,"prompt":[', '"a"', 4 * 8000)
    ids = ",".join(["1"] * 272)  # one for each token of the demo model
    prompts = ",".join(['"a"'] * 8000)
    body = f'{{"prompt":[{prompts}],"max_tokens":1,"allowed_token_ids":[{ids}]}}'
    yield "8,000 prompts, 272 allowed ids", COMPLETIONS, body.encode()


def read_stream(url: str, results: Connection) -> None:
    """Read streams until told to end; send the longest time without an event whenever asked for it."""
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    longest = 0.0
    with httpx.Client(timeout=300) as client:
        while True:
            with client.stream("POST", url + COMPLETIONS, json=body) as answer:
                last = None
                for _ in answer.iter_raw():
                    now = time.perf_counter()
                    longest = max(longest, now - last) if last is not None else longest
                    last = now
                    if results.poll():
                        if results.recv() == "end":
                            return
                        results.send(longest)
                        longest = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="part of the names of the bodies to send (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that each body is sent; the median stall is printed (default: 3)"
    )
    args = parser.parse_args()
    exit_on_sigterm()
    with DemoServer() as server:
        ours, theirs = multiprocessing.Pipe()
        reader = multiprocessing.Process(target=read_stream, args=(server.base_url, theirs), daemon=True)
        reader.start()
        api = server.pid("minisgl.server.api.api_process:run")

        def stall() -> float:
            ours.send("say")
            return float(ours.recv())

        time.sleep(3)
        stall()
        print("| body | status | seconds to the answer | CPU seconds | longest stall, ms |\n|---|---|---|---|---|")
        rows = [("none, for a second", "", b""), *(row for row in bodies() if args.name in row[0])]
        for name, route, body in rows:
            stalls, taken, used, status = [], 0.0, 0.0, ""
            for _ in range(args.rounds):
                begin, cpu = time.perf_counter(), cpu_seconds(api)
                if body:
                    try:
                        status = str(
                            httpx.post(server.base_url + route, content=body, headers=JSON, timeout=300).status_code
                        )
                    except httpx.TransportError:
                        status = "closed"  # answered and closed before the body had been sent
                else:
                    time.sleep(1)
                taken, used = time.perf_counter() - begin, cpu_seconds(api) - cpu
                time.sleep(0.3)
                stalls.append(stall())
            median = sorted(stalls)[len(stalls) // 2]
            print(f"| {name} | {status} | {taken:.2f} | {used:.2f} | {median * 1e3:.0f} |", flush=True)
        ours.send("end")
        reader.join(10)


if __name__ == "__main__":
    main()
