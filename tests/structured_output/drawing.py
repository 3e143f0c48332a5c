"""Texts that a grammar allows, drawn token by token from the masks that the scheduler would use."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from minisgl.core import Int32Array
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.structured_output.matcher import GrammarMatcher, GrammarMatchers
from minisgl.structured_output.protocol import MatcherStatus

EOS = "<|end|>"
PADDING = 37  # logits that no token has
CLOSING = frozenset('"}]')


def trained_tokenizer() -> Tokenizer:
    """Byte-level, of some 700 tokens; many span what a grammar keeps apart."""
    rng = random.Random(0)
    words = ["name", "value", "the", "list", "of", "true", "null", "red", "green", "äöü", "☃"]
    texts = []
    for _ in range(300):
        record = {rng.choice(words): [rng.randrange(1000), rng.random()], rng.choice(words): {"x": rng.choice(words)}}
        texts.append(json.dumps(record, indent=rng.choice([None, 1, 2, 4]), ensure_ascii=False))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def filled(grammars: GrammarMatchers, matchers: Sequence[GrammarMatcher | None], vocab_size: int) -> Int32Array:
    """[rows, words]: the mask of a step."""
    mask = np.empty((len(matchers), -(-vocab_size // 32)), dtype=np.int32)
    grammars.fill(mask, matchers)
    return mask


class Drawer:
    """Draws whole texts. A random preference for each token stands for a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.token_to_id(EOS)
        self.vocab_size = tokenizer.get_vocab_size() + PADDING
        self.matchers = GrammarMatchers(
            lambda: tokenizer, vocab_size=self.vocab_size, eos_token_ids=[self.eos], threads=1
        )
        self._closes = np.zeros(self.vocab_size)
        for token, index in tokenizer.get_vocab().items():
            self._closes[index] = 4.0 if token[0] in CLOSING else 0.0
        self._closes[self.eos] = 6.0

    def allowed(self, matcher: object) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[vocab_size]"""
        mask = filled(self.matchers, [matcher], self.vocab_size)  # type: ignore[list-item]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size].astype(bool)
        assert not bits[self.tokenizer.get_vocab_size() :].any(), "an id that no token has"
        return bits

    def draw(
        self, grammar: Grammar, seed: int, *, greedy: bool, max_tokens: int = 200, haste: float = 1.0
    ) -> str | None:
        """A text that the grammar ended, or None where it has not come to an end. With haste it ends sooner."""
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=self.vocab_size) + haste * self._closes
        matcher = self.matchers.start(SamplingParams(grammar=grammar))
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            noise = 0.0 if greedy else rng.gumbel(size=self.vocab_size)
            allowed = self.allowed(matcher)
            assert allowed.any(), f"a dead end behind {self.tokenizer.decode(tokens)!r}"
            token = int(np.where(allowed, logits + noise, -np.inf).argmax())
            (status,) = self.matchers.advance([matcher], np.array([token], dtype=np.int32))
            assert status is not MatcherStatus.FAILED, f"failed behind {self.tokenizer.decode(tokens)!r}"
            if token == self.eos:
                break
            tokens.append(token)
            if status is MatcherStatus.COMPLETE:
                break
        else:
            return None
        return self.tokenizer.decode(tokens)
