"""Trials of grammars: their messages, and the handle of the process that runs them (`trial_process`)."""

from __future__ import annotations

import os
import select
import subprocess
import weakref
from collections.abc import Mapping

import msgspec
from msgspec.json import decode, encode

from minisgl.process.child import start_module
from minisgl.sampling_params import Grammar

MAX_BYTES = 2 * 2**30  # memory that the trial of one grammar may use
CHUNK = 65_536  # bytes read from a pipe at a time


class Trial(msgspec.Struct, frozen=True):
    """Grammar to try, and the limits of its trial."""

    number: int
    grammar: Grammar
    seconds: float  # seconds of processor time
    max_bytes: int = MAX_BYTES


class GrammarCheck(msgspec.Struct, frozen=True):
    """Result of a trial. The grammar is accepted if `message` and `failure` are empty."""

    message: str = ""  # reason of a refusal
    field: str | None = None  # field that the message is about, if known
    grammar: Grammar | None = None  # grammar to follow instead of the one that was tried
    failure: str = ""  # failure of the server, for the log: the grammar could not be checked


class Outcome(msgspec.Struct, frozen=True):
    """End of a trial."""

    number: int
    check: GrammarCheck
    seconds: float  # seconds of processor time


class TrialsEnded(Exception):
    """The process has ended, and with it all trials under way."""


class TrialProcess:
    """Handle of the process from which trials are forked. Only `poll` waits for it. It ends with this object."""

    def __init__(self, named_tokens: Mapping[int, str]) -> None:
        self._process = start_module(
            "minisgl.structured_output.trial_process", stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._unsent = bytearray()
        self._unread = b""
        self._send(encode(named_tokens))

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, trial: Trial) -> None:
        """Begin to try a grammar."""
        self._send(encode(trial))

    def poll(self, seconds: float = 0.0) -> list[Outcome]:
        """Return the trials that have ended since the last call; wait up to `seconds` for one.

        TrialsEnded if the process has ended.
        """
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._unsent:
            poll.register(self._in, select.POLLOUT)
        for descriptor, _ in poll.poll(seconds * 1000):
            if descriptor == self._in:
                self._flush()
                continue
            data = os.read(self._out, CHUNK)
            if not data:
                self.end()
                raise TrialsEnded
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [decode(line, type=Outcome) for line in lines]

    def _send(self, line: bytes) -> None:
        self._unsent += line + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # `poll` will raise TrialsEnded


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
