"""Words that the output must not have, as token ids: a sampler knows nothing else.

A word is forbidden as it is spelt at the beginning of a text and as it is spelt after a space. Another way to cut the
same letters into tokens is not found, as everywhere where this parameter exists.
"""

from __future__ import annotations

import msgspec

from minisgl.core import MAX_BAD_WORD_TOKENS, InvalidRequest, SamplingParams
from minisgl.tokenizer.text import TextTokenizer


def resolve_bad_words(sampling: SamplingParams, tokenizer: TextTokenizer, vocab_size: int) -> SamplingParams:
    """The same parameters with `bad_words_ids`. InvalidRequest if a word has too many tokens, or none.

    A spelling with a token that the tokenizer alone has, and not the model, is never generated anyway.
    """
    if not sampling.bad_words:
        return sampling
    spellings = [spelling for word in sampling.bad_words for spelling in (word, f" {word.lstrip()}")]
    found: dict[tuple[int, ...], None] = {}  # an ordered set
    for spelling in spellings:
        ids = tuple(tokenizer.encode(spelling, add_special_tokens=False, field="bad_words").tolist())
        if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                "bad_words",
                f"bad_words: {spelling!r} has {len(ids)} tokens, but a bad word may have 1 to {MAX_BAD_WORD_TOKENS}",
            )
        if max(ids) < vocab_size:
            found[ids] = None
    return msgspec.structs.replace(sampling, bad_words_ids=tuple(found))
