"""Prompts to token ids: plain text, and conversations through the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from minisgl.core import Int32Array, InvalidRequest
from minisgl.tokenizer.chat_template import ChatTemplates
from minisgl.tokenizer.files import chat_templates, load_tokenizer, load_tokenizer_config, special_tokens


class TextTokenizer:
    """A model's tokenizer with its chat templates. What a client sent wrong raises InvalidRequest."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates) -> None:
        self.tokenizer = tokenizer
        self._templates = templates

    @classmethod
    def from_folder(cls, path: str | Path) -> TextTokenizer:
        """Load from a model folder; ConfigError if its tokenizer cannot be used."""
        folder = Path(path)
        config = load_tokenizer_config(folder)
        templates = ChatTemplates(
            chat_templates(folder, config), special_tokens(config), model_name=folder.resolve().name
        )
        return cls(load_tokenizer(folder), templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> Int32Array:
        """The ids of a text, with the special tokens (BOS) that the model's tokenizer adds unless told not to."""
        return self._encode(text, add_special_tokens, field="prompt")

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Int32Array:
        """The ids of a conversation. No special token is added: the template has written them all."""
        text = self.render_chat(messages, tools, template_kwargs, add_generation_prompt)
        return self._encode(text, add_special_tokens=False, field="messages")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as the text that the model was trained on."""
        return self._templates.render(messages, tools, template_kwargs or {}, add_generation_prompt)

    def decode(self, ids: Sequence[int] | Int32Array, skip_special_tokens: bool = True) -> str:
        """The text of ids, all at once."""
        return self.tokenizer.decode(np.asarray(ids, dtype=np.int32).tolist(), skip_special_tokens=skip_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> Int32Array:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise InvalidRequest(
                field, f"character {error.start} of the text is half of a surrogate pair (U+{code:04X})"
            ) from None
        encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.array(encoding.ids, dtype=np.int32)
