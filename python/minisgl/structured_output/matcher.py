"""Follows grammars during generation: implements `protocol` with llguidance.

Requests get copies of the matcher at the beginning of their grammar, which share its automaton (`automata`). Threads
fill the bitmasks, and release the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLExecutor, LLMatcher
from tokenizers import Tokenizer

from minisgl.core import Int32Array
from minisgl.sampling_params import SamplingParams
from minisgl.structured_output.automata import Automata, Automaton, GrammarVocabulary
from minisgl.structured_output.protocol import Matcher, MatcherStatus

MAX_THREADS = 16  # threads that fill bitmasks
REPLAYED_TOKENS = 256  # tokens that a moved matcher consumes at a time
REPLACEMENTS = 2  # attempts to replace a request's automaton in one step: the first new one may be full


class GrammarMatcher:
    """Position of one request in its grammar. It `is_compiling` until the grammar is compiled.

    Where the grammar accepts an end, the ids that end the request are allowed too: the model's end-of-sequence ids and
    the request's `stop_token_ids`. The latter may also complete the grammar, as a named token at its end does.
    Elsewhere they are allowed only if nothing else can follow, and then end the request in the middle of the grammar.
    With `ignore_eos`, end-of-sequence ids are forbidden as long as any other token can follow.
    """

    def __init__(self, automaton: Automaton, sampling: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        assert sampling.grammar is not None
        self.automaton = automaton
        automaton.users.add(self)
        self._ll_matcher: LLMatcher | None = None
        self._tokens: list[int] = []  # tokens consumed so far
        self._own_stop_ids = frozenset(sampling.stop_token_ids) - eos_token_ids
        self._stop_ids = self._own_stop_ids | eos_token_ids
        self._avoided = eos_token_ids - frozenset(sampling.stop_token_ids) if sampling.ignore_eos else frozenset[int]()
        self._allowed_ids = None if sampling.allowed_token_ids is None else frozenset(sampling.allowed_token_ids)

    @property
    def is_compiling(self) -> bool:
        return not self.automaton.compiled.done()

    @property
    def ll_matcher(self) -> LLMatcher | None:
        """llguidance's matcher; None if the grammar cannot be used."""
        if self._ll_matcher is None:
            compiled = self.automaton.compiled.result()
            self._ll_matcher = None if compiled is None else compiled.deep_copy()
        return self._ll_matcher

    @property
    def is_plain(self) -> bool:
        """True if llguidance's bitmask needs no adjustment."""
        return not self._own_stop_ids and not self._avoided

    @property
    def is_stuck(self) -> bool:
        """True if its automaton is full, or the grammar is too complex."""
        return self.ll_matcher is not None and self.ll_matcher.is_error()

    def drop_ll_matcher(self) -> None:
        """Drop llguidance's matcher; the next use copies the automaton's, at the beginning of the grammar."""
        self._ll_matcher = None

    def move_to(self, automaton: Automaton) -> None:
        """Continue from the same position with another automaton of the grammar."""
        self.automaton.users.discard(self)
        self.automaton, self._ll_matcher = automaton, None
        automaton.users.add(self)
        for start in range(0, len(self._tokens), REPLAYED_TOKENS):
            if self.ll_matcher is not None:
                self.ll_matcher.consume_tokens(self._tokens[start : start + REPLAYED_TOKENS])
                self.ll_matcher.compute_bitmask()  # resets llguidance's limit on work between two bitmasks

    def advance(self, token: int) -> MatcherStatus:
        """Consume a token; return the status after it."""
        ll_matcher = self.ll_matcher
        if self.automaton.is_too_large:
            return MatcherStatus.TOO_LARGE
        if ll_matcher is None:
            return MatcherStatus.UNUSABLE
        if ll_matcher.is_error():
            return MatcherStatus.FAILED
        if self._allowed_ids is not None and self._is_excluded(token, self._allowed_ids, ll_matcher):
            return MatcherStatus.EXCLUDED
        if token in self._stop_ids and ll_matcher.is_accepting():
            return MatcherStatus.COMPLETE
        if not ll_matcher.consume_token(token):
            return MatcherStatus.FAILED
        self._tokens.append(token)
        if token in self._stop_ids:  # even if the grammar has not ended: nothing else was allowed
            return MatcherStatus.COMPLETE
        if not ll_matcher.is_stopped():
            return MatcherStatus.OPEN
        return MatcherStatus.FAILED if ll_matcher.is_error() else MatcherStatus.COMPLETE

    def _is_excluded(self, token: int, allowed_ids: frozenset[int], ll_matcher: LLMatcher) -> bool:
        """Return True if the token violates `allowed_ids` or the grammar: the sampler had no token that both allow."""
        if token not in allowed_ids:
            return True
        may_end = token in self._stop_ids and ll_matcher.is_accepting()
        return not may_end and not ll_matcher.validate_tokens([token]) and not ll_matcher.is_error()

    def adjust(self, row: Int32Array, ll_matcher: LLMatcher, vocab_size: int) -> None:
        """Change llguidance's row of the bitmask, int32[words], by the rules about ids that end the request.

        The row may have ids beyond `vocab_size`, which the model cannot choose.
        """
        if self._own_stop_ids:
            kept = row.copy()
            for token in self._own_stop_ids:
                _set_bit(row, token, _may_end_with(token, ll_matcher, is_allowed=_has_bit(row, token)))
            if not _has_any_bit(row, vocab_size):
                row[:] = kept
        if self._avoided:
            kept = row.copy()
            for token in self._avoided:
                _set_bit(row, token, False)
            if not _has_any_bit(row, vocab_size):
                row[:] = kept


