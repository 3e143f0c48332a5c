"""uvicorn's HTTP connection, with limits on what clients may send and when."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from minisgl.server.api.http.errors import ApiError, head_too_large, invalid
from minisgl.server.api.http.stream_body import StreamBody

MAX_HEAD_BYTES = 64 * 1024  # a request's line and headers, or what ends a chunked body
_END = b"\r\n\r\n"  # of every head, and of every chunked body
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_BEGUN = re.compile(rb"\r(\n(\r|[a-z]{0,7}))?\Z", re.IGNORECASE)  # may go on as one of these two
_HOST = re.compile(rb"(\[[\da-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:\d{0,5})?", re.IGNORECASE | re.ASCII)  # RFC 3986's
_LONGEST_BEGUN = len(b"\r\nupgrade")


class Connection(HttpToolsProtocol):
    """Gives the parser what comes, and waits for nobody for ever.

    The parser gets pieces, none of which goes beyond the end of a head or of a body: so it is known of every byte which
    of them it belongs to. A head may have MAX_HEAD_BYTES. It gets a request when the one before is answered: uvicorn
    would read no further once two were there, and not see that the client of the first is gone.

    While no request is being answered one of two clocks runs: uvicorn's keep-alive between requests, and else
    `receive_timeout`, for a connection's first head, for each from its first byte on, and for what is missing of a body
    that the answer did not wait for.
    """

    def __init__(self, *args: Any, receive_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_timeout = receive_timeout
        self._patience: asyncio.TimerHandle | None = None
        self._reads_head = True
        self._head_bytes = 0  # that the parser has got of a head, or of a chunked body since its last data
        self._body_left = 0  # bytes, where the head says how many
        self._held = b""  # the end of what came, while it is not known what it begins, or belongs to the next request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_patience()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        data, self._held = self._held + data, b""
        start = 0
        while start < len(data) and not self.transport.is_closing():
            comes_early = self._reads_head and self._is_answering()
            end = start if comes_early else self._end_of_piece(data, start)
            if end == start:
                self._held = data[start:]
                if comes_early and len(self._held) > MAX_HEAD_BYTES:
                    self.flow.pause_reading()  # up to the end of the answer
                break
            self._parse(data[start:end])
            start = end
        self._choose_clock()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._end_patience()  # what came before took its own time

    def on_headers_complete(self) -> None:
        """Begin to answer; ApiError, which the parser hands to `send_400_response`, if no one host is named."""
        _check_host([value for name, value in self.headers if name == b"host"], self.parser.get_http_version())
        self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        super().on_headers_complete()
        knows_chunks = self.parser.get_http_version() >= "1.1"
        if not knows_chunks:
            self.cycle.keep_alive = False
        self.scope["state"]["stream_body"] = StreamBody(self.cycle, chunked=knows_chunks)
        self._reads_head = False
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._body_left = max(0, self._body_left - len(body))
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reads_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.data_received(b"")  # what has come early

    def close_after_answer(self) -> None:
        """Let no other request follow the one that is being answered."""
        if self._is_answering():
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered like all else that is wrong."""
        raised = sys.exception()  # by the parser; an error of a callback of ours is its context
        cause = raised.__context__ if raised is not None else None
        self._refuse(cause if isinstance(cause, ApiError) else invalid(None, msg))

    def _parse(self, piece: bytes) -> None:
        if self._head_bytes + (len(piece) if self._reads_head else 0) > MAX_HEAD_BYTES:
            self._refuse(head_too_large(MAX_HEAD_BYTES))
            return
        self._head_bytes += len(piece)  # before the parser's calls, which set it back
        super().data_received(_without_upgrade(piece) if self._reads_head else piece)

    def _refuse(self, error: ApiError) -> None:
        """Answer what is being read, and close; without a word, if that would be taken for the answer to another."""
        if self._is_to_be_answered():
            body = error.body()
            headers = {**error.headers, "content-type": "application/json", "connection": "close"}
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = b"%b%bcontent-length: %d\r\n\r\n" % (STATUS_LINE[error.status], lines.encode(), len(body))
            self.transport.write(head + body)
        self.transport.close()

    def _is_to_be_answered(self) -> bool:
        """Nothing of an answer to what is being read has been written."""
        return self._reads_head or not self.cycle or not self.cycle.response_started

    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """How far the parser may be given what came; `start` for nothing, until more has come."""
        if self._body_left:
            return min(len(data), start + self._body_left)
        end = data.find(_END, start)
        if end >= 0:
            return end + len(_END)
        begun = _BEGUN.search(data, max(start, len(data) - _LONGEST_BEGUN))
        return begun.start() if begun else len(data)

    def _choose_clock(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering():
            self._end_patience()
        elif self._held or self._head_bytes or not self._reads_head:
            self._unset_keepalive_if_required()
            if self._patience is None:
                self._start_patience()
        else:
            self._end_patience()
            if self.timeout_keep_alive_task is None:  # every byte ends it, and uvicorn starts it only after answers
                handler = self.timeout_keep_alive_handler
                self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _start_patience(self) -> None:
        self._patience = self.loop.call_later(self._receive_timeout, self.transport.close)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _check_host(hosts: list[bytes], http_version: str) -> None:
    """ApiError unless there is one host that can be one, or none in HTTP/1.0 (RFC 9112, section 3.2)."""
    if not hosts and http_version == "1.0":
        return
    if len(hosts) != 1:
        raise invalid(None, f"the request must have one Host header, not {len(hosts)}")
    if not _HOST.fullmatch(hosts[0].strip(b" \t")):
        raise invalid(None, "the request's Host header is not a host with or without a port")


def _without_upgrade(head: bytes) -> bytes:
    """Without an offer to speak another protocol, such as HTTP/2: the parser would skip the body."""
    return _UPGRADE.sub(b"\r\nx-upgrade:", head)
