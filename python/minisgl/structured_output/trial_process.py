"""Tries grammars, in processes of their own: `python -m minisgl.structured_output.trial_process`.

A short grammar can take any time and memory to compile, and might bring its process down. So each is compiled in a
process that has nothing else to do. It is forked from another, which has loaded all that it needs, so it starts in a
millisecond and nobody waits when it is killed. The kernel does that when its processor time (the same on a busy machine
as on a quiet one) or its memory is used up.

The first line of input lists the special tokens that grammars may name, by id; each further line is a Trial. An Outcome
goes out for each, in the order that they end. All are JSON.
"""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from msgspec.json import decode, encode

from minisgl.core import Grammar, InvalidRequest
from minisgl.process.child import leave_signals_to_parent, start_module
from minisgl.structured_output.translate import (
    PARSER_LIMITS,
    STACK_BYTES,
    complete_template,
    ebnf_as_lark,
    to_llguidance,
)

WAIT_FACTOR = 5  # seconds of waiting for one of processor time, on a machine that has much else to do
MAX_BYTES = 2 * 2**30  # most memory of a grammar
TRIALS = 4  # random continuations of a grammar
TRIAL_BYTES = 16  # bytes of a continuation
_CHUNK = 65_536


class Trial(msgspec.Struct, frozen=True):
    """A grammar to try, and what it may take."""

    number: int
    grammar: Grammar
    seconds: float  # seconds of processor time
    max_bytes: int = MAX_BYTES


class GrammarCheck(msgspec.Struct, frozen=True):
    """Result of a trial: what is wrong with the grammar; nothing is if the message is empty.

    Some messages say which field is meant.
    """

    message: str = ""
    field: str | None = None
    grammar: Grammar | None = None  # grammar to follow instead of the one that came
    failure: str = ""  # failure of the server, for the log: nothing is known of the grammar


class Outcome(msgspec.Struct, frozen=True):
    """The end of a trial."""

    number: int
    check: GrammarCheck
    seconds: float  # seconds of processor time


class TrialsEnded(Exception):
    """The process is no more, and with it all trials that were under way."""


class TrialProcess:
    """Handle of the process from which others are forked: nothing here waits for it, but for `poll`.

    It ends with this object.
    """

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
        """Return the trials that have ended since the last call; waits up to `seconds` for one.

        TrialsEnded if there will be none.
        """
        self._flush()
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._unsent:
            poll.register(self._in, select.POLLOUT)
        for descriptor, _ in poll.poll(seconds * 1000):
            if descriptor == self._in:
                self._flush()
                continue
            data = os.read(self._out, _CHUNK)
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
        """Send what the pipe takes; it takes more when the process has read."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # the next read says so


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# --- inside ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the process: fork one for each grammar that comes, until nothing can come."""
    leave_signals_to_parent()
    _Forks(sys.stdin.fileno(), sys.stdout.fileno()).run()


@dataclass(slots=True)
class _Fork:
    """A process that tries one grammar."""

    trial: Trial
    pid: int
    said: bytes = b""  # through its pipe: a GrammarCheck

    def outcome(self) -> Outcome:
        """Reap the fork, when its pipe is closed, and say how its trial ended."""
        _, status, usage = os.wait4(self.pid, 0)
        end = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if not end and self.said:
            check = decode(self.said, type=GrammarCheck)
        elif end in (signal.SIGPROF, signal.SIGALRM):
            check = GrammarCheck(f"it takes longer than {self.trial.seconds:g} s to compile")
        else:
            check = GrammarCheck("the compiler fails")
        return Outcome(self.trial.number, check, usage.ru_utime + usage.ru_stime)