class GrammarMatchers:
    """Creates and advances the matchers of an engine's requests.

    `load` returns the tokenizer, when `prepare` or the first request needs it. The model has logits for `vocab_size`
    ids.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], *, vocab_size: int, eos_token_ids: Sequence[int], threads: int = 0
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._automata = Automata(load, vocab_size=vocab_size, eos_token_ids=self._eos_token_ids, threads=self._threads)
        self._fillers: LLExecutor | None = None

    def prepare(self) -> Future[GrammarVocabulary | None]:
        """Begin to load the vocabulary; return at once. The result is None if llguidance cannot use it."""
        return self._automata.vocabulary()

    def start(self, sampling: SamplingParams) -> GrammarMatcher:
        assert sampling.grammar is not None
        self._automata.bound_memory()
        return GrammarMatcher(self._automata.least_used(sampling.grammar), sampling, self._eos_token_ids)

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
        self._automata.bound_memory()

    def _fill(self, bitmask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        """Fill a bitmask that has a bit for each id of llguidance's vocabulary."""
        constrained = [(_own(matcher), row) for row, matcher in enumerate(matchers) if matcher is not None]
        # A thread gets neighbours, so those of one automaton, which cannot run at the same time, come together.
        constrained.sort(key=lambda one: id(one[0].automaton))
        filled = [(matcher.ll_matcher, row) for matcher, row in constrained if matcher.ll_matcher is not None]
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
                if matcher.ll_matcher is not None:
                    matcher.ll_matcher.unsafe_compute_mask_ptr(bitmask[row].ctypes.data, bitmask[row].nbytes)
            if matcher.ll_matcher is not None and not matcher.is_plain:
                matcher.adjust(bitmask[row], matcher.ll_matcher, self._vocab_size)

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
        matcher.move_to(self._automata.successor(matcher.automaton))


def _may_end_with(token: int, ll_matcher: LLMatcher, *, is_allowed: bool) -> bool:
    """Return True if the grammar accepts an end here, or after this token if it `is_allowed`.

    A matcher also consumes a token with the bytes of another one, of which two a bitmask allows only one.
    """
    if ll_matcher.is_accepting() or not is_allowed:
        return ll_matcher.is_accepting()
    ll_matcher.consume_token(token)
    accepts = ll_matcher.is_accepting()
    ll_matcher.rollback(1)
    return accepts


def _own(matcher: Matcher) -> GrammarMatcher:
    assert isinstance(matcher, GrammarMatcher)
    return matcher


def _has_any_bit(row: Int32Array, vocab_size: int) -> bool:
    """Return True if a bit of an id below `vocab_size` is set."""
    words, rest = divmod(vocab_size, 32)
    if row[:words].any():
        return True
    return rest > 0 and bool(row.view(np.uint32)[words] & np.uint32((1 << rest) - 1))


def _has_bit(row: Int32Array, token: int) -> bool:
    return bool(row.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)


def _set_bit(row: Int32Array, token: int, value: bool) -> None:
    words, bit = row.view(np.uint32), np.uint32(1 << token % 32)
    if value:
        words[token // 32] |= bit
    else:
        words[token // 32] &= ~bit
