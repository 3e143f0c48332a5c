r"""Open many client streams to a server at once, and count how each of them ended.

    python benchmark/many_clients.py                        # 2,000 streams of 32 tokens, soft limit of 1,024 open files
    python benchmark/many_clients.py --leaving 0.3          # this share of clients close their connection midway
    python benchmark/many_clients.py --sigterm 5            # SIGTERM 5 s after the first token
    python benchmark/many_clients.py --sigterm 5 --tokens 2000 --clients 200 -- --shutdown-timeout 10

A stream ends in one of these ways: `complete`; `error`, with an error event; `refused` (503); `cut`, without its last
event or without a byte; `wrong`, with a token too many or too few or a second end; `left` by its client. With
--sigterm, /health and a new completion are requested ten times a second meanwhile; without it, the server's state is
queried afterwards. Flags of the server follow after `--`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

from measuring.server_process import ServerProcess, exit_on_sigterm, get_json

USUAL_SOFT_LIMIT = 1024
LEAVE_WITHIN = 200  # bytes for each token, of about 250
REST = 30.0  # seconds


async def stream(host: str, port: int, tokens: int, begun: asyncio.Event, leave_after: int | None = None) -> str:
    """Request one stream; return how it ended. `leave_after`: bytes of the answer after which the client leaves."""
    wish = {"prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(wish | {"stream_options": {"include_usage": True}}).encode()
    answer = await ask(host, port, b"POST /v1/completions", body, begun, leave_after)
    if leave_after is not None and len(answer) >= leave_after:
        return "left"
    if not answer:
        return "cut without a byte"
    if b" 503 " in answer[:20]:
        return "refused"
    if not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        return "cut"
    if b'data: {"error"' in answer:
        return "error"
    once = answer.count(b"data: [DONE]") == answer.count(b'"finish_reason":"length"') == 1
    return "complete" if once and b'"completion_tokens":%d,' % tokens in answer else "wrong"


async def ask(
    host: str,
    port: int,
    line: bytes,
    body: bytes,
    begun: asyncio.Event | None = None,
    leave_after: int | None = None,
) -> bytes:
    """Return all that comes up to the end of the connection, or so many bytes; nothing, if there is none."""
    answer = b""
    try:
        reader, writer = await asyncio.open_connection(host, port)
        head = b"%b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" % line
        writer.write(head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        while (leave_after is None or len(answer) < leave_after) and (data := await reader.read(2**16)):
            answer += data
            if begun is not None and b"data: " in answer:
                begun.set()
        writer.close()
    except OSError:
        pass
    return answer


async def probe(host: str, port: int, line: bytes, body: bytes, seen: Counter[str]) -> None:
    """Send ten requests a second until cancelled; count the statuses."""
    while True:
        answer = await ask(host, port, line, body)
        seen[answer[9:12].decode() or "refused connection"] += 1
        await asyncio.sleep(0.1)


async def run(args: argparse.Namespace, server: ServerProcess) -> None:
    url = urlsplit(server.base_url)
    host, port = url.hostname or "", url.port or 0
    begun = asyncio.Event()
    begin = time.perf_counter()
    chance = random.Random(0)
    goals = [
        chance.randrange(LEAVE_WITHIN * args.tokens) if chance.random() < args.leaving else None
        for _ in range(args.clients)
    ]
    streams = [asyncio.create_task(stream(host, port, args.tokens, begun, goal)) for goal in goals]
    probes: dict[str, Counter[str]] = {}
    tasks = []
    if args.sigterm is not None:
        await begun.wait()
        await asyncio.sleep(args.sigterm)
        done = sum(one.done() for one in streams)
        server.process.send_signal(signal.SIGTERM)
        signalled = time.perf_counter()
        questions = {"GET /health": b"", "POST /v1/completions": b'{"prompt": "Hello", "max_tokens": 1}'}
        for line, body in questions.items():
            probes[line] = Counter()
            tasks.append(asyncio.create_task(probe(host, port, line.encode(), body, probes[line])))
        code = await asyncio.to_thread(server.process.wait)
        print(f"SIGTERM with {done} streams complete; exit code {code} after {time.perf_counter() - signalled:.1f} s")
    ends = Counter(await asyncio.gather(*streams))
    for task in tasks:
        task.cancel()
    print(f"{args.clients} streams of {args.tokens} tokens in {time.perf_counter() - begin:.1f} s: {dict(ends)}")
    for line, seen in probes.items():
        print(f"{line} after SIGTERM: {dict(seen)}")
    if args.sigterm is None:
        print(await asyncio.to_thread(rest, server.base_url))


def rest(base_url: str) -> str:
    """Return how long the server still worked for disconnected clients, and its state after that."""
    begin = time.perf_counter()
    while True:
        processes = get_json(f"{base_url}/server_info")["processes"]
        counts = processes["scheduler-0"]
        seconds = time.perf_counter() - begin
        if not (counts["sequences"] or processes["api"]["open_requests"]) or seconds > REST:
            unused = counts["pages_free"] + counts["pages_cached"]
            held = f"{counts['sequences']} sequences, {counts['pages'] - unused} of {counts['pages']} pages"
            return f"after {seconds:.1f} s more it holds {held}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2000, metavar="N", help="streams at once (default: 2000)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens of each stream (default: 32)")
    parser.add_argument(
        "--leaving",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the clients that disconnect in the middle of their stream (default: 0)",
    )
    parser.add_argument(
        "--sigterm", type=float, metavar="SECONDS", help="seconds from the first token to SIGTERM; none: no SIGTERM"
    )
    parser.add_argument("server", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    exit_on_sigterm()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_SOFT_LIMIT, hard))  # the server inherits it
    command = [sys.executable, "-m", "minisgl", "--model", "demo", "--port", "0", *args.server]
    with ServerProcess(command) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(run(args, server))


if __name__ == "__main__":
    main()
