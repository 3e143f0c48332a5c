"""Automata of grammars: compiles each grammar in a thread, and bounds the memory of all.

An automaton grows as it is used. The requests that share it lock it; so a grammar that several requests follow at the
same time is compiled once for each thread that fills bitmasks. When an automaton has reached its limit of states, for
all its requests together, it is dropped, and its requests continue with a new one.

Automata are bounded by their number and by their bytes. A hostile regular expression, such as `.*a.{300}Z`, has
another state for each text so far: 20 to 500 KB for each token, where most schemas take less than 1 MB in all. Only
all automata together are measured. The size of one becomes known when it is freed, and those in use are freed only if
all together take too much.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from weakref import WeakSet

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from minisgl.panics import LibraryPanic, panics_as_errors
from minisgl.sampling_params import MAX_GRAMMARS_BYTES, Grammar
from minisgl.structured_output.heap import allocated_bytes, return_free_memory
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
MAX_COMPILERS = 8  # threads

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The model's tokens as llguidance reads them."""

    tokens: LLTokenizer
    special: frozenset[str]  # texts of special tokens


class AutomatonUser(Protocol):
    """Matcher of a request, as its automaton knows it."""

    def drop_ll_matcher(self) -> None:
        """Drop llguidance's matcher, which holds memory of the automaton."""

    def move_to(self, automaton: Automaton) -> None:
        """Continue from the same position with another automaton of the grammar."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Automaton:
    """Compiled grammar. Only one thread at a time can fill bitmasks from it."""

    grammar: Grammar
    compiled: Future[LLMatcher | None]  # matcher at the beginning of the grammar; None if it cannot be used
    users: WeakSet[AutomatonUser] = field(default_factory=WeakSet)
    successor: Automaton | None = None  # the automaton that has replaced it
    filled_rows: int = 0  # rows of bitmasks filled from it, most of which made it grow if it is hostile
    is_too_large: bool = False  # it was freed, and its requests end

    def free(self) -> int:
        """Free the memory; return its bytes. No request can use the automaton any more."""
        before = allocated_bytes()
        self.compiled = _freed()
        for user in self.users:
            user.drop_ll_matcher()
        return before - allocated_bytes()


class Automata:
    """All automata of an engine.

    `load` returns the tokenizer, when `vocabulary` or the first grammar needs it. A grammar has at most `threads`
    automata, so that as many threads can fill bitmasks from it.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], *, vocab_size: int, eos_token_ids: Collection[int], threads: int
    ) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads = threads
        self._vocabulary: Future[GrammarVocabulary | None] | None = None
        self._compilers: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[Grammar, list[Automaton]] = OrderedDict()  # most recently used last
        self._alive: WeakSet[Automaton] = WeakSet()  # these, and others that requests still use
        self._other_bytes = 0  # bytes of malloc when there was no automaton, or fewer
        self._limit = MAX_GRAMMARS_BYTES  # bytes of all automata above which those in use are freed next
        self._next_measurement = 0.0  # time on `time.perf_counter` before which memory is not measured again

    def vocabulary(self) -> Future[GrammarVocabulary | None]:
        """Begin to load the vocabulary; return at once. The result is None if llguidance cannot use it."""
        if self._vocabulary is None:
            self._vocabulary = self._submit(self._load_vocabulary)
        return self._vocabulary

    def least_used(self, grammar: Grammar) -> Automaton:
        """Return the automaton with the fewest users; compile one if all are in use and a thread is left for it."""
        automata = self._kept.setdefault(grammar, [])
        self._kept.move_to_end(grammar)
        least_used = min(automata, key=lambda one: len(one.users), default=None)
        if least_used is not None and (not least_used.users or len(automata) == self._threads):
            return least_used
        automata.append(self._compile(grammar))
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > MAX_AUTOMATA:
            self._kept.popitem(last=False)
        return automata[-1]

    def successor(self, old: Automaton) -> Automaton:
        """Return the automaton that replaces this one; compile it if there is none yet."""
        if old.successor is None:
            old.successor = self._compile(old.grammar)
            automata = self._kept.setdefault(old.grammar, [])
            automata[:] = [old.successor, *(one for one in automata if one is not old)]
        return old.successor

    # --- memory -----------------------------------------------------------------------------------------------

    def bound_memory(self) -> None:
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
        for grammar, automata in list(self._kept.items()):
            used = [automaton for automaton in automata if automaton.users]
            if len(used) == len(automata):
                continue
            automata[:] = used
            if not used:
                del self._kept[grammar]
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
                self._remove(automaton)
                ended += len(users)
            else:
                for user in users:
                    user.move_to(self.successor(automaton))
        logger.warning(
            "grammars needed more than %d MiB: %d requests end, whose grammars had more than an equal share",
            MAX_GRAMMARS_BYTES // 2**20,
            ended,
        )

    def _remove(self, automaton: Automaton) -> None:
        """Keep the automaton from later requests."""
        kept = [one for one in self._kept.get(automaton.grammar, []) if one is not automaton]
        if kept:
            self._kept[automaton.grammar] = kept
        else:
            self._kept.pop(automaton.grammar, None)

    # --- compilation ------------------------------------------------------------------------------------------

    def _compile(self, grammar: Grammar) -> Automaton:
        vocabulary = self.vocabulary()
        if not self._alive:
            self._other_bytes = allocated_bytes()
        automaton = Automaton(grammar, self._submit(lambda: _compiled(grammar, vocabulary)))
        self._alive.add(automaton)
        return automaton

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        self._compilers = self._compilers or _compiler_threads(max(2, min(self._threads, MAX_COMPILERS)))
        return self._compilers.submit(work)

    def _load_vocabulary(self) -> GrammarVocabulary | None:
        try:
            tokenizer = self._load()
            with panics_as_errors():
                tokens = model_vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
            return GrammarVocabulary(tokens, frozenset(named_tokens(tokenizer).values()))
        except Exception:  # whatever reading a tokenizer raises
            logger.exception("no grammar can be followed: llguidance cannot use the model's tokenizer")
            return None


def model_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Return the vocabulary of a model with logits for `vocab_size` ids; ids without a token are never allowed.

    This takes a second for 150,000 tokens, and holds the GIL. ValueError if llguidance cannot derive the tokens' bytes
    from the tokenizer.
    """
    n_vocab = max(vocab_size, tokenizer.get_vocab_size())
    return LLTokenizer(tokenizer.to_str(), n_vocab=n_vocab, eos_token=sorted(eos_token_ids) or None)


def _compiler_threads(count: int) -> ThreadPoolExecutor:
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


def _compiled(grammar: Grammar, vocabulary: Future[GrammarVocabulary | None]) -> LLMatcher | None:
    """Return a matcher at the beginning of the grammar; None if the grammar cannot be used."""
    words = vocabulary.result()
    if words is None:
        return None
    try:
        text = without_forced_tokens(grammar) if names_special_token(grammar, words.special) else to_llguidance(grammar)
        with panics_as_errors():
            matcher = LLMatcher(words.tokens, text, log_level=0, limits=PARSER_LIMITS)
            matcher.compute_bitmask()  # copies share the states that this computes
            error = matcher.get_error()
    except (ValueError, LibraryPanic) as invalid:
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
