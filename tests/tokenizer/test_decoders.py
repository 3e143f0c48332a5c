"""The pieces of a stream are together what `tokenizers` decodes at once, for any ids of any kind of tokenizer."""

from __future__ import annotations

import functools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from minisgl.tokenizer.decoder_choice import make_decoder
from minisgl.tokenizer.decoders.base import TextDecoder
from minisgl.tokenizer.decoders.byte_level import ByteLevelDecoder
from minisgl.tokenizer.decoders.redecoding import MAX_WINDOW, WINDOW, RedecodingDecoder
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
    """Ids add to a text what decoding the whole would add: no leading space is lost."""
    tokenizer, decoder = pair(kind)
    letter = next(
        tokenizer.token_to_id(token) for token in ("a</w>", "a", "▁a", "hello") if tokenizer.token_to_id(token)
    )
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


@pytest.mark.parametrize("kind", ["byte_level", "replaced", "llama", "gemma"])
@settings(deadline=None, max_examples=120)
@given(data=st.binary(max_size=12))
def test_runs_of_bytes(kind: str, data: bytes) -> None:
    """Byte-level tokenizers give what bytes.decode does, so Rust's from_utf8_lossy and Python replace the same."""
    tokenizer, decoder = pair(kind)
    ids = byte_ids(tokenizer, kind, data)
    text = "".join(pieces(decoder, ids))
    assert text == tokenizer.decode(ids)
    if kind in ("byte_level", "replaced"):
        assert text == data.decode(errors="replace")


def byte_ids(tokenizer: Tokenizer, kind: str, data: bytes) -> list[int]:
    if kind in ("byte_level", "replaced"):
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
    """All that any continuation has in common has come out."""
    tokenizer, decoder = pair(kind)
    ids = [tokenizer.token_to_id("a")] * word + byte_ids(tokenizer, kind, data)
    out = "".join(pieces(decoder, ids)[:-1])
    after = [byte_ids(tokenizer, kind, ending) for ending in ENDINGS] + [[tokenizer.token_to_id("a")]]
    texts = [tokenizer.decode(ids + ending) for ending in after]
    assert out == functools.reduce(common_prefix, texts)


def common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def test_tail_is_flushed() -> None:
    tokenizer, decoder = pair("byte_level")
    ids = tokenizer.encode("hello 世").ids[:-1]
    *shown, tail = pieces(decoder, ids)
    assert "".join(shown) == "hello "
    assert tail == REPLACEMENT
    assert "hello " + tail == tokenizer.decode(ids)


def test_special_tokens_not_in_text() -> None:
    for kind in small.KINDS:
        tokenizer, decoder = pair(kind)
        end = tokenizer.token_to_id("</s>")
        letter = tokenizer.token_to_id("a")
        assert "".join(pieces(decoder, [letter, end])) == "a"
        assert "".join(pieces(decoder, [letter, end], skip=False)).endswith("</s>")


def test_skipped_and_unknown_tokens_within_a_character() -> None:
    """The tokens are removed before bytes are joined, as `tokenizers` does."""
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


# --- decoders without a fast way ---

MARKED = [
    "",
    "a",
    "b",
    "hello",
    "a</w>",
    "</w>",
    "##a",
    "▁a",
    "▁",
    "▁▁",
    " ",
    "  x",
    ".",
    "n't",
    "'",
    "|",
    "<pad>",
    "é",
]
MARKED += ["世", "Ġa", "Ċ", "Ã", "©", "ä", "¸", "ĸ", "<0xE4>", "<0xB8>", "<0x96>", "<0x41>", "<0x0A>", "ab", "ba", "0"]
PER_TOKEN = {
    "replace": decoders.Replace("▁", " "),
    "pattern": decoders.Replace(Regex("b+"), "c"),
    "bytes": decoders.ByteFallback(),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(),
    "strip": decoders.Strip("a", 1, 0),
    "suffix": decoders.BPEDecoder("</w>"),
    "ctc": decoders.CTC(),
}
ON_TEXT = {
    "strip": decoders.Strip(" ", 2, 0),
    "replace_two": decoders.Replace("ab", "c"),
    "replace_long": decoders.Replace("a", "xyz"),
    "delete": decoders.Replace("\ufffd", "?"),
    "pattern": decoders.Replace(Regex("a+b?"), "c"),
    "ends": decoders.Replace(Regex("^ | $"), ""),
    "wordpiece": decoders.WordPiece(),
    "suffix": decoders.BPEDecoder("</w>"),
    "ctc": decoders.CTC(),
    "metaspace": decoders.Metaspace(),
    "bytes": decoders.ByteFallback(),
}