class _Forks:
    """All forks that are under way."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._unread = b""
        self._vocabulary: LLTokenizer | None = None
        self._by_text: dict[str, int] = {}  # ids of the tokens that grammars may name
        self._forks: dict[int, _Fork] = {}  # by pipe
        self._poll = select.poll()

    def run(self) -> None:
        self._poll.register(self._source, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._source:
                    self._read()
                else:
                    self._hear(descriptor)

    def _read(self) -> None:
        data = os.read(self._source, _CHUNK)
        if not data:
            for fork in self._forks.values():
                os.kill(fork.pid, signal.SIGKILL)
            os._exit(0)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if self._vocabulary is None:
                self._vocabulary = self._load(line)
            else:
                self._fork(decode(line, type=Trial), self._vocabulary)

    def _load(self, line: bytes) -> LLTokenizer:
        tokens = decode(line, type=dict[int, str])
        self._by_text = {text: index for index, text in tokens.items()}
        vocabulary = byte_vocabulary(tokens)
        gc.collect()
        gc.freeze()  # or collecting in a fork would copy it all
        return vocabulary

    def _fork(self, trial: Trial, vocabulary: LLTokenizer) -> None:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _try_and_exit(trial, vocabulary, self._by_text, theirs)
        os.close(theirs)
        self._forks[ours] = _Fork(trial, pid)
        self._poll.register(ours, select.POLLIN)

    def _hear(self, pipe: int) -> None:
        if data := os.read(pipe, _CHUNK):
            self._forks[pipe].said += data
            return
        self._poll.unregister(pipe)
        os.close(pipe)
        _write(self._sink, encode(self._forks.pop(pipe).outcome()) + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _try_and_exit(trial: Trial, vocabulary: LLTokenizer, tokens: Mapping[str, int], pipe: int) -> None:
    """Try the grammar, in a process that was forked for it, within bounds; the check goes into the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + STACK_BYTES + trial.max_bytes,) * 2)
    signal.setitimer(signal.ITIMER_PROF, trial.seconds)  # at the end of either the process ends
    signal.setitimer(signal.ITIMER_REAL, WAIT_FACTOR * trial.seconds)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # the process outside waits for the end of these; and compilers complain before theirs
        os.dup2(nothing, descriptor)

    def work() -> None:
        try:
            check = encode(check_of(trial.grammar, vocabulary, tokens))
        except MemoryError:
            os._exit(1)
        except Exception:
            check = encode(GrammarCheck(failure=traceback.format_exc()))
        _write(pipe, check)
        os._exit(0)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    os._exit(1)


def check_of(grammar: Grammar, vocabulary: LLTokenizer, tokens: Mapping[str, int]) -> GrammarCheck:
    """Translate a grammar, compile it, and follow it for a few bytes."""
    try:
        if grammar.kind == "template":
            translated = complete_template(grammar, tokens)
            translated.check_size("structured_outputs")
        else:
            translated = ebnf_as_lark(grammar)
        message = _try(translated, vocabulary)
    except InvalidRequest as refused:
        return GrammarCheck(refused.message, refused.field)
    except ValueError as invalid:  # llguidance cannot read the text at all
        return GrammarCheck(_in_short(str(invalid)))
    return GrammarCheck(message, grammar=None if message or translated is grammar else translated)


def _try(grammar: Grammar, vocabulary: LLTokenizer) -> str:
    """Compile the grammar and follow it for a few bytes; return what goes wrong, or nothing."""
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


class _Bytes:
    """A tokenizer with a token for each byte, and a model's special tokens where the model has them."""

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        free = (index for index in range(len(special_tokens) + 257) if index not in special_tokens)
        self._ids = [next(free) for _ in range(256)]
        self.bos_token_id = None
        self.eos_token_id = next(free)
        self.special_token_ids = [*special_tokens, self.eos_token_id]
        self.tokens = [b""] * (max([*self._ids, *self.special_token_ids]) + 1)
        for byte, index in enumerate(self._ids):
            self.tokens[index] = bytes([byte])
        for index, text in special_tokens.items():
            self.tokens[index] = text.encode()
        self.tokens[self.eos_token_id] = b"<|end of sequence|>"

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def byte_vocabulary(special_tokens: Mapping[int, str]) -> LLTokenizer:
    """Vocabulary to check grammars with: it is made in no time, and knows the special tokens that they may name."""
    return LLTokenizer(TokenizerWrapper(_Bytes(special_tokens)), slices=[])


def _in_short(message: str) -> str:
    """Shorten what llguidance says: leave out the grammar's text and the options of its own."""
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
