"""Tries grammars, in processes of their own: `python -m minisgl.structured_output.trial_process`.

A short grammar can take any time and memory to compile, and might crash its process. So each is compiled in a process
of its own, forked from one that has loaded everything, so that it starts in a millisecond and can be killed at no cost.
The kernel kills it when its processor time (the same on a busy machine as on a quiet one) or its memory is used up.

The first line of input lists the special tokens that grammars may name, by id; each further line is a Trial. For each,
an Outcome is written, in the order in which they end. All are JSON.
"""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from msgspec.json import decode, encode

from minisgl.process.child import leave_signals_to_parent
from minisgl.process.machine import wait_for_children
from minisgl.sampling_params import Grammar, InvalidRequest
from minisgl.structured_output.grammar_template import owner_of
from minisgl.structured_output.translate import (
    PARSER_LIMITS,
    STACK_BYTES,
    complete_template,
    ebnf_as_lark,
    to_llguidance,
)
from minisgl.structured_output.trials import CHUNK, GrammarCheck, Outcome, Trial

WAIT_FACTOR = 5  # seconds of real time for each second of processor time, for a machine that is busy
TRIALS = 4  # random continuations of a grammar
TRIAL_BYTES = 16  # bytes of a continuation
_IN_SCHEMA = re.compile(r"^at (\d+)\(\d+\): failed to compile JSON schema: ")  # line and column


def main() -> None:
    """Run the process: fork one for each grammar, until the input is closed."""
    leave_signals_to_parent()
    wait_for_children()
    _Forks(sys.stdin.fileno(), sys.stdout.fileno()).run()


@dataclass(slots=True)
class _Fork:
    """Process that tries one grammar."""

    trial: Trial
    pid: int
    said: bytes = b""  # what came through its pipe: a GrammarCheck

    def outcome(self) -> Outcome:
        """Reap the fork, whose pipe is closed, and return how its trial ended."""
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
    """All forks under way."""

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
        data = os.read(self._source, CHUNK)
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
        gc.freeze()  # otherwise a collection in a fork would copy all objects
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
        if data := os.read(pipe, CHUNK):
            self._forks[pipe].said += data
            return
        self._poll.unregister(pipe)
        os.close(pipe)
        _write(self._sink, encode(self._forks.pop(pipe).outcome()) + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _try_and_exit(trial: Trial, vocabulary: LLTokenizer, tokens: Mapping[str, int], pipe: int) -> None:
    """Try the grammar in the process forked for it, within its limits; write the check into the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + STACK_BYTES + trial.max_bytes,) * 2)
    signal.setitimer(signal.ITIMER_PROF, trial.seconds)  # either timer's signal ends the process
    signal.setitimer(signal.ITIMER_REAL, WAIT_FACTOR * trial.seconds)
    nothing = os.open(os.devnull, os.O_RDWR)
    # A reader waits until all copies of the standard streams are closed, and a compiler may print before it crashes.
    for descriptor in range(3):
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
    """Translate a grammar, compile it, and follow it for a few bytes; return the result."""
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
    """Compile the grammar and follow it for a few bytes; return the error, or ""."""
    text = to_llguidance(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, vocabulary, limits=PARSER_LIMITS)
    if is_error:
        return _in_short(messages[0], grammar.text)
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
    """Tokenizer with a token for each byte, and with a model's special tokens at their ids."""

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
    """Return the vocabulary for checks: it is made at once, and has the special tokens that grammars may name."""
    return LLTokenizer(TokenizerWrapper(_Bytes(special_tokens)), slices=[])


def _in_short(message: str, text: str = "") -> str:
    """Return llguidance's message without the grammar's text and llguidance's own options.

    In `text`, the grammar, an error of a tool's rules is one of this tool.
    """
    if "oneOf constraints are not supported" in message:
        return "oneOf is supported only where its options exclude each other for certain"
    lines = [line.strip() for line in message.strip().splitlines()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = reasons[0] if reasons else lines[0] if lines else ""
    if said.startswith("NoExtension"):
        return "it allows no text"
    place = _IN_SCHEMA.match(said)
    tool = "" if place is None else owner_of(text, int(place[1]))
    said = _IN_SCHEMA.sub("", said)
    said = re.sub(r"^Unimplemented keys: \[(.*)\]", r"keywords that cannot be followed: \1", said)
    return f"the parameters of {tool}: {said}" if tool else said


if __name__ == "__main__":
    main()
