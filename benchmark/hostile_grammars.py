"""Send tool schemas and grammars that are made to be expensive to a server of the demo model, and measure their cost.

    python benchmark/hostile_grammars.py schemas     # tools with schemas that branch, refer in circles or are copied
    python benchmark/hostile_grammars.py queue       # 40 grammars that never end, and honest ones after them

For each body it prints the status, the seconds to the answer, the longest time in which `GET /ping` got no answer, and
the peak memory of the API process (VmHWM). `queue` prints how long the honest requests took to be answered.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from measuring.server_process import ServerProcess, exit_on_sigterm, worker_pids

MESSAGES = [{"role": "user", "content": "Hi"}]
HARD = "(((a{{99}}){{99}}){{99}}){{{number}}}"  # a regular expression that takes all memory before it is compiled
PATIENCE_SECONDS = 180.0


class DemoServer(ServerProcess):
    """A server of the demo model on a free port."""

    def __init__(self, *flags: str, api_key: str | None = None) -> None:
        super().__init__([sys.executable, "-m", "minisgl", "--model", "demo", "--port", "0", *flags], api_key=api_key)

    def chat(self, key: str = "none", **fields: Any) -> tuple[int, float, str]:
        """Return one answer's status, its seconds and the text of its error."""
        begin = time.perf_counter()
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "demo", "messages": MESSAGES, "max_tokens": 4, **fields}
        try:
            answer = httpx.post(
                f"{self.base_url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS
            )
        except httpx.TimeoutException:
            return 0, time.perf_counter() - begin, "no answer"
        error = answer.json().get("error") or {}
        return answer.status_code, time.perf_counter() - begin, error.get("message", "")

    def pid(self, entry: str) -> int:
        """Return the id of the worker process with this entry point."""
        return worker_pids(self.process.pid)[entry]

    def peak_megabytes(self, entry: str) -> float:
        """Return the peak memory of the worker process with this entry point."""
        status = Path(f"/proc/{self.pid(entry)}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024

    @contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Ask /ping every 5 ms; the list gets the seconds that each answer took."""
        taken: list[float] = []
        over = threading.Event()

        def ask() -> None:
            with httpx.Client(timeout=PATIENCE_SECONDS) as client:
                while not over.wait(0.005):
                    begin = time.perf_counter()
                    with suppress(httpx.HTTPError):
                        client.get(f"{self.base_url}/ping")
                    taken.append(time.perf_counter() - begin)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.2)
        try:
            yield taken
        finally:
            over.set()
            thread.join()


def tool(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}]


def branching(depth: int) -> dict[str, Any]:
    """Return definitions, each of which refers to the next one twice."""
    definitions: dict[str, Any] = {
        f"a{level}": {"anyOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(depth)
    }
    definitions[f"a{depth}"] = {"type": "string"}
    return {"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": definitions}


def circular() -> dict[str, Any]:
    """Return a definition that is one of its own alternatives."""
    definitions = {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}
    return {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": definitions}


def copied(num_properties: int, definition_bytes: int) -> dict[str, Any]:
    """Return many properties that refer to one large definition."""
    definition = {"type": "integer", "description": "x" * definition_bytes}
    properties = {f"p{number}": {"$ref": "#/$defs/big"} for number in range(num_properties)}
    return {"properties": properties, "$defs": {"big": definition}}


def send_schemas() -> None:
    """Send one body after the other to servers of both forms that have a rule for each parameter."""
    schemas = {
        "branching, depth 20": branching(20),
        "branching, depth 22": branching(22),
        "circular": circular(),
        "2,000 properties, 600 KB": copied(2000, 600_000),
    }
    for parser in ("qwen3_coder", "pythonic"):
        with DemoServer("--tool-call-parser", parser) as server:
            server.chat()
            for name, schema in schemas.items():
                with server.watched() as pings:
                    status, seconds, message = server.chat(tools=tool(schema), tool_choice="required")
                peak = server.peak_megabytes("minisgl.server.api.api_process:run")
                print(
                    f"{parser:12} {name:26} {status} after {seconds:6.2f} s, longest ping {max(pings):6.2f} s, "
                    f"peak {peak:5.0f} MB  {message:.90}",
                    flush=True,
                )


def send_queue(num_hard: int, keys: list[str]) -> None:
    """Send expensive grammars with the first key, then honest ones with the second (or the same)."""
    flags = [flag for key in keys for flag in ("--api-key", key)]
    hostile, honest = keys[0] if keys else "none", keys[-1] if keys else "none"
    fields = {"a": {"type": "string", "maxLength": 20}, "b": {"type": "integer"}}
    with DemoServer(*flags, api_key=honest if keys else None) as server, ThreadPoolExecutor(num_hard) as pool:
        server.chat(honest, regex="warm|up")
        begin = time.perf_counter()
        hard = [pool.submit(server.chat, hostile, regex=HARD.format(number=number + 2)) for number in range(num_hard)]
        time.sleep(0.5)
        for number in range(8):
            schema = {"type": "object", "properties": {**fields, f"c{number}": {"type": "boolean"}}}
            status, seconds, message = server.chat(honest, json_schema=json.dumps(schema))
            print(f"honest {number}: {status} after {seconds:6.2f} s {message:.80}", flush=True)
        statuses = [one.result()[0] for one in hard]
        print(f"hard: {statuses.count(400)} of {num_hard} refused after {time.perf_counter() - begin:.1f} s")
        print(f"peak of the tokenizer worker: {server.peak_megabytes('minisgl.tokenizer.tokenizer_worker:run'):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("schemas", "queue"))
    parser.add_argument("--hard", type=int, default=40, help="expensive grammars of `queue` (default: 40)")
    parser.add_argument(
        "--keys",
        type=int,
        default=2,
        help="API keys of `queue`: 0 for a server without keys, 2 for a key each (default: 2)",
    )
    arguments = parser.parse_args()
    exit_on_sigterm()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.what == "schemas":
        send_schemas()
    else:
        send_queue(arguments.hard, [f"key-{number}" for number in range(arguments.keys)])


if __name__ == "__main__":
    main()
