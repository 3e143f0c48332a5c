"""Follows grammars during generation: implements `protocol` with llguidance.

A grammar is compiled in a thread, and its automaton grows as it is used. Requests get copies of a matcher, which share
its automaton and lock it; so a grammar that several requests follow at the same time is compiled once for each thread
that fills bitmasks. The threads release the GIL. When an automaton has reached its limit of states, for all its
requests together, it is dropped, and its requests continue with a new one.

Automata are bounded by their number and by their bytes. A hostile regular expression, such as `.*a.{300}Z`, has
another state for each text so far: 20 to 500 KB for each token, where most schemas take less than 1 MB in all. Only
all automata together are measured. The size of one becomes known when it is freed, and those in use are freed only if
all together take too much.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakSet

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from minisgl.core import Int32Array
from minisgl.sampling_params import MAX_GRAMMARS_BYTES, Grammar, SamplingParams
from minisgl.structured_output.heap import allocated_bytes, return_free_memory
from minisgl.structured_output.protocol import Matcher, MatcherStatus
from minisgl.structured_output.translate import (
    PARSER_LIMITS,
    STACK_BYTES,
    named_tokens,
    names_special_token,
    to_llguidance,
    without_forced_tokens,
)

logger = logging.getLogger(__name__)

MAX_AUTOMATA = 256  # automata kept for later requests
MAX_IDLE_BYTES = 2**30  # of all automata together, above which none is kept for later requests
MEASURED_SHARE = 0.01  # of the scheduler's time: the most that measuring the automata's memory takes
MAX_THREADS = 16  # threads that fill bitmasks
MAX_COMPILERS = 8  # threads
REPLAYED_TOKENS = 256  # tokens that a moved matcher consumes at a time
REPLACEMENTS = 2  # attempts to replace a request's automaton in one step: the first new one may be full

T = TypeVar("T")


class GrammarMatcher:
    """Position of one request in its grammar. It `is_compiling` until the grammar is compiled.

    Where the grammar accepts an end, the ids that end the request are allowed too: the model's end-of-sequence ids and
    the request's `stop_token_ids`. Elsewhere the latter are allowed only if nothing else can follow, and then end the
    request in the middle of the grammar. With `ignore_eos`, end-of-sequence ids are forbidden as long as any other
    token can follow.
    """

    def __init__(self, automaton: Automaton, sampling: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        assert sampling.grammar is not None
        self.grammar = sampling.grammar
        self.automaton = automaton
        automaton.users.add(self)
        self._followed: LLMatcher | None = None
        self._tokens: list[int] = []  # tokens consumed so far
        self._own_stop_ids = frozenset(sampling.stop_token_ids) - eos_token_ids
        self._stop_ids = self._own_stop_ids | eos_token_ids
        self._avoided = eos_token_ids - frozenset(sampling.stop_token_ids) if sampling.ignore_eos else frozenset[int]()
        self._allowed_ids = None if sampling.allowed_token_ids is None else frozenset(sampling.allowed_token_ids)

    @property
    def is_compiling(self) -> bool:
        return not self.automaton.compiled.done()

    @property
    def followed(self) -> LLMatcher | None:
        """llguidance's matcher; None if the grammar cannot be used."""
        if self._followed is None:
            compiled = self.automaton.compiled.result()
            self._followed = None if compiled is None else compiled.deep_copy()
        return self._followed

    @property
    def is_plain(self) -> bool:
        """True if llguidance's bitmask needs no adjustment."""
        return not self._own_stop_ids and not self._avoided

    @property
    def is_stuck(self) -> bool:
        """True if its automaton is full, or the grammar is too complex."""
        return self.followed is not None and self.followed.is_error()

    def forget_followed(self) -> None:
        """Drop llguidance's matcher; the next use copies the automaton's, at the beginning of the grammar."""
        self._followed = None

    def move_to(self, automaton: Automaton) -> None:
        """Continue from the same position with another automaton of the grammar."""
        self.automaton.users.discard(self)
        self.automaton, self._followed = automaton, None
        automaton.users.add(self)
        for start in range(0, len(self._tokens), REPLAYED_TOKENS):
            if self.followed is not None:
                self.followed.consume_tokens(self._tokens[start : start + REPLAYED_TOKENS])
                self.followed.compute_bitmask()  # resets llguidance's limit on work between two bitmasks

    def advance(self, token: int) -> MatcherStatus:
        """Consume a token; return the status after it."""
        followed = self.followed
        if followed is None or followed.is_error():
            return MatcherStatus.TOO_LARGE if self.automaton.is_too_large else MatcherStatus.FAILED
        if self._allowed_ids is not None and self._is_excluded(token, self._allowed_ids, followed):
            return MatcherStatus.EXCLUDED
        if token in self._stop_ids and followed.is_accepting():
            return MatcherStatus.COMPLETE
        if not followed.consume_token(token):
            return MatcherStatus.FAILED
        self._tokens.append(token)
        if token in self._stop_ids:  # even if the grammar has not ended: nothing else was allowed
            return MatcherStatus.COMPLETE
        if not followed.is_stopped():
            return MatcherStatus.OPEN
        return MatcherStatus.FAILED if followed.is_error() else MatcherStatus.COMPLETE

    def _is_excluded(self, token: int, allowed_ids: frozenset[int], followed: LLMatcher) -> bool:
        """Return True if the token violates `allowed_ids` or the grammar: the sampler had no token that both allow."""
        if token not in allowed_ids:
            return True
        may_end = token in self._stop_ids and followed.is_accepting()
        return not may_end and not followed.validate_tokens([token]) and not followed.is_error()

    def adjust(self, row: Int32Array, followed: LLMatcher) -> None:
        """Change llguidance's row of the bitmask, int32[words], by the rules about ids that end the request."""
        if self._own_stop_ids:
            kept = row.copy()
            for token in self._own_stop_ids:
                _set_bit(row, token, _may_end_with(token, followed, is_allowed=_has_bit(row, token)))
            if not row.any():
                row[:] = kept
        if self._avoided:
            kept = row.copy()
            for token in self._avoided:
                _set_bit(row, token, False)
            if not row.any():
                row[:] = kept


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: LLTokenizer
    special: frozenset[str]  # texts of special tokens


