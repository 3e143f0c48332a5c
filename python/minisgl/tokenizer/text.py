"""Turns prompts into token ids: plain text, and conversations through the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from minisgl.core import Int32Array
from minisgl.limits import Limits
from minisgl.panics import panics_as_errors
from minisgl.sampling_params import CONTEXT_LENGTH_EXCEEDED, InvalidRequest
from minisgl.tokenizer.chat_template import ChatTemplates
from minisgl.tokenizer.decoder_choice import make_decoder
from minisgl.tokenizer.decoders.base import REPLACEMENT, TextDecoder
from minisgl.tokenizer.load_tokenizer import load_tokenizer
from minisgl.tokenizer.tokenizer_config import chat_templates, load_tokenizer_config, special_tokens

# A text with more characters per token of the context than this is checked by encoding its beginning first: encoding
# takes a second for some 2 MB, in which no other prompt is encoded.
CHARS_PER_TOKEN = 8


class TextTokenizer:
    """Tokenizer of a model with its chat templates. Methods raise InvalidRequest for a client's mistakes.

    `causal_reranker`: as `PoolingConfig.is_causal_reranker`; it decides the form of pairs without a template.
    """

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates, *, causal_reranker: bool = False) -> None:
        self.tokenizer = tokenizer
        self.causal_reranker = causal_reranker
        self.templates = templates

    @classmethod
    def from_folder(
        cls, path: str | Path, chat_template: str | None = None, *, causal_reranker: bool = False
    ) -> TextTokenizer:
        """Load from a model folder, with the chat template of a file if one is given.

        Raises ConfigError if the tokenizer or the template cannot be used.
        """
        folder = Path(path)
        config = load_tokenizer_config(folder)
        templates = ChatTemplates(
            chat_templates(folder, config, chat_template), special_tokens(config), model_name=folder.resolve().name
        )
        return cls(load_tokenizer(folder), templates, causal_reranker=causal_reranker)

    def encode(
        self, text: str, add_special_tokens: bool = True, field: str = "prompt", *, pair: str | None = None
    ) -> Int32Array:
        """Return the ids of a text, by default with the special tokens that the tokenizer adds (BOS).

        `pair`: a second text, which the tokenizer joins to the first in its own form.
        """
        for one in (text, pair or ""):
            try:
                one.encode()
            except UnicodeEncodeError as error:
                code = ord(one[error.start])
                raise InvalidRequest(
                    field, f"character {error.start} of the text is half of a surrogate pair (U+{code:04X})"
                ) from None
        sent = text if pair is None else (text, pair)
        with panics_as_errors():
            encoding = self.tokenizer.encode_batch_fast([sent], add_special_tokens=add_special_tokens)[0]
        return np.array(encoding.ids, dtype=np.int32)

    def encode_fitting(self, text: str, limits: Limits, add_special_tokens: bool, field: str) -> Int32Array:
        """Return the ids of a text; InvalidRequest, before encoding all of it, if it certainly exceeds the context."""
        self.check_length(text, limits, add_special_tokens, field)
        return self.encode(text, add_special_tokens, field)

    def check_length(self, text: str, limits: Limits, add_special_tokens: bool, field: str) -> None:
        """Raise InvalidRequest if the text certainly exceeds the context, as its length or its beginning shows."""
        max_tokens = limits.max_seq_len
        probe = max_tokens * CHARS_PER_TOKEN
        if len(text) > probe:
            if len(text) > max_tokens * self._longest_token:
                found = f"the prompt has {len(text)} characters, certainly too many"
                raise InvalidRequest(field, f"{found}, but {limits.context_limit}", CONTEXT_LENGTH_EXCEEDED)
            count = len(self.encode(text[:probe], add_special_tokens, field))
            if self._outnumbers(count, max_tokens):
                found = f"the first {probe} of the prompt's {len(text)} characters are {count} tokens"
                raise InvalidRequest(field, f"{found}, but {limits.context_limit}", CONTEXT_LENGTH_EXCEEDED)

    def most_chars(self, num_tokens: int) -> int:
        """Return the largest number of characters that `num_tokens` tokens can have."""
        return num_tokens * self._longest_token

    def encode_cut(
        self, text: str, num_tokens: int, add_special_tokens: bool, field: str = "prompt", *, keep_first: bool
    ) -> Int32Array:
        """Return `num_tokens` ids of a text, its last or first ones, including the special tokens around it."""
        ids, part = np.empty(0, dtype=np.int32), ""
        for chars in (num_tokens * CHARS_PER_TOKEN, self.most_chars(num_tokens)):
            part = text[:chars] if keep_first else text[-chars:]
            ids = self.encode(part, add_special_tokens, field)
            # Near the cut the tokens differ from those of the whole text, so there must be more than are kept.
            if len(part) == len(text) or self._outnumbers(len(ids), num_tokens):
                break
        if len(ids) <= num_tokens:
            return ids
        if not keep_first:
            front = self.encode("", add_special_tokens, field)
            kept = len(front) if len(front) < num_tokens and np.array_equal(ids[: len(front)], front) else 0
            return np.concatenate([ids[:kept], ids[len(ids) - num_tokens + kept :]])
        plain = self.encode(part, add_special_tokens=False, field=field)
        added = len(ids) - len(plain)
        begins = (at for at in range(added + 1) if np.array_equal(ids[at : at + len(plain)], plain))
        ends = ids[next(begins, 0) + len(plain) :] if added < num_tokens else ids[:0]
        return np.concatenate([ids[: num_tokens - len(ends)], ends])

    def first_token(self, ids: Int32Array) -> bytes:
        """Return the text of ids[0] at the start of a text, as UTF-8; it may be a part of a character."""
        text = self.decode(ids[:1], skip_special_tokens=False)
        return self._decoder.token_bytes(int(ids[0])) if REPLACEMENT in text else text.encode()

    @cached_property
    def _decoder(self) -> TextDecoder:
        return make_decoder(self.tokenizer)

    @cached_property
    def _longest_token(self) -> int:
        """Return the largest number of characters that one token can have."""
        return max(map(len, self.tokenizer.get_vocab()))

    @staticmethod
    def _outnumbers(found: int, num_tokens: int) -> bool:
        """Return True if a part of a text has so many tokens that the whole certainly has over `num_tokens`."""
        return found > num_tokens + num_tokens // 4 + 64

    def strings(self, ids: Int32Array) -> list[str]:
        """Return each token's string in the vocabulary."""
        return [self.tokenizer.id_to_token(token) or "" for token in ids.tolist()]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Int32Array:
        """Return the ids of a conversation that asks for an answer.

        The tokenizer adds no special token: the template writes them all.
        """
        text = self.templates.render(messages, tools, template_kwargs)
        return self.encode(text, add_special_tokens=False, field="messages")

    def decode(self, ids: Sequence[int] | Int32Array, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, all at once."""
        with panics_as_errors():
            tokens = np.asarray(ids, dtype=np.int32).tolist()
            return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
