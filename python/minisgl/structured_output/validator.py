"""Checks grammars before their requests are accepted: is the grammar valid, and simple enough to follow?

A check uses a vocabulary of bytes, which is ready at once; the cost of a grammar depends little on the tokens. A
grammar is compiled and followed for a few bytes, because some turn out to be too complex only then.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping

from minisgl.message.to_tokenizer import ChatPrompt, Prompt
from minisgl.parsers.reasoning import Place, ReasoningFormat, start_of_answer
from minisgl.sampling_params import Grammar, InvalidRequest
from minisgl.structured_output.compile_queue import CompileQueue, estimated_cost
from minisgl.structured_output.grammar_template import after_analysis, after_reasoning, with_closed_schemas
from minisgl.structured_output.translate import field_of
from minisgl.structured_output.trials import GrammarCheck, Trial, TrialProcess, TrialsEnded

TIME_LIMIT = 2.0  # seconds of processor time for one grammar
MAX_RESULTS = 128  # grammars whose result is kept
MAX_RESULT_BYTES = 16 * 2**20  # of the texts of all these results
CONCURRENCY = 4  # grammars that are tried at the same time; others wait
ATTEMPTS = 2  # trials of a grammar, if the process that tries it ends
SILENCE_SECONDS = 60.0  # after which the process is given up; it takes a second to start, or more on a busy machine
WAIT_SECONDS = 0.05  # between polls of a check that another thread may complete


class CheckFailed(RuntimeError):
    """A grammar could not be checked, for a reason that is not the client's."""


class PendingCheck:
    """Check of one grammar: waiting, under way or done."""

    def __init__(self, grammar: Grammar, validator: GrammarValidator) -> None:
        self.grammar = grammar
        self.check: GrammarCheck | None = None  # the result, once it is done
        self.requests = 0  # requests that wait for it
        self.attempts = 0
        self._validator = validator

    @property
    def is_done(self) -> bool:
        return self.check is not None

    def result(self, field: str | None = None) -> Grammar:
        """Wait until the check is done; return the grammar to follow.

        InvalidRequest naming `field`, the request's field, if it cannot be followed; CheckFailed if it could not be
        checked.
        """
        while self.check is None:
            self._validator.poll(WAIT_SECONDS)
        check = self.check
        if check.failure:
            raise CheckFailed(check.failure)
        if check.field is not None:
            raise InvalidRequest(field or check.field, check.message)
        if check.message:
            text = f"this {_called(self.grammar)} is not supported: {check.message}"
            raise InvalidRequest(field or field_of(self.grammar), text)
        return check.grammar or self.grammar

    def abandon(self) -> None:
        """Record that a request no longer waits for it."""
        self._validator.abandon(self)


class _Results:
    """Results of the last checks, by digests of their grammars, which may take a megabyte each and are not kept.

    A result has a text if its grammar is refused or must be rewritten. All texts together take MAX_RESULT_BYTES.
    """

    def __init__(self) -> None:
        self._checks: OrderedDict[bytes, GrammarCheck] = OrderedDict()  # most recently used last
        self._num_bytes = 0

    def get(self, grammar: Grammar) -> GrammarCheck | None:
        """Return the result, if it is kept."""
        digest = _digest(grammar)
        check = self._checks.get(digest)
        if check is not None:
            self._checks.move_to_end(digest)
        return check

    def add(self, grammar: Grammar, check: GrammarCheck) -> None:
        """Keep a result in place of those that were used longest ago."""
        self._checks[_digest(grammar)] = check
        self._num_bytes += _text_bytes(check)
        while len(self._checks) > MAX_RESULTS or self._num_bytes > MAX_RESULT_BYTES:
            _, oldest = self._checks.popitem(last=False)
            self._num_bytes -= _text_bytes(oldest)


