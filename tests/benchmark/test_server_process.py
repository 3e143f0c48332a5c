"""A server that the benchmarks start is ready once it answers, whether it needs a key or not."""

from __future__ import annotations

import sys

import pytest

from measuring.server_process import LaunchFailed, ServerProcess

SERVER = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 401)
        self.end_headers()
        self.wfile.write(b"{}")

server = HTTPServer(("127.0.0.1", 0), Handler)
print(f"ready on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""
COMMAND = [sys.executable, "-c", SERVER]


def test_a_server_that_needs_a_key_is_asked_with_it():
    with ServerProcess(COMMAND, timeout=60.0, api_key="right") as server:
        assert server.base_url.startswith("http://127.0.0.1:")


def test_a_server_that_refuses_the_key_fails_in_time():
    with pytest.raises(LaunchFailed, match="not ready in time"):
        ServerProcess(COMMAND, timeout=1.0, api_key="wrong")
