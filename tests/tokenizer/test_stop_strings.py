"""Stop strings: found wherever the text is cut, never shown, and nothing held back without need."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.limits import MAX_STOP_STRINGS
from minisgl.sampling_params import MAX_STOP_STRING_CHARS
from minisgl.tokenizer.detokenizer import StopMatcher

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text("ab\nc", max_size=6), max_size=12)


def oracle(text: str, stops: tuple[str, ...], passed: int = 0) -> tuple[str, str | None]:
    """Read one character after the other, and end as soon as the text ends with a stop string: the longest.

    No stop string ends within the first `passed` characters.
    """
    for end in range(passed + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    shown.append(matcher.flush())
    return shown, None


@settings(max_examples=500)
@given(stops=STOPS, pieces=PIECES)
def test_matches_equal_a_search_of_the_whole_text(stops: tuple[str, ...], pieces: list[str]) -> None:
    shown, stop = run(stops, pieces)
    assert ("".join(shown), stop) == oracle("".join(pieces), stops)


@settings(max_examples=500)
@given(stops=STOPS, pieces=PIECES, passed=PIECES)
def test_text_that_is_passed_over_is_the_beginning_at_most(
    stops: tuple[str, ...], pieces: list[str], passed: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown, stop = "".join(map(matcher.pass_over, passed)), None
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            break
    beginning = "".join(passed)
    assert (shown + matcher.flush(), stop) == oracle(beginning + "".join(pieces), stops, len(beginning))


@settings(max_examples=300)
@given(stops=STOPS, pieces=PIECES)
def test_held_back_is_what_may_be_a_stop_string(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    received = shown = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        received += piece
        shown += text
        if stop is not None:
            assert received.startswith(shown + stop)
            return
        assert received.startswith(shown)
        possible = [size for size in range(len(received) + 1) if begins(received[len(received) - size :], stops)]
        assert len(received) - len(shown) == max(possible)


def begins(end: str, stops: tuple[str, ...]) -> bool:
    return any(len(end) < len(stop) and stop.startswith(end) for stop in stops)


@settings(max_examples=200)
@given(stops=STOPS, pieces=PIECES)
def test_the_same_however_the_text_is_cut(stops: tuple[str, ...], pieces: list[str]) -> None:
    text = "".join(pieces)
    results = [run(stops, cut) for cut in (pieces, [text], list(text))]
    assert len({("".join(shown), stop) for shown, stop in results}) == 1


def test_known_examples() -> None:
    assert run(("STOP",), ["a ST", "OP b"]) == (["a ", ""], "STOP")
    assert run(("STOP",), ["a ST", "ART"]) == (["a ", "START", ""], None)
    assert run(("STOP",), ["a ST"]) == (["a ", "ST"], None)
    assert run(("\n\n",), ["x\n", "\n", "y"]) == (["x", ""], "\n\n")
    assert run(("abcd", "bc"), ["xabcd"]) == (["xa"], "bc")  # complete first
    assert run(("bc", "abc"), ["xabc"]) == (["x"], "abc")  # both are complete at once: the longer one
    assert run(("世界",), ["hello 世", "界!"]) == (["hello ", ""], "世界")


def test_the_worst_stop_strings_are_cheap() -> None:
    """There are as many and as long ones as allowed, and the text almost matches all the time."""
    stops = tuple("a" * (MAX_STOP_STRING_CHARS - 1 - i) + "b" for i in range(MAX_STOP_STRINGS))
    matcher = StopMatcher(stops)
    begin = time.process_time()
    for _ in range(500):
        assert matcher.feed("aaaa")[1] is None
        matcher.feed("ac")
    assert time.process_time() - begin < 2.0