class GrammarValidator:
    """Checks the grammars of requests to one model.

    `named_tokens`: tokens that grammars may name, by id; `reasoning`: format of the model's reasoning, None if it has
    none; `closes_objects`: schemas are followed as closed_json_schema. It may be called from several threads. Checks
    make progress only in `poll`.
    """

    def __init__(
        self,
        named_tokens: Mapping[int, str],
        reasoning: ReasoningFormat | None = None,
        *,
        closes_objects: bool = False,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        self._named_tokens = named_tokens
        self._reasoning = reasoning
        self._closes_objects = closes_objects
        self._time_limit = time_limit
        self._process: TrialProcess | None = None  # started by the first check
        self._queue: CompileQueue[Grammar] = CompileQueue()
        self._pending: dict[Grammar, PendingCheck] = {}  # waiting or under way
        self._running: dict[int, PendingCheck] = {}  # by the trial's number
        self._results = _Results()
        self._trials = 0
        self._heard = 0.0  # `time.monotonic` of the process's last outcome, or of the first trial under way
        self._lock = threading.RLock()

    def fit(self, grammar: Grammar, prompt: Prompt, prompt_end: str) -> Grammar:
        """Return the grammar of the answer to this prompt, before which reasoning may come."""
        grammar = with_closed_schemas(grammar) if self._closes_objects else grammar
        if self._reasoning is None or not isinstance(prompt, ChatPrompt):
            return grammar
        continued = prompt.messages[-1].get("content", "") if prompt.continue_final_message else ""
        start = start_of_answer(self._reasoning, prompt_end, continued)
        if start is Place.OUTSIDE:
            return grammar
        if self._reasoning.has_channels:
            return after_analysis(grammar)
        tokens = frozenset(self._named_tokens.values())
        return after_reasoning(grammar, self._reasoning, tokens, is_open=start is Place.INSIDE)

    def validate(self, grammar: Grammar, field: str | None = None) -> Grammar:
        """Wait for a grammar's check; return the grammar to follow. InvalidRequest naming `field` if it is refused."""
        return self.check(grammar).result(field)

    def check(self, grammar: Grammar, client: str = "") -> PendingCheck:
        """Begin to check the grammar of a client, unless its result is known; QueueFull if too many wait already.

        The trial of a template also completes it.
        """
        pending = PendingCheck(grammar, self)
        if grammar.kind != "template":  # templates are the server's own
            try:
                grammar.check_size(field_of(grammar))
            except InvalidRequest as refused:
                pending.check = GrammarCheck(refused.message, refused.field)
                return pending
        with self._lock:
            pending.check = self._results.get(grammar)
            if pending.is_done:
                return pending
            pending = self._pending.get(grammar, pending)
            if pending not in self._running.values():
                self._queue.add(grammar, client, cost=estimated_cost(grammar), chars=len(grammar.text))
            self._pending[grammar] = pending
            pending.requests += 1
            self._start_trials()
            return pending

    def abandon(self, pending: PendingCheck) -> None:
        """Record that a request no longer waits; a grammar for which no request waits is not tried any more."""
        with self._lock:
            pending.requests -= 1
            if not pending.requests and not pending.is_done and pending not in self._running.values():
                self._queue.remove(pending.grammar)
                del self._pending[pending.grammar]

    def poll(self, seconds: float = 0.0) -> None:
        """Handle trials that have ended, and begin the next; wait up to `seconds` for one to end."""
        with self._lock:
            if self._process is None:
                return
            try:
                for outcome in self._process.poll(seconds):
                    self._heard = time.monotonic()
                    pending = self._running.pop(outcome.number)
                    self._queue.finish(pending.grammar, outcome.seconds)
                    self._settle(pending, outcome.check)
                if self._running and time.monotonic() > self._heard + SILENCE_SECONDS:
                    self._process.end()
                    self._try_again()
            except TrialsEnded:
                self._try_again()
            self._start_trials()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _start_trials(self) -> None:
        while len(self._running) < CONCURRENCY and (grammar := self._queue.next()) is not None:
            self._start(self._pending[grammar])

    def _start(self, pending: PendingCheck) -> None:
        self._process = self._process or TrialProcess(self._named_tokens)
        if not self._running:
            self._heard = time.monotonic()
        pending.attempts += 1
        self._trials += 1
        self._running[self._trials] = pending
        self._process.start(Trial(self._trials, pending.grammar, self._time_limit))

    def _try_again(self) -> None:
        """Start the trials under way again, because the process has ended.

        No grammar can have caused that: each can crash only its own fork.
        """
        running, self._running, self._process = self._running, {}, None
        for pending in running.values():
            if pending.attempts < ATTEMPTS:
                self._start(pending)
            else:
                self._queue.finish(pending.grammar, self._time_limit)
                self._settle(pending, GrammarCheck(failure="the process that tries grammars has ended twice"))

    def _settle(self, pending: PendingCheck, check: GrammarCheck) -> None:
        pending.check = check
        del self._pending[pending.grammar]
        if not check.failure:  # after a failure the next request's check may succeed
            self._results.add(pending.grammar, check)


def _digest(grammar: Grammar) -> bytes:
    return hashlib.blake2b(f"{grammar.kind} {grammar.text}".encode()).digest()


def _text_bytes(check: GrammarCheck) -> int:
    """Return the memory that a result's texts take."""
    rewritten = 0 if check.grammar is None else sys.getsizeof(check.grammar.text)
    return rewritten + sys.getsizeof(check.message)


def _called(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object" | "json_schema" | "closed_json_schema":
            return "JSON schema"
        case "regex" | "choice":
            return "regular expression"
        case "ebnf" | "lark" | "template":
            return "grammar"
