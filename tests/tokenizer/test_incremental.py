"""The pieces of a stream are together what `tokenizers` decodes at once, for any ids of any kind of tokenizer."""

from __future__ import annotations

import functools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from minisgl.config import ConfigError
from minisgl.tokenizer.incremental import ByteLevelDecoder, TextDecoder, make_decoder
from tokenizer import small

REPLACEMENT = "\ufffd"
PEOPLE = "👩‍👩‍👧‍👦👍🏽🇩🇪🏴‍☠️"
ANY_TEXT = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), max_size=4),
        st.text("אבגד שלום سلام", max_size=6),
        st.text("eaou\u0301\u0308\u0323\u200d\ufe0f", max_size=6),
        st.text(PEOPLE, max_size=6),
        st.sampled_from(
            [PEOPLE, "naïve café", " hello world", "\n\n", "ﷺ", "\U0001f9d1\u200d\U0001f680", "\0", REPLACEMENT]
        ),
    ),
    max_size=6,
).map("".join)


@functools.cache
def pair(kind: str) -> tuple[Tokenizer, TextDecoder]:
    tokenizer = small.KINDS[kind]()
    return tokenizer, make_decoder(tokenizer)


def pieces(decoder: TextDecoder, ids: list[int], skip: bool = True) -> list[str]:
    stream = decoder.stream(skip)
    return [*map(stream.feed, ids), stream.flush()]


@pytest.fixture(scope="module")
def qwen_decoder(qwen: Tokenizer) -> TextDecoder:
    return make_decoder(qwen)


@settings(deadline=None, max_examples=150)
@given(text=ANY_TEXT)
def test_qwen_text(qwen: Tokenizer, qwen_decoder: TextDecoder, text: str) -> None:
    ids = qwen.encode(text).ids
    shown = pieces(qwen_decoder, ids)
    assert "".join(shown) == qwen.decode(ids)
    assert REPLACEMENT in text or REPLACEMENT not in "".join(shown)
    assert not shown[-1]  # whole characters leave nothing to flush


