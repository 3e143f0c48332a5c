"""Checking grammars before their requests are accepted: whether they can be followed, in bounded time.

It is done with a vocabulary of bytes, which is ready at once; what a grammar costs depends little on the tokens. A
grammar is compiled and followed for a few bytes, because some prove to be too complex only then.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from minisgl.core import Grammar, InvalidRequest
from minisgl.grammar.text import field_of
from minisgl.grammar.trial import TrialFailed, TrialProcess, Verdict

TIME_LIMIT = 2.0  # seconds for one grammar
MAX_RESULTS = 128  # grammars whose result is kept
PROCESSES = 4  # that try grammars at the same time; others wait


class Check:
    """Of one grammar: waiting, under way or done."""

    def __init__(self, grammar: Grammar, verdict: Future[Verdict]) -> None:
        self._grammar = grammar
        self._verdict = verdict

    @property
    def is_done(self) -> bool:
        return self._verdict.done()

    def result(self, field: str | None = None) -> None:
        """InvalidRequest if the grammar cannot be followed, which the request calls `field`. Waits until it is done."""
        verdict = self._verdict.result()
        if verdict.field is not None:
            raise InvalidRequest(field or verdict.field, verdict.message)
        if verdict.message:
            text = f"this {_called(self._grammar)} is not supported: {verdict.message}"
            raise InvalidRequest(field or field_of(self._grammar), text)


class GrammarValidator:
    """Says what is wrong with grammars. `named_tokens` are those that grammars may name, by id."""

    def __init__(self, named_tokens: Mapping[int, str], *, time_limit: float = TIME_LIMIT) -> None:
        self._named_tokens = named_tokens
        self._time_limit = time_limit
        # A thread waits for each process. Both are started when they are needed.
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="grammar")
        self._idle: deque[TrialProcess] = deque()
        self._checks: OrderedDict[Grammar, Check] = OrderedDict()

    def validate(self, grammar: Grammar, field: str | None = None) -> None:
        """InvalidRequest if the grammar cannot be followed. `field`: what the request calls it."""
        self.check(grammar).result(field)

    def check(self, grammar: Grammar) -> Check:
        """Begin to check the grammar, unless that has been done."""
        check = self._checks.get(grammar)
        if check is None:
            check = self._checks[grammar] = Check(grammar, self._threads.submit(self._try, grammar))
            if len(self._checks) > MAX_RESULTS:
                self._checks.popitem(last=False)
        self._checks.move_to_end(grammar)
        return check

    def close(self) -> None:
        """End the processes, when they have come to a verdict."""
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().end()

    def _try(self, grammar: Grammar) -> Verdict:
        try:
            process = self._idle_process() or TrialProcess(self._named_tokens)
            verdict = process.verdict(grammar, self._time_limit)
        except TrialFailed as failed:
            return Verdict(str(failed))
        self._idle.append(process)
        return verdict

    def _idle_process(self) -> TrialProcess | None:
        """One that has tried a grammar before. Those that somebody has killed since are dropped."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return None
            if process.is_alive:
                return process


def _called(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object" | "json_schema":
            return "JSON schema"
        case "regex" | "choice":
            return "regular expression"
        case "ebnf" | "lark" | "sketch":
            return "grammar"