def marked(decoder: object) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(MARKED)}, unk_token="a"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


Steps = tuple[list[str], object, list[str]]
SOME_STEPS: st.SearchStrategy[Steps] = st.tuples(
    # What CTC drops may stand between bytes, and what it compares may lose a suffix later: no text is certain then.
    st.lists(st.sampled_from(sorted(PER_TOKEN)), max_size=3).filter(
        lambda names: "ctc" not in names or not {"bytes", "suffix"} & set(names)
    ),
    st.sampled_from([None, decoders.Fuse(), decoders.ByteLevel()]),
    st.lists(st.sampled_from(sorted(ON_TEXT)), max_size=2),
)


def sequence(per_token: list[str], join: object, on_text: list[str]) -> object:
    steps = [PER_TOKEN[name] for name in per_token]
    return decoders.Sequence([*steps, *([] if join is None else [join, *(ON_TEXT[name] for name in on_text)])])


@settings(deadline=None, max_examples=600)
@given(steps=SOME_STEPS, data=st.data(), skip=st.booleans())
def test_any_ids_of_any_sequence_of_decoders(steps: Steps, data: st.DataObject, skip: bool) -> None:
    tokenizer = marked(sequence(*steps))
    decoder = make_decoder(tokenizer)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=80))
    assert "".join(pieces(decoder, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "decoder",
    [
        *PER_TOKEN.values(),
        decoders.Sequence([decoders.Fuse(), decoders.CTC()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a{20}"), "c")]),
    ],
)
def test_long_texts_of_decoders_without_a_fast_way(decoder: object) -> None:
    """Longer than the window, runs of one token among them."""
    tokenizer = marked(decoder)
    draw = random.Random(5)
    ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(2 * MAX_WINDOW)]
    ids += 40 * [tokenizer.token_to_id("a")] + 40 * [tokenizer.token_to_id("▁")] + ids[:MAX_WINDOW]
    assert "".join(pieces(make_decoder(tokenizer), ids)) == tokenizer.decode(ids)


def test_the_end_of_a_text_may_be_stripped() -> None:
    """No empty token here: `tokenizers` panics where there is less than it may strip."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, " ": 1, "b": 2, "  x": 3}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 2)])
    ids = [tokenizer.token_to_id(token) for token in ("a", " ", " ", " ", "b", " ", "  x", " ", " ", " ")]
    assert "".join(pieces(make_decoder(tokenizer), ids)) == tokenizer.decode(ids) == "a   b   x "


def test_a_replaced_text_may_come_in_pieces() -> None:
    tokenizer = marked(decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "-")]))
    ids = [tokenizer.token_to_id(token) for token in ("b", "a", "b", "ab", "a", "a", "b", "a")]
    assert pieces(make_decoder(tokenizer), ids) == ["", "b", "", "-", "-", "a", "", "-", "a"]


def test_a_text_without_a_fast_way_may_continue_with_a_part_of_a_character() -> None:
    tokenizer = small.llama()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Replace("xy", "z")]
    )
    decoder = make_decoder(tokenizer)
    assert isinstance(decoder, RedecodingDecoder)
    stream = decoder.stream(True, continues=True)
    ids = byte_ids(tokenizer, "llama", b"\xe4\xb8")
    assert "".join([*map(stream.feed, ids), stream.flush()]) == REPLACEMENT * 2


def test_text_without_a_fast_way_comes_with_its_token() -> None:
    tokenizer, decoder = pair("suffix")
    assert isinstance(decoder, RedecodingDecoder)
    ids = tokenizer.encode("hello world").ids
    assert pieces(decoder, ids) == ["hello", " w", "o", "r", "ld", ""]


@pytest.mark.parametrize("kind", ["suffix", "replaced"])
def test_a_token_without_a_fast_way_costs_no_more_in_a_long_text(kind: str) -> None:
    tokenizer, decoder = pair(kind)
    assert isinstance(decoder, RedecodingDecoder)
    ids = 200 * tokenizer.encode("hello world he held a ball").ids
    decoded: list[int] = []
    library = decoder.decode

    def counted(ids: list[int]) -> str:
        decoded.append(len(ids))
        return library(ids)

    decoder.decode = counted  # type: ignore[method-assign]
    try:
        text = "".join(pieces(decoder, ids))
    finally:
        decoder.decode = library  # type: ignore[method-assign]
    assert text == tokenizer.decode(ids)
    assert max(decoded) <= 2 * WINDOW
    assert sum(decoded) <= 2 * WINDOW * len(ids)


def test_a_run_of_tokens_without_text_costs_no_more_than_the_window() -> None:
    tokenizer = marked(decoders.CTC())
    decoder = make_decoder(tokenizer)
    assert isinstance(decoder, RedecodingDecoder)
    letter, pad = tokenizer.token_to_id("a"), tokenizer.token_to_id("<pad>")
    stream = decoder.stream(True)
    begin = time.process_time()
    shown = stream.feed(letter) + "".join(stream.feed(pad) for _ in range(5_000)) + stream.feed(letter)
    assert shown + stream.flush() == "aa"
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize("kind", ["suffix", "replaced", "converted_gguf", "wordpiece", "metaspace"])
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    """Texts that log-probabilities show: together the text, but for a space at its start or end."""
    tokenizer, decoder = pair(kind)
    ids = tokenizer.encode("hello world").ids
    assert b"".join(map(decoder.token_bytes, ids)).decode().strip() == tokenizer.decode(ids).strip() == "hello world"
    assert decoder.token_bytes(2**31 - 1) == b""
    if kind != "wordpiece":
        ids = tokenizer.encode("世").ids
        assert b"".join(map(decoder.token_bytes, ids)).decode().strip() == "世"


def test_steps_with_nothing_to_do_before_byte_level_keep_the_fast_way() -> None:
    tokenizer, decoder = pair("converted_gguf")
    assert isinstance(decoder, ByteLevelDecoder)
    tokenizer = small.converted_gguf()
    tokenizer.add_tokens(["<0x41>"])
    assert isinstance(make_decoder(tokenizer), RedecodingDecoder)


def test_a_token_that_is_no_bytes_does_not_undo_a_converted_gguf() -> None:
    """`tokenizers` writes helloĠwhas ithello then, and what is out cannot be taken back."""
    tokenizer = small.converted_gguf()
    tokenizer.add_tokens(["has▁it"])
    ids = [tokenizer.token_to_id(token) for token in ("hello", "Ġw", "has▁it", "hello", "Ġw")]
    assert pieces(make_decoder(tokenizer), ids) == ["hello", " w", "has▁it", "hello", " w", ""]


def test_a_vocabulary_without_letters_is_decoded() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁": 0, "▁.": 1, "..": 2}, unk_token="▁"))
    tokenizer.decoder = decoders.Metaspace()
    assert "".join(pieces(make_decoder(tokenizer), [1, 2, 0, 1])) == tokenizer.decode([1, 2, 0, 1])
    assert "".join(pieces(make_decoder(Tokenizer(models.BPE())), [0, 1])) == ""


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
