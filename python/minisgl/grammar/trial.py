"""Trying grammars, in a process of its own: `python -m minisgl.grammar.trial`.

A short grammar can take any time and memory to compile, and might bring its process down. So it is another one that
compiles those of strangers, and whoever started it (`TrialProcess`) ends it when it takes too long.

The first line that comes in are the special tokens that grammars may name, by id; each of the others is a Grammar. A
line goes out when the process is ready, and a Verdict for each grammar. All are JSON.
"""

from __future__ import annotations

import os
import queue
import random
import re
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec.json import decode, encode

from minisgl.core import Grammar, InvalidRequest
from minisgl.grammar.text import to_llguidance
from minisgl.grammar.threads import STACK_BYTES
from minisgl.grammar.vocabulary import PARSER_LIMITS, byte_vocabulary
from minisgl.process.child import leave_signals_to_parent, start_module

START_SECONDS = 60.0  # on a machine that has much else to do
TRIALS = 4  # random continuations of a grammar
TRIAL_BYTES = 16  # of each


class Verdict(msgspec.Struct, frozen=True):
    """What is wrong with a grammar; an empty message: nothing. Some messages say which field is meant."""

    message: str = ""
    field: str | None = None


class TrialFailed(Exception):
    """The process has not come to a verdict, and is no more. Says why."""


class TrialProcess:
    """The process, from outside. It ends with this object."""

    def __init__(self, named_tokens: Mapping[int, str]) -> None:
        self._process = start_module("minisgl.grammar.trial", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.end = weakref.finalize(self, _end, self._process)
        self._send(encode(named_tokens))
        self._receive(START_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def verdict(self, grammar: Grammar, seconds: float) -> Verdict:
        """Try a grammar for so long; TrialFailed if that was not enough."""
        self._send(encode(grammar))
        return decode(self._receive(seconds), type=Verdict)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the next answer will say so

    def _receive(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        in_time = bool(poll.poll(seconds * 1000))
        line = self._process.stdout.readline() if in_time else b""
        if not line:
            self.end()
            raise TrialFailed(f"it takes longer than {seconds:g} s to compile" if not in_time else "the compiler fails")
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """The process: try what comes, until nothing can come."""
    leave_signals_to_parent()
    grammars: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
    vocabulary = byte_vocabulary(decode(sys.stdin.buffer.readline(), type=dict[int, str]))

    def work() -> None:
        _say(b"")
        while True:
            _say(encode(_verdict(grammars.get(), vocabulary)))

    threading.stack_size(STACK_BYTES)
    threading.Thread(target=work, daemon=True).start()
    for line in sys.stdin.buffer:
        grammars.put(decode(line, type=Grammar))
    os._exit(0)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _verdict(grammar: Grammar, vocabulary: LLTokenizer) -> Verdict:
    try:
        return Verdict(_try(grammar, vocabulary))
    except InvalidRequest as refused:
        return Verdict(refused.message, refused.field)
    except ValueError as invalid:  # of a text that llguidance cannot read at all
        return Verdict(_in_short(str(invalid)))


def _try(grammar: Grammar, vocabulary: LLTokenizer) -> str:
    """Compile the grammar and follow it for a few bytes; what goes wrong, or nothing."""
    text = to_llguidance(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, vocabulary, limits=PARSER_LIMITS)
    if is_error:
        return _in_short(messages[0])
    begin = LLMatcher(vocabulary, text, log_level=0, limits=PARSER_LIMITS)
    choice = random.Random(0)
    for _ in range(TRIALS):
        matcher = begin.deep_copy()
        for _ in range(TRIAL_BYTES):
            allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8))
            if matcher.is_stopped() or len(allowed) == 0:
                break
            matcher.consume_token(int(choice.choice(allowed)))
        if matcher.is_error():
            return _in_short(matcher.get_error())
    return ""


def _in_short(message: str) -> str:
    """What llguidance says, without the grammar's text and the options of its own."""
    if "oneOf constraints are not supported" in message:
        return "oneOf is supported only where its options exclude each other for certain"
    lines = [line.strip() for line in message.strip().splitlines()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = reasons[0] if reasons else lines[0] if lines else ""
    if said.startswith("NoExtension"):
        return "it allows no text"
    return re.sub(r"^Unimplemented keys: \[(.*)\]", r"keywords that cannot be followed: \1", said)


if __name__ == "__main__":
    main()
