"""A router in front of two servers: prompts that begin alike go to the server that has their beginning cached.

check_router.py sglang-router | smg | vllm-router. The last is told of the servers' KV events (tcp ports 5557 to 5560).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

PROMPTS, ROUNDS = 6, 4
SERVERS = os.environ["MINISGL_URLS"].split()
BALANCE = ["--balance-abs-threshold", "1", "--balance-rel-threshold", "1.1"]  # two requests are a load
KV_EVENTS = [("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"), ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5560")]


def command(router: str, port: int) -> list[str]:
    common = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *SERVERS]
    if router != "vllm-router":
        return [router, "launch", "--policy", "cache_aware", *common, *BALANCE]
    sources = [
        *(f"--kv-event-source={url}={endpoint}" for url, (endpoint, _) in zip(SERVERS, KV_EVENTS, strict=True)),
        *(f"--kv-event-replay-source={url}={replay}" for url, (_, replay) in zip(SERVERS, KV_EVENTS, strict=True)),
    ]
    return [
        router,
        "--policy",
        "kv_aware",
        *common,
        *sources,
        "--kv-event-block-size",
        "16",
        "--kv-event-model",
        "demo",
    ]


def complete(url: str, prompt: str) -> str:
    body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def counts(url: str) -> tuple[int, int]:
    """Return a server's prompt tokens, and those found in its cache."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    names = "prefix_cache_queries_total", "prefix_cache_hits_total"
    found = [re.search(rf"^minisgl:{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names]
    return int(float(found[0][1])), int(float(found[1][1]))


def wait_for_router(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the router answers and knows its workers."""
    deadline = time.monotonic() + 120
    while True:
        with suppress(OSError):
            complete(url, "Hello")
            return
        assert process.poll() is None, "the router ended"
        assert time.monotonic() < deadline, "the router does not answer"
        time.sleep(0.5)


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command(sys.argv[1], port), stdout=sys.stderr)
    try:
        wait_for_router(url, process)
        time.sleep(3)  # until the servers' counts, a second old, have the questions of the wait
        before = [counts(server) for server in SERVERS]
        beginnings = [f"{i} is the number of this document. " * 12 for i in range(PROMPTS)]
        with ThreadPoolExecutor(PROMPTS) as pool:  # all at once, so that they spread
            list(pool.map(lambda beginning: complete(url, f"{beginning}Question 0:"), beginnings))
        for turn in range(1, ROUNDS):
            for beginning in beginnings:
                complete(url, f"{beginning}Question {turn}:")
                time.sleep(0.3)  # until KV events have arrived
        time.sleep(3)
        after = [counts(server) for server in SERVERS]
    finally:
        process.terminate()
        process.wait()
    asked, hits = zip(
        *[(new[0] - old[0], new[1] - old[1]) for new, old in zip(after, before, strict=True)], strict=True
    )
    share = sum(hits) / sum(asked)
    assert min(asked) > 0, f"one server had all prompts: {asked}"
    assert share > 0.6, f"of {asked} prompt tokens {hits} were cached"
    print(
        f"{PROMPTS * ROUNDS} prompts with {PROMPTS} beginnings over two servers: {share:.0%} of the prompt tokens were"
        f" cached where they went (at most {1 - 1 / ROUNDS:.0%})"
    )


main()
