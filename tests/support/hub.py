"""A small hub that answers huggingface_hub as the real one does, or goes wrong where a test says so."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]


class Fault(NamedTuple):
    """A wrong answer: another status, or the connection ends or stalls after some bytes of the right body.

    It is given to the first `times` requests alone.
    """

    status: int = 200
    headers: Mapping[str, str] = {}
    end: str = ""  # "close", "reset" or "stall"
    after: int = 0  # bytes
    times: float = math.inf


class Request(NamedTuple):
    """A request's method, path and headers that matter; `is_cdn` if it went to the host of large files."""

    method: str
    path: str
    is_cdn: bool
    authorization: str | None


class Hub:
    """A hub on a port of its own. Use it as a context manager.

    Safetensors files are redirected to a host of another name, with a signature in the address.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: dict[str, Fault] = {}  # by a pattern of "METHOD path", matched from its beginning
        self.commits: dict[str, dict[str, Files]] = {}  # by model and commit
        self.branches: dict[tuple[str, str], str] = {}
        self._counting = threading.Lock()
        self.stalled, self.ended = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.cdn = f"http://localhost:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def push(self, model: str, files: Files, branch: str = "main") -> str:
        """Make a branch of a model these files; return the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(model, {})[commit] = files
        self.branches[model, branch] = commit
        return commit

    def take_fault(self, request: str) -> Fault:
        """Return the fault that this request meets, which counts as one of its times."""
        with self._counting:
            for pattern, fault in self.faults.items():
                if fault.times > 0 and re.match(pattern, request):
                    self.faults[pattern] = fault._replace(times=fault.times - 1)
                    return fault
        return Fault()

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub and this cache."""
        mine = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return mine | {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "NO_PROXY": "*", **more}

    def run(self, program: str, cache: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of Python with this hub and this cache."""
        return subprocess.run(
            [sys.executable, "-c", program, *words],
            env=self.environment(cache, **environment),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        is_cdn = self.headers["Host"].startswith("localhost")
        self.hub.requests.append(Request(self.command, path, is_cdn, self.headers["Authorization"]))
        fault = self.hub.take_fault(f"{self.command} {path}")
        if fault.status != 200:
            self._send(fault.status, b"", fault.headers)
        elif api := re.fullmatch(r"/api/models/(\w+/[\w.]+)(?:/(revision|tree)/(.+))?", path):
            self._describe(api[1], is_tree=api[2] == "tree", revision=api[3] or "main", fault=fault)
        elif file := re.fullmatch(r"/(\w+/[\w.]+)/resolve/(\w+)/(.+)", path):
            self._send_file(*file.groups(), is_cdn=is_cdn, fault=fault)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def _describe(self, model: str, *, is_tree: bool, revision: str, fault: Fault) -> None:
        commit = self.hub.branches.get((model, revision), revision)
        commits = self.hub.commits.get(model)
        if commits is None or commit not in commits:
            missing = "Repo" if commits is None else "Revision"
            self._send(404, b"", {"X-Error-Code": f"{missing}NotFound"})
            return
        files = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in commits[commit].items()
        ]
        self._send(200, json.dumps(files if is_tree else {"id": model, "sha": commit}).encode(), {}, fault)

    def _send_file(self, model: str, commit: str, path: str, *, is_cdn: bool, fault: Fault) -> None:
        data = self.hub.commits[model][commit][path]
        tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
        if is_cdn or not path.endswith(".safetensors"):
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            span = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
            self._send(206 if start else 200, data[start:], tag | span, fault)
        else:
            size = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": tag["ETag"]}
            self._send(302, b"", tag | size | {"Location": f"{self.hub.cdn}{self.path}?Signature=secret"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None = None) -> None:
        with suppress(ConnectionError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault is None or not fault.end:
                self.wfile.write(body)
                return
            self.wfile.write(body[: fault.after])
            self.close_connection = True
            if fault.end == "stall":
                self.hub.stalled.set()
                self.hub.ended.wait()
            elif fault.end == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
