"""Surroundings of llguidance's compiler: vocabularies, limits, and threads with enough stack.

A vocabulary says what each token id spells, and which ids end a sequence. The compiler follows chains of rules by
recursion, so it needs more stack than usual.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

# Cost of one bitmask, and size of an automaton. llguidance calls what goes beyond them too complex.
PARSER_LIMITS = LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)
STACK_BYTES = 256 * 2**20  # of address space; enough for every grammar of core.MAX_GRAMMAR_CHARS


def model_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Vocabulary of a model with logits for `vocab_size` ids; ids that no token has are never allowed.

    Takes a second for 150,000 tokens, during which no other Python thread runs. ValueError if llguidance cannot tell
    from the tokenizer what its tokens spell.
    """
    n_vocab = max(vocab_size, tokenizer.get_vocab_size())
    return LLTokenizer(tokenizer.to_str(), n_vocab=n_vocab, eos_token=sorted(eos_token_ids) or None)


def named_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that grammars may name, by id."""
    return {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}


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


def compiler_threads(count: int) -> ThreadPoolExecutor:
    """Start a pool of `count` threads with large stacks."""
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