@dataclass(slots=True, eq=False, weakref_slot=True)
class Automaton:
    """Compiled grammar. Only one thread at a time can fill bitmasks from it."""

    compiled: Future[LLMatcher | None]  # matcher at the beginning of the grammar; None if it cannot be used
    users: WeakSet[GrammarMatcher] = field(default_factory=WeakSet)
    successor: Automaton | None = None  # the automaton that has replaced it
    filled_rows: int = 0  # rows of bitmasks filled from it, most of which made it grow if it is hostile
    is_too_large: bool = False  # it was freed, and its requests end

    def free(self) -> int:
        """Free the memory; return its bytes. No request can use the automaton any more."""
        before = allocated_bytes()
        self.compiled = _freed()
        for user in self.users:
            user.forget_followed()
        return before - allocated_bytes()


class GrammarMatchers:
    """Creates and advances the matchers of an engine's requests.

    `load` returns the tokenizer, when `prepare` or the first request needs it. The model has logits for `vocab_size`
    ids.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], *, vocab_size: int, eos_token_ids: Sequence[int], threads: int = 0
    ) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary: Future[_Vocabulary | None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._automata: OrderedDict[Grammar, list[Automaton]] = OrderedDict()  # most recently used last
        self._alive: WeakSet[Automaton] = WeakSet()  # these, and others that requests still use
        self._other_bytes = 0  # bytes of malloc when there was no automaton, or fewer
        self._limit = MAX_GRAMMARS_BYTES  # bytes of all automata above which those in use are freed next
        self._next_measurement = 0.0  # time on `time.perf_counter` before which memory is not measured again
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._fillers: LLExecutor | None = None

    def prepare(self) -> Future[_Vocabulary | None]:
        """Begin to load the vocabulary; return at once. The result is None if llguidance cannot use it."""
        if self._vocabulary is None:
            self._vocabulary = self._submit(self._load_vocabulary)
        return self._vocabulary

    def start(self, sampling: SamplingParams) -> GrammarMatcher:
        assert sampling.grammar is not None
        self._bound_memory()
        return GrammarMatcher(self._automaton(sampling.grammar), sampling, self._eos_token_ids)

    def advance(self, matchers: Sequence[Matcher], tokens: Int32Array) -> list[MatcherStatus]:
        return [self._advance(_own(matcher), token) for matcher, token in zip(matchers, tokens.tolist(), strict=True)]

    def fill(self, bitmask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        vocabulary = self.prepare().result()
        words = bitmask.shape[1] if vocabulary is None else -(-vocabulary.tokens.vocab_size // 32)
        if words != bitmask.shape[1]:  # the tokenizer has more ids than the model has logits for
            wide = np.empty((len(bitmask), words), dtype=np.int32)
            self._fill(wide, matchers)
            bitmask[:] = wide[:, : bitmask.shape[1]]
        else:
            self._fill(bitmask, matchers)
        self._bound_memory()

    def _fill(self, bitmask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        """Fill a bitmask that has a bit for each id of llguidance's vocabulary."""
        constrained = [(_own(matcher), row) for row, matcher in enumerate(matchers) if matcher is not None]
        # A thread gets neighbours, so those of one automaton, which cannot run at the same time, come together.
        constrained.sort(key=lambda one: id(one[0].automaton))
        filled = [(matcher.followed, row) for matcher, row in constrained if matcher.followed is not None]
        if len(filled) < len(matchers):
            bitmask.fill(-1)
        if filled:
            self._fillers = self._fillers or LLExecutor(self._threads)
            self._fillers.unsafe_compute_mask_ptr(
                filled, bitmask.ctypes.data, bitmask.shape[1] * bitmask.itemsize, len(bitmask)
            )
        for matcher, row in constrained:
            matcher.automaton.filled_rows += 1
            for _ in range(REPLACEMENTS):
                if not matcher.is_stuck:
                    break
                self._replace_automaton(matcher)
                if matcher.followed is not None:
                    matcher.followed.unsafe_compute_mask_ptr(bitmask[row].ctypes.data, bitmask[row].nbytes)
            if matcher.followed is not None and not matcher.is_plain:
                matcher.adjust(bitmask[row], matcher.followed)

    def _advance(self, matcher: GrammarMatcher, token: int) -> MatcherStatus:
        status = matcher.advance(token)
        for _ in range(REPLACEMENTS):
            if status is not MatcherStatus.FAILED or not matcher.is_stuck:
                break
            self._replace_automaton(matcher)
            status = matcher.advance(token)
        return status

    def _replace_automaton(self, matcher: GrammarMatcher) -> None:
        """Replace a stuck matcher's automaton, for this matcher and later ones."""
        matcher.move_to(self._successor(matcher.automaton, matcher.grammar))

    def _successor(self, old: Automaton, grammar: Grammar) -> Automaton:
        """Return the automaton that replaces another of the grammar; compile it if there is none yet."""
        if old.successor is None:
            old.successor = self._compile(grammar)
            automata = self._automata.setdefault(grammar, [])
            automata[:] = [old.successor, *(one for one in automata if one is not old)]
        return old.successor

    # --- memory -----------------------------------------------------------------------------------------------

    def _bound_memory(self) -> None:
        """Free automata if all together take too much memory: first those that no request uses."""
        if time.perf_counter() < self._next_measurement:
            return
        begin = time.thread_time()  # in which other processes do not count
        before = after = self._bytes()
        self._next_measurement = time.perf_counter() + (time.thread_time() - begin) / MEASURED_SHARE
        if before > MAX_IDLE_BYTES:
            self._drop_idle()
            after = self._bytes()
        if after <= MAX_GRAMMARS_BYTES:
            self._limit = MAX_GRAMMARS_BYTES
        elif after > self._limit:
            self._free_used()
            after = self._bytes()
            # What is left belongs to grammars that are being compiled, or to other parts of the process.
            self._limit = max(MAX_GRAMMARS_BYTES, after + MAX_GRAMMARS_BYTES // 4)
        if before - after > MAX_IDLE_BYTES // 16:
            return_free_memory()

    def _bytes(self) -> int:
        """Return the bytes that the process has allocated since there was no automaton, most of which are theirs."""
        allocated = allocated_bytes()
        if not self._alive or allocated < self._other_bytes:
            self._other_bytes = allocated
        return allocated - self._other_bytes

    def _drop_idle(self) -> None:
        """Drop automata that no request uses, the least recently used first, until the others may be kept."""
        for grammar, automata in list(self._automata.items()):
            used = [automaton for automaton in automata if automaton.users]
            if len(used) == len(automata):
                continue
            automata[:] = used
            if not used:
                del self._automata[grammar]
            if self._bytes() <= MAX_IDLE_BYTES:
                break

    def _free_used(self) -> None:
        """Free automata in use until a quarter of MAX_GRAMMARS_BYTES is free.

        Requests of automata that have more than an equal share of the other three quarters end; such automata exist if
        the sum is larger. Other requests continue with new automata. Hostile automata are probably among those from
        which most rows were filled, so these are freed first.
        """
        used = [automaton for automaton in self._alive if automaton.users and automaton.compiled.done()]
        used.sort(key=lambda automaton: automaton.filled_rows, reverse=True)
        left, wanted = self._bytes(), MAX_GRAMMARS_BYTES - MAX_GRAMMARS_BYTES // 4
        ended = 0
        for automaton in used:
            if left <= wanted:
                break
            users = list(automaton.users)
            freed = automaton.free()
            left -= freed
            if freed > wanted // len(used):
                automaton.is_too_large = True
                self._remove(automaton, users[0].grammar)
                ended += len(users)
            else:
                for user in users:
                    user.move_to(self._successor(automaton, user.grammar))
        logger.warning(
            "grammars needed more than %d MiB: %d requests end, whose grammars had more than an equal share",
            MAX_GRAMMARS_BYTES // 2**20,
            ended,
        )

    def _remove(self, automaton: Automaton, grammar: Grammar) -> None:
        """Keep the automaton from later requests."""
        kept = [one for one in self._automata.get(grammar, []) if one is not automaton]
        if kept:
            self._automata[grammar] = kept
        else:
            self._automata.pop(grammar, None)

    # --- compilation ------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        self._pool = self._pool or compiler_threads(max(2, min(self._threads, MAX_COMPILERS)))
        return self._pool.submit(work)

    def _load_vocabulary(self) -> _Vocabulary | None:
        try:
            tokenizer = self._load()
            tokens = model_vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
            return _Vocabulary(tokens, frozenset(named_tokens(tokenizer).values()))
        except Exception:  # whatever reading a tokenizer raises
            logger.exception("no grammar can be followed: llguidance cannot use the model's tokenizer")
            return None

    def _automaton(self, grammar: Grammar) -> Automaton:
        """Return the automaton with the fewest users; compile one if all are in use and a thread is left for it."""
        automata = self._automata.setdefault(grammar, [])
        self._automata.move_to_end(grammar)
        least_used = min(automata, key=lambda one: len(one.users), default=None)
        if least_used is not None and (not least_used.users or len(automata) == self._threads):
            return least_used
        automata.append(self._compile(grammar))
        while len(self._automata) > 1 and sum(map(len, self._automata.values())) > MAX_AUTOMATA:
            self._automata.popitem(last=False)
        return automata[-1]

    def _compile(self, grammar: Grammar) -> Automaton:
        vocabulary = self.prepare()
        if not self._alive:
            self._other_bytes = allocated_bytes()
        automaton = Automaton(self._submit(lambda: _compiled(grammar, vocabulary)))
        self._alive.add(automaton)
        return automaton


def model_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Return the vocabulary of a model with logits for `vocab_size` ids; ids without a token are never allowed.

    This takes a second for 150,000 tokens, and holds the GIL. ValueError if llguidance cannot derive the tokens' bytes
    from the tokenizer.
    """
    n_vocab = max(vocab_size, tokenizer.get_vocab_size())
    return LLTokenizer(tokenizer.to_str(), n_vocab=n_vocab, eos_token=sorted(eos_token_ids) or None)


def compiler_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool of `count` threads with large stacks."""
    pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="grammar")
    started = threading.Barrier(count + 1)
    usual = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(count):
            pool.submit(started.wait)
        started.wait()
    finally:
        threading.stack_size(usual)
    return pool


