"""Which added tokens a folder has: those of its tokenizer.json, and what its configuration says of them and beyond.

As in transformers. What added_tokens_decoder lists is said again, and may differ; tokens that have a name (eos_token)
and extra ones are special. Some folders write a vocabulary's token so and nowhere else: if it were not an added one,
the text `<|im_end|>` in a prompt would be many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from minisgl.config import ConfigError
from minisgl.tokenizer.folder import extra_special_tokens, special_tokens


class Added(msgspec.Struct, frozen=True):
    """As tokenizer.json writes it."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class Vocabulary(Protocol):
    """A tokenizer's tokens, tokenizer.json's added ones among them."""

    def token_to_id(self, token: str) -> int | None: ...
    def id_to_token(self, id: int) -> str | None: ...


def changed_tokens(config: dict[str, Any], own: Iterable[Added], vocabulary: Vocabulary) -> list[Added]:
    """The added tokens that are not among `own`, tokenizer.json's, or otherwise; most folders have none.

    Those that are not in the vocabulary, either, come in the order of their ids, at which they must get in.
    """
    before = {token.content: token for token in own}
    tokens = before.copy()
    for listed in _listed(config):
        if (found := vocabulary.token_to_id(listed.content)) is None and vocabulary.id_to_token(listed.id) is not None:
            continue  # the id is another token's
        is_special = listed.special or (listed.content in before and before[listed.content].special)
        token_id = listed.id if found is None else found
        tokens[listed.content] = msgspec.structs.replace(listed, id=token_id, special=is_special)
    named = list(special_tokens(config).values())
    for content in [*named, *(text for text in extra_special_tokens(config) if text not in tokens)]:
        if (token := tokens.get(content)) is not None:
            tokens[content] = msgspec.structs.replace(token, special=True)
        elif content and (found := vocabulary.token_to_id(content)) is not None:
            tokens[content] = Added(found, content, normalized=False, special=True)
    return [token for token in tokens.values() if token != before.get(token.content)]


class _Listed(msgspec.Struct):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


def _listed(config: dict[str, Any]) -> list[Added]:
    try:
        listed = msgspec.convert(
            config.get("added_tokens_decoder") or {}, type=dict[int, _Listed], strict=True, str_keys=True
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"tokenizer_config.json has no valid added_tokens_decoder: {error}") from error
    return [
        Added(
            token_id,
            token.content,
            token.single_word,
            token.lstrip,
            token.rstrip,
            normalized=not token.special if token.normalized is None else token.normalized,
            special=token.special,
        )
        for token_id, token in sorted(listed.items())
        if token.content
    ]