@settings(deadline=None, max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_qwen_any_ids(qwen: Tokenizer, qwen_decoder: TextDecoder, data: st.DataObject, skip: bool) -> None:
    broken = [i for i in range(600) if REPLACEMENT in qwen.decode([i])]
    some_id = st.one_of(st.integers(0, 152_000), st.sampled_from(broken), st.integers(151_640, 151_670))
    ids = data.draw(st.lists(some_id, max_size=20))
    assert "".join(pieces(qwen_decoder, ids, skip)) == qwen.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", small.KINDS)
@settings(deadline=None, max_examples=120)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_of_any_kind(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, decoder = pair(kind)
    size = tokenizer.get_vocab_size()
    common = [
        i for i in range(size) if tokenizer.id_to_token(i) in ("▁", "▁▁", "", "##", "a", "<s>", "<0x41>", "<0xE4>")
    ]
    ids = data.draw(st.lists(st.one_of(st.integers(0, size + 3), st.sampled_from(common or [0])), max_size=24))
    assert "".join(pieces(decoder, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", small.KINDS)
@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_a_text_that_continues_another(kind: str, data: st.DataObject) -> None:
    """What the ids add to a text before them: no space in front is lost."""
    tokenizer, decoder = pair(kind)
    letter = next(tokenizer.token_to_id(token) for token in ("a", "▁a", "hello") if tokenizer.token_to_id(token))
    marks = [i for token in ("▁", "▁▁", "##", "</s>") if (i := tokenizer.token_to_id(token)) is not None]
    some_id = st.integers(0, tokenizer.get_vocab_size() + 3)
    ids = data.draw(st.lists(st.one_of(some_id, st.sampled_from(marks)) if marks else some_id, max_size=24))
    stream = decoder.stream(True, continues=True)
    text = "".join([*map(stream.feed, ids), stream.flush()])
    assert tokenizer.decode([letter, *ids]) == tokenizer.decode([letter]) + text


@pytest.mark.parametrize("kind", small.KINDS)
@settings(deadline=None, max_examples=50)
@given(text=ANY_TEXT)
def test_any_text_of_any_kind(kind: str, text: str) -> None:
    tokenizer, decoder = pair(kind)
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(decoder, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@settings(deadline=None, max_examples=120)
@given(data=st.binary(max_size=12))
def test_runs_of_bytes(kind: str, data: bytes) -> None:
    """As bytes.decode for byte-level tokenizers: so Rust's from_utf8_lossy and Python agree on what is replaced."""
    tokenizer, decoder = pair(kind)
    ids = byte_ids(tokenizer, kind, data)
    text = "".join(pieces(decoder, ids))
    assert text == tokenizer.decode(ids)
    if kind == "byte_level":
        assert text == data.decode(errors="replace")


def byte_ids(tokenizer: Tokenizer, kind: str, data: bytes) -> list[int]:
    if kind == "byte_level":
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        names = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in data]
    else:
        names = [f"<0x{byte:02X}>" for byte in data]
    ids = [tokenizer.token_to_id(name) for name in names]
    assert None not in ids
    return [i for i in ids if i is not None]


INTERESTING = b"A\x80\xa0\xbf\xc3\xe0\xe4\xed\xf0\xf4\xff"
ENDINGS = [b"", b"A", b"\xff", b"\x80", *(first + b"\x80\x80" for first in (b"\x80", b"\x90", b"\xa0"))]
ENDINGS += [b"\x80" + b"A", b"\x80\x80A", b"\x80\x80\x80A", b"\xa0\x80A", b"\x90\x80\x80A"]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@settings(deadline=None, max_examples=150)
@given(data=st.lists(st.sampled_from(INTERESTING), max_size=8).map(bytes), word=st.booleans())
def test_nothing_is_held_back_that_is_certain(kind: str, data: bytes, word: bool) -> None:
    """What has come out is all that any continuation has in common."""
    tokenizer, decoder = pair(kind)
    ids = [tokenizer.token_to_id("a")] * word + byte_ids(tokenizer, kind, data)
    out = "".join(pieces(decoder, ids)[:-1])
    after = [byte_ids(tokenizer, kind, ending) for ending in ENDINGS] + [[tokenizer.token_to_id("a")]]
    texts = [tokenizer.decode(ids + ending) for ending in after]
    assert out == functools.reduce(common_prefix, texts)


def common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def test_lesson_07_tail_is_flushed() -> None:
    tokenizer, decoder = pair("byte_level")
    ids = tokenizer.encode("hello 世").ids[:-1]
    *shown, tail = pieces(decoder, ids)
    assert "".join(shown) == "hello "
    assert tail == REPLACEMENT
    assert "hello " + tail == tokenizer.decode(ids)


def test_lesson_19_special_tokens_not_in_text() -> None:
    for kind in small.KINDS:
        tokenizer, decoder = pair(kind)
        end = tokenizer.token_to_id("</s>")
        letter = tokenizer.token_to_id("a")
        assert "".join(pieces(decoder, [letter, end])) == "a"
        assert "".join(pieces(decoder, [letter, end], skip=False)).endswith("</s>")


def test_skipped_and_unknown_tokens_within_a_character() -> None:
    """They are taken out before the bytes are joined, as `tokenizers` does."""
    for kind in ("byte_level", "llama"):
        tokenizer, decoder = pair(kind)
        first, second, third = byte_ids(tokenizer, kind, "世".encode())
        ids = [first, tokenizer.token_to_id("</s>"), second, 2**31 - 1, third]
        assert "".join(pieces(decoder, ids)) == tokenizer.decode(ids) == "世"


def test_a_long_run_of_empty_tokens_costs_nothing() -> None:
    tokenizer, decoder = pair("metaspace")
    empty = tokenizer.token_to_id("")
    assert empty is not None
    stream = decoder.stream(True)
    begin = time.process_time()
    assert "".join(stream.feed(empty) for _ in range(20_000)) == ""
    assert time.process_time() - begin < 2.0


def test_unknown_decoders_are_refused_by_name() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    for decoder, name in [
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), "WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "c")]), "Replace"),
        (decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]), "ByteLevel"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]), "ByteLevel"),
    ]:
        tokenizer.decoder = decoder
        with pytest.raises(ConfigError, match=name):
            make_decoder(tokenizer)


def test_a_character_may_be_replaced_in_the_whole_text() -> None:
    tokenizer = small.metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")])
    ids = tokenizer.encode("hello world").ids
    assert "".join(pieces(make_decoder(tokenizer), ids)) == tokenizer.decode(ids) == " hello world"


def test_byte_level_in_a_sequence() -> None:
    tokenizer = small.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert isinstance(make_decoder(tokenizer), ByteLevelDecoder)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_special_tokens_that_a_parser_needs_are_kept(kind: str) -> None:
    """Markers of tool calls and thoughts are special tokens in some vocabularies."""
    tokenizer, decoder = pair(kind)
    ids = [tokenizer.token_to_id(token) for token in ("a", "</s>", "b", "<s>", "<think>", "a")]
    for keep, text in {
        (): "ab<think>a",
        ("</s>", "[ARGS]"): "a</s>b<think>a",
        ("<s>", "</s>"): "a</s>b<s><think>a",
    }.items():
        stream = decoder.stream(True, keep)
        assert "".join([*map(stream.feed, ids), stream.flush()]) == text
    assert "".join(pieces(decoder, ids, skip=False)) == "a</s>b<s><think>a"