def _compiled(grammar: Grammar, vocabulary: Future[_Vocabulary | None]) -> LLMatcher | None:
    """Return a matcher at the beginning of the grammar; None if the grammar cannot be used."""
    words = vocabulary.result()
    if words is None:
        return None
    try:
        text = without_forced_tokens(grammar) if names_special_token(grammar, words.special) else to_llguidance(grammar)
        matcher = LLMatcher(words.tokens, text, log_level=0, limits=PARSER_LIMITS)
        matcher.compute_bitmask()  # copies share the states that this computes
        error = matcher.get_error()
    except ValueError as invalid:
        error = str(invalid)
    if error:
        logger.error("a %s grammar that was validated cannot be followed: %s", grammar.kind, error)
        return None
    return matcher


def _freed() -> Future[LLMatcher | None]:
    """Return the `compiled` of an automaton that was freed."""
    nothing: Future[LLMatcher | None] = Future()
    nothing.set_result(None)
    return nothing


def _may_end_with(token: int, followed: LLMatcher, *, is_allowed: bool) -> bool:
    """Return True if the grammar accepts an end here, or after this token if it `is_allowed`."""
    if followed.is_accepting() or not is_allowed:
        return followed.is_accepting()
    followed.consume_token(token)
    accepts = followed.is_accepting()
    followed.rollback(1)
    return accepts


def _own(matcher: Matcher) -> GrammarMatcher:
    assert isinstance(matcher, GrammarMatcher)
    return matcher


def _has_bit(row: Int32Array, token: int) -> bool:
    return bool(row.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)


def _set_bit(row: Int32Array, token: int, value: bool) -> None:
    words, bit = row.view(np.uint32), np.uint32(1 << token % 32)
    if value:
        words[token // 32] |= bit
    else:
        words[token // 32] &= ~bit
