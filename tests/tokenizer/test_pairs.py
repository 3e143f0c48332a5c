"""Pairs of a query and a document in the three forms, and what is left of a long document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.limits import Limits
from minisgl.message.to_tokenizer import PairPrompt
from minisgl.sampling_params import InvalidRequest
from minisgl.tokenizer.pairs import encode_pair
from minisgl.tokenizer.text import TextTokenizer
from support.tiny_tokenizer import save_byte_tokenizer

LIMITS = Limits(max_seq_len=400, vocab_size=300)
ROLES = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] in ['query', 'document'] %};{% endif %}{% endfor %}!"
)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., TextTokenizer]:
    def load(template: str | None = None, *, causal_reranker: bool = False) -> TextTokenizer:
        save_byte_tokenizer(tmp_path, 256)
        file = None
        if template is not None:
            file = str(tmp_path / "pairs.jinja")
            Path(file).write_text(template)
        return TextTokenizer.from_folder(tmp_path, file, causal_reranker=causal_reranker)

    return load


def test_pairs_follow_the_models_format(load: Callable[..., TextTokenizer]) -> None:
    def text(tokenizer: TextTokenizer, pair: PairPrompt) -> str:
        return tokenizer.decode(encode_pair(pair, tokenizer, LIMITS))

    pair, told = PairPrompt("who?", "é {x}"), PairPrompt("who?", "me", "Judge")
    assert text(load(), pair) == "who?é {x}"
    with pytest.raises(InvalidRequest, match="no place for one"):
        text(load(), told)
    one_role = load("{% if messages[0]['role'] == 'document' %}{% endif %}")
    assert text(one_role, pair) == "who?é {x}", "a template of conversations, not of pairs"
    own = text(load(causal_reranker=True), pair)
    assert "<Instruct>: Given a web search query, " in own
    assert own.endswith("<Document>: é {x}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "<Instruct>: Judge\n<Query>: who?\n" in text(load(causal_reranker=True), told)
    assert text(load(ROLES, causal_reranker=True), told) == "<system>Judge<query>who?;<document>me;!"


def test_a_long_document_is_cut_and_no_more(load: Callable[..., TextTokenizer]) -> None:
    tokenizer = load(ROLES)
    pair = PairPrompt("who?", "é" * 100)

    def kept(tokens: int) -> str:
        ids = encode_pair(pair, tokenizer, LIMITS, tokens)
        assert len(ids) in (tokens, tokens - 1)  # half a character is left out
        return tokenizer.decode(ids)

    around = len("<query>who?;<document>;!")
    assert kept(around + 10) == f"<query>who?;<document>{'é' * 5};!"
    assert kept(around + 11) == f"<query>who?;<document>{'é' * 5};!"
    assert len(encode_pair(pair, tokenizer, LIMITS, 300)) == around + 200
    with pytest.raises(InvalidRequest, match=f"have {around} tokens"):
        kept(around)
    with pytest.raises(InvalidRequest, match="maximum context length"):
        encode_pair(PairPrompt("q" * 10_000, "d"), tokenizer, LIMITS)


def test_the_first_tokens_of_a_text_keep_its_end(load: Callable[..., TextTokenizer]) -> None:
    from tokenizers import processors

    tokenizer = load()
    tokenizer.tokenizer.add_special_tokens(["<s>", "</s>"])
    begin, end = (tokenizer.tokenizer.token_to_id(text) for text in ("<s>", "</s>"))
    tokenizer.tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    letters = tokenizer.encode("abcdef", add_special_tokens=False).tolist()
    assert tokenizer.encode_cut("abcdef" * 100, 5, True, keep_first=True).tolist() == [begin, *letters[:3], end]
    assert tokenizer.encode_cut("abcdef", 8, True, keep_first=True).tolist() == [begin, *letters, end]
    assert tokenizer.encode_cut("abcdef", 4, False, keep_first=True).tolist() == letters[:4]
    assert len(tokenizer.encode_cut("abcdef", 1, True, keep_first=True)) == 1
