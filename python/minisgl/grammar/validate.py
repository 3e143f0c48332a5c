"""Checking grammars before their requests are accepted: whether they can be followed, in bounded time.

It is done with a vocabulary of bytes, which is ready at once; what a grammar costs depends little on the tokens. A
grammar is compiled and followed for a few bytes, because some prove to be too complex only then.
"""

from __future__ import annotations

import random
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher

from minisgl.core import Grammar, InvalidRequest
from minisgl.grammar.text import field_of, to_llguidance
from minisgl.grammar.threads import compiler_threads
from minisgl.grammar.vocabulary import PARSER_LIMITS, byte_vocabulary

TIME_LIMIT = 2.0  # seconds for one grammar
MAX_RESULTS = 128  # grammars whose result is kept
TRIALS = 4
TRIAL_BYTES = 16
THREADS = 4  # a grammar that takes too long keeps its thread until it is done


class Check:
    """Of one grammar: under way in a thread, or done. After the time limit it is done in any case."""

    def __init__(self, grammar: Grammar, trial: Future[str], time_limit: float) -> None:
        self._grammar = grammar
        self._trial = trial
        self._time_limit = time_limit
        self._deadline = time.monotonic() + time_limit
        self._refusal: InvalidRequest | None = None
        self._is_known = False  # what came of it; a trial that ends too late changes nothing

    @property
    def is_done(self) -> bool:
        return self._is_known or self._trial.done() or time.monotonic() >= self._deadline

    def result(self, field: str | None = None) -> None:
        """InvalidRequest if the grammar cannot be followed, which the request calls `field`. Waits until it is done."""
        if not self._is_known:
            self._refusal = self._find_refusal()
            self._is_known = True
        refusal = self._refusal
        if refusal is not None:
            raise InvalidRequest(field or refusal.field, refusal.message)

    def _find_refusal(self) -> InvalidRequest | None:
        try:
            error = self._trial.result(timeout=max(self._deadline - time.monotonic(), 0.0))
        except InvalidRequest as refused:
            return refused
        except ValueError as invalid:  # of a text that llguidance cannot read at all
            error = _in_short(str(invalid))
        except TimeoutError:
            error = f"it takes longer than {self._time_limit:g} s to compile"
        if not error:
            return None
        return InvalidRequest(field_of(self._grammar), f"this {_called(self._grammar)} is not supported: {error}")


class GrammarValidator:
    """Says what is wrong with grammars. `named_tokens` are those that grammars may name, by id."""

    def __init__(self, named_tokens: Mapping[int, str], *, time_limit: float = TIME_LIMIT) -> None:
        self._vocabulary = byte_vocabulary(named_tokens)
        self._time_limit = time_limit
        self._pool: ThreadPoolExecutor | None = None  # until there is a grammar
        self._checks: OrderedDict[Grammar, Check] = OrderedDict()

    def validate(self, grammar: Grammar, field: str | None = None) -> None:
        """InvalidRequest if the grammar cannot be followed. `field`: what the request calls it."""
        self.check(grammar).result(field)

    def check(self, grammar: Grammar) -> Check:
        """Begin to check the grammar, unless that has been done."""
        check = self._checks.get(grammar)
        if check is None:
            self._pool = self._pool or compiler_threads(THREADS)
            check = Check(grammar, self._pool.submit(self._try, grammar), self._time_limit)
            self._checks[grammar] = check
            if len(self._checks) > MAX_RESULTS:
                self._checks.popitem(last=False)
        self._checks.move_to_end(grammar)
        return check

    def _try(self, grammar: Grammar) -> str:
        """Compile the grammar and follow it for a few bytes; what goes wrong, or nothing."""
        text = to_llguidance(grammar)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, self._vocabulary, limits=PARSER_LIMITS)
        if is_error:
            return _in_short(messages[0])
        begin = LLMatcher(self._vocabulary, text, log_level=0, limits=PARSER_LIMITS)
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


def _called(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object" | "json_schema":
            return "JSON schema"
        case "regex" | "choice":
            return "regular expression"
        case "ebnf" | "lark":
            return "grammar"


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
