"""The detokenizer's promises: every sequence finishes once, every id is delivered, no state is left."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tokenizers import Tokenizer, decoders, models

from minisgl.core import FinishReason
from minisgl.message.logprobs import LogprobRows, PositionLogprobs, TokenLogprob, unpack_positions
from minisgl.message.packed_ids import pack_ids, unpack_ids
from minisgl.message.shared import TextOptions
from minisgl.message.to_api import OutputDelta
from minisgl.message.to_detokenizer import End, Open, StepOutput
from minisgl.message.to_scheduler import Stopped
from minisgl.tokenizer.decoder_choice import make_decoder
from minisgl.tokenizer.detokenizer import Detokenizer
from tokenizer import small
from tokenizer.test_stop_strings import oracle

TOKENIZER = small.byte_level()
DECODER = make_decoder(TOKENIZER)
EOS = TOKENIZER.token_to_id("</s>")
assert EOS is not None


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def cached_of(seq_id: int) -> int:
    """The cached tokens that these tests give a sequence."""
    return 7 * seq_id


def step(
    *tokens: tuple[int, int], opened: dict[int, TextOptions] | None = None, ended: list[End] | None = None
) -> StepOutput:
    return StepOutput(
        [Open(seq_id, options, cached_of(seq_id)) for seq_id, options in (opened or {}).items()],
        [seq_id for seq_id, _ in tokens],
        pack_ids([token for _, token in tokens]),
        ended or [],
    )


def opened(*stop: str) -> Detokenizer:
    """A detokenizer with sequence 1 open."""
    detokenizer = Detokenizer(DECODER)
    detokenizer.apply(step(opened={1: TextOptions(stop=stop)}))
    return detokenizer


def test_text_and_ids_come_at_once() -> None:
    detokenizer = Detokenizer(DECODER)
    h, e, *_ = (TOKENIZER.token_to_id(letter) for letter in "hello")
    pieces, stopped = detokenizer.apply(step((1, h), (2, e), opened={1: TextOptions(), 2: TextOptions()}))
    assert pieces == [OutputDelta(1, pack_ids([h]), "h"), OutputDelta(2, pack_ids([e]), "e")]
    assert stopped == []
    pieces, _ = detokenizer.apply(step((2, h), ended=[End(1, "length")]))
    assert pieces == [OutputDelta(2, pack_ids([h]), "h"), OutputDelta(1, b"", "", "length", cached_of(1))]
    assert detokenizer.open_sequences == 1


def test_ids_come_while_text_is_held_back() -> None:
    detokenizer = opened()
    first, *rest = ids_of("世")
    assert detokenizer.apply(step((1, first)))[0] == [OutputDelta(1, pack_ids([first]), "")]
    texts = [detokenizer.apply(step((1, token)))[0][0].text for token in rest]
    assert "".join(texts) == "世"


STRIP = decoders.Strip(" ", 0, 2)  # `tokenizers` panics at less than it may strip


@pytest.mark.parametrize("decoder", [STRIP, decoders.Sequence([decoders.Fuse(), STRIP])], ids=["token", "text"])
def test_ids_at_which_the_library_panics_end_their_sequence_alone(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(models.WordLevel({"ab": 0, " ": 1}, unk_token="ab"))
    tokenizer.decoder = decoder
    detokenizer = Detokenizer(make_decoder(tokenizer))
    begin = step((1, 1), (2, 0), opened={1: TextOptions(), 2: TextOptions()})
    begin.logprobs = LogprobRows([1], [1], [0], pack_ids([1]), np.zeros(1, "<f4").tobytes(), pack_ids([1]), b"", b"")
    deltas, stopped = detokenizer.apply(begin)
    assert (deltas[0].seq_id, deltas[0].text, deltas[0].finish) == (1, "", "error")
    assert [position.chosen.text for position in unpack_positions([deltas[0].logprobs])] == [b" "]
    assert stopped == [Stopped(1)]
    more, _ = detokenizer.apply(step((1, 0), (2, 0), ended=[End(1, "stop"), End(2, "length")]))
    assert deltas[1].text + "".join(delta.text for delta in more) == "abab"
    assert [(delta.seq_id, delta.finish) for delta in more] == [(2, "length")]
    assert detokenizer.open_sequences == detokenizer.dropped_tokens == 0


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_tail_of_a_sequence_is_flushed(reason: FinishReason) -> None:
    detokenizer = opened("no such")
    first = ids_of("世")[0]
    detokenizer.apply(step((1, first)))
    letter = ids_of("n")[0]
    pieces, _ = detokenizer.apply(step((1, letter), ended=[End(1, reason)]))
    assert pieces == [OutputDelta(1, pack_ids([letter]), "\ufffdn", reason, cached_of(1))]


def test_an_error_keeps_its_cause() -> None:
    detokenizer = Detokenizer(DECODER)
    ended = [End(1, "error", cause="logits_not_finite"), End(2, "error")]
    pieces, _ = detokenizer.apply(step(opened={1: TextOptions(), 2: TextOptions()}, ended=ended))
    assert [(piece.finish, piece.cause) for piece in pieces] == [("error", "logits_not_finite"), ("error", None)]


def test_two_tokens_in_one_message() -> None:
    detokenizer = opened()
    tokens = [(1, token) for token in ids_of("ab世c")]
    pieces, _ = detokenizer.apply(step(*tokens))
    assert pieces == [OutputDelta(1, pack_ids([token for _, token in tokens]), "ab世c")]


def test_late_token_creates_no_state() -> None:
    detokenizer = opened()
    letter = ids_of("a")[0]
    detokenizer.apply(step((1, letter), ended=[End(1, "stop", stop_token=letter)]))
    assert detokenizer.apply(step((1, letter), (5, letter), ended=[End(5, "abort")])) == ([], [])
    assert detokenizer.open_sequences == 0
    assert detokenizer.dropped_tokens == 2


def test_stop_token_is_an_id_but_no_text() -> None:
    letter, other = ids_of("ab")
    detokenizer = opened()
    pieces, _ = detokenizer.apply(step((1, letter), (1, other), ended=[End(1, "stop", stop_token=other)]))
    assert pieces == [OutputDelta(1, pack_ids([letter, other]), "a", "stop", cached_of(1), other)]


def test_stop_string_is_text_if_asked_for() -> None:
    detokenizer = Detokenizer(DECODER)
    detokenizer.apply(step(opened={1: TextOptions(stop=("lo w",), include_stop=True)}))
    tokens = ids_of("hello world")
    texts = [piece.text for token in tokens for piece in detokenizer.apply(step((1, token)))[0]]
    assert "".join(texts) == "hello w"


def test_stop_token_is_text_if_asked_for() -> None:
    detokenizer = Detokenizer(DECODER)
    letter, other = ids_of("ab")
    detokenizer.apply(step(opened={1: TextOptions(include_stop=True)}))
    pieces, _ = detokenizer.apply(step((1, letter), (1, other), ended=[End(1, "stop", stop_token=other)]))
    assert pieces == [OutputDelta(1, pack_ids([letter, other]), "ab", "stop", cached_of(1), other)]


@pytest.mark.parametrize("min_tokens", range(5))
def test_no_stop_string_ends_the_text_before_min_tokens(min_tokens: int) -> None:
    detokenizer = Detokenizer(DECODER)
    detokenizer.apply(StepOutput([Open(1, TextOptions(stop=("b",)), min_tokens=min_tokens)], [], b"", []))
    letters = "abababab"
    a, b = ids_of("a")[0], ids_of("b")[0]
    pieces = [piece for token in [a, b] * 4 for piece in detokenizer.apply(step((1, token)))[0]]
    # A stop string counts from the token after the first min_tokens on.
    expected = letters[: letters.index("b", min_tokens)]
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].finish == "stop"


@pytest.mark.parametrize("end", ["token", "flush"])
def test_a_stop_string_may_begin_before_min_tokens(end: str) -> None:
    """Its text is held back from the beginning on, and counts only if it ends after the first min_tokens tokens."""
    detokenizer = Detokenizer(DECODER)
    detokenizer.apply(StepOutput([Open(1, TextOptions(stop=("bab", "b")), min_tokens=3)], [], b"", []))
    deltas = [delta for token in ids_of("bbab") for delta in detokenizer.apply(step((1, token)))[0]]
    assert [delta.text for delta in deltas] == ["", "b", "", ""]
    assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "bab")

    detokenizer.apply(StepOutput([Open(2, TextOptions(stop=("bab", "b")), min_tokens=3)], [], b"", []))
    for token in ids_of("aba"):
        detokenizer.apply(step((2, token)))
    if end == "token":  # a stop string that was passed over is not found later
        (last,), _ = detokenizer.apply(step((2, ids_of("c")[0]), ended=[End(2, "length")]))
        assert (last.text, last.finish) == ("bac", "length")
    else:
        (last,), _ = detokenizer.apply(step(ended=[End(2, "length")]))
        assert (last.text, last.finish) == ("ba", "length")


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_does_not_hide_an_error(include_stop: bool) -> None:
    """A token that no grammar allows is no text."""
    detokenizer = Detokenizer(DECODER)
    detokenizer.apply(step(opened={1: TextOptions(stop=("b",), include_stop=include_stop)}))
    a, b = ids_of("ab")
    end = End(1, "error", stop_token=b, cause="no_allowed_token")
    (delta,), stopped = detokenizer.apply(step((1, a), (1, b), ended=[end]))
    assert (delta.text, delta.finish, delta.cause, stopped) == ("a", "error", "no_allowed_token", [])
    assert delta.stop_reason is None


def test_the_rest_of_a_failed_text_is_no_stop_string() -> None:
    detokenizer = Detokenizer(DECODER)
    detokenizer.apply(step(opened={1: TextOptions(stop=("\ufffd",))}))
    detokenizer.apply(step((1, ids_of("世")[0])))
    (delta,), stopped = detokenizer.apply(step(ended=[End(1, "error", cause="logits_not_finite")]))
    assert (delta.finish, delta.cause, stopped) == ("error", "logits_not_finite", [])


def positions(piece: OutputDelta) -> list[PositionLogprobs]:
    return list(unpack_positions([piece.logprobs]))


def test_logprobs_travel_with_their_ids_while_text_is_held_back() -> None:
    detokenizer = opened("xyz")
    first, *_ = ids_of("世")
    x = ids_of("x")[0]
    rows = LogprobRows(
        [1, 2],
        [1, 1],
        [2, 1],
        pack_ids([first, x]),
        np.array([-0.5, -0.75], "<f4").tobytes(),
        pack_ids([3, 1]),
        pack_ids([x, EOS, x]),
        np.array([-0.1, -0.25, -0.75], "<f4").tobytes(),
    )
    prompts = [
        LogprobRows([seq_id], [1], [0], pack_ids([x]), np.array([-2.0], "<f4").tobytes(), pack_ids([9]), b"", b"")
        for seq_id in (1, 9)
    ]
    output = msgspec.structs.replace(
        step((1, first), (2, x), (3, x), opened={2: TextOptions(), 3: TextOptions()}),
        logprobs=rows,
        prompt_logprobs=prompts,
    )
    (piece, second, third), _ = detokenizer.apply(output)
    chosen = TokenLogprob(x, b"x", -0.75)
    assert positions(second) == [PositionLogprobs(chosen, 1, [chosen])]
    assert positions(third) == []
    assert second.prompt_logprobs is None
    assert piece.text == ""
    assert positions(piece) == [
        PositionLogprobs(
            TokenLogprob(first, "世".encode()[:2], -0.5),
            3,
            [TokenLogprob(x, b"x", float(np.float32(-0.1))), TokenLogprob(EOS, b"</s>", -0.25)],
        )
    ]
    assert piece.prompt_logprobs is not None
    assert list(piece.prompt_logprobs) == [PositionLogprobs(TokenLogprob(x, b"x", -2.0), 9, [])]


@pytest.mark.parametrize("kind", sorted(small.KINDS.keys() - {"suffix"}))  # "suffix" ends words with a space
def test_bytes_of_tokens_make_the_text(kind: str) -> None:
    """A token comes first, because the start of a text may lose a space."""
    tokenizer = small.KINDS[kind]()
    decoder = make_decoder(tokenizer)
    start, *rest = tokenizer.encode("a hello 世界 it's é", add_special_tokens=False).ids
    whole, begin = (tokenizer.decode(ids, skip_special_tokens=False) for ids in ([start, *rest], [start]))
    assert b"".join(map(decoder.token_bytes, rest)).decode() == whole[len(begin) :]
    assert decoder.token_bytes(10**6) == b""
    specials = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert {token_id for token_id in range(tokenizer.get_vocab_size() + 5) if decoder.is_special(token_id)} == specials


def test_special_tokens_are_text_if_asked_for() -> None:
    detokenizer = Detokenizer(DECODER)
    options = {1: TextOptions(skip_special_tokens=False), 2: TextOptions()}
    pieces, _ = detokenizer.apply(step((1, EOS), (2, EOS), opened=options))
    assert [piece.text for piece in pieces] == ["</s>", ""]


def test_log_probabilities_say_which_tokens_may_be_no_text() -> None:
    x = ids_of("x")[0]
    rows = LogprobRows([1], [2], [0], pack_ids([x, EOS]), np.zeros(2, "<f4").tobytes(), pack_ids([1, 1]), b"", b"")
    output = step((1, x), opened={1: TextOptions()})
    output = msgspec.structs.replace(output, prompt_logprobs=[rows], logprobs=rows)
    ((piece,), _) = Detokenizer(DECODER).apply(output)
    assert piece.prompt_logprobs is not None
    assert [position.special for position in piece.prompt_logprobs] == [False, True]
    assert [position.special for position in positions(piece)] == [False, True]


def test_stop_string_over_tokens() -> None:
    detokenizer = opened("##", "lo w")
    shown = ""
    for token in [*ids_of("hel"), *ids_of("lo"), *ids_of(" ")]:
        pieces, stopped = detokenizer.apply(step((1, token)))
        assert stopped == []
        assert pieces[0].finish is None
        shown += pieces[0].text
    assert shown == "hel"
    last = ids_of("w")[0]
    pieces, stopped = detokenizer.apply(step((1, last), (1, last)))
    assert pieces == [OutputDelta(1, pack_ids([last]), "", "stop", cached_of(1), "lo w")]
    assert stopped == [Stopped(1)]
    # The scheduler learns of the stop some steps later: until its End frees the state, no output follows.
    assert detokenizer.apply(step((1, last))) == ([], [])
    assert detokenizer.open_sequences == 1
    assert detokenizer.apply(step((1, last), ended=[End(1, "stop")])) == ([], [])
    assert detokenizer.open_sequences == detokenizer.dropped_tokens == 0


@pytest.mark.parametrize("kind", ["suffix", "replaced", "converted_gguf"])
def test_stop_string_over_tokens_of_any_decoder(kind: str) -> None:
    tokenizer = small.KINDS[kind]()
    detokenizer = Detokenizer(make_decoder(tokenizer))
    detokenizer.apply(step(opened={1: TextOptions(stop=("o w",))}))
    shown, finish = "", None
    for token in tokenizer.encode("hello world", add_special_tokens=False).ids:
        for piece in detokenizer.apply(step((1, token)))[0]:
            shown, finish = shown + piece.text, piece.finish
        if finish is not None:
            break
    assert (shown, finish) == ("hell", "stop")


def test_stop_string_and_end_in_one_step() -> None:
    detokenizer = opened("ab")
    tokens = ids_of("xab") + ids_of("y")
    pieces, stopped = detokenizer.apply(step(*((1, token) for token in tokens), ended=[End(1, "length")]))
    assert pieces == [OutputDelta(1, pack_ids(tokens[:3]), "x", "stop", cached_of(1), "ab")]
    assert stopped == []  # the scheduler has ended it already
    assert detokenizer.open_sequences == 0


def test_stop_string_in_what_was_held_back() -> None:
    detokenizer = opened("\ufffd")
    first = ids_of("世")[0]
    detokenizer.apply(step((1, first)))
    pieces, stopped = detokenizer.apply(step(ended=[End(1, "length")]))
    assert pieces == [OutputDelta(1, b"", "", "stop", cached_of(1), "\ufffd")]
    assert stopped == []


def test_stop_string_that_the_end_completes() -> None:
    detokenizer = Detokenizer(DECODER)
    detokenizer.apply(StepOutput([Open(1, TextOptions(stop=("ab\ufffd",)), admitted=2.5)], [], b"", []))
    shown = "".join(detokenizer.apply(step((1, token)))[0][0].text for token in [*ids_of("xab"), ids_of("世")[0]])
    (last,), _ = detokenizer.apply(step(ended=[End(1, "length")]))
    assert (shown + last.text, last.finish, last.stop_reason) == ("x", "stop", "ab\ufffd")
    assert last.admitted == 2.5


class Machine(RuleBasedStateMachine):
    """Any mixture of sequences, steps and late messages, against decoding each sequence's ids at once."""

    seq_ids = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.detokenizer = Detokenizer(DECODER)
        self.next = 0
        self.options: dict[int, TextOptions] = {}
        self.sent: dict[int, list[int]] = defaultdict(list)
        self.pieces: dict[int, list[OutputDelta]] = defaultdict(list)
        self.stopped: set[int] = set()
        self.ends: dict[int, End] = {}
        self.late = 0

    def apply(self, message: StepOutput) -> None:
        for seq_id, token in zip(message.seq_ids, unpack_ids(message.tokens).tolist(), strict=True):
            self.sent[seq_id].append(token)
        self.ends |= {end.seq_id: end for end in message.ended}
        pieces, stopped = self.detokenizer.apply(message)
        assert len({piece.seq_id for piece in pieces}) == len(pieces)
        for piece in pieces:
            earlier = self.pieces[piece.seq_id]
            assert all(before.finish is None for before in earlier)
            earlier.append(piece)
        for stop in stopped:
            assert stop.seq_id not in self.stopped
            assert self.pieces[stop.seq_id][-1].finish == "stop"
            self.stopped.add(stop.seq_id)
        for end in message.ended:
            self.check(end.seq_id)

    @rule(
        target=seq_ids,
        stop=st.lists(st.text("abhelo wé#\ufffd", min_size=1, max_size=4), max_size=2).map(tuple),
        skip=st.booleans(),
    )
    def open(self, stop: tuple[str, ...], skip: bool) -> int:
        self.next += 1
        self.options[self.next] = TextOptions(stop, skip)
        opened = Open(self.next, self.options[self.next], cached_of(self.next), admitted=float(self.next))
        self.apply(StepOutput([opened], [], b"", []))
        return self.next

    @rule(
        open_now=st.lists(seq_ids, max_size=6),
        ending=st.lists(consumes(seq_ids), max_size=2, unique=True),
        data=st.data(),
        reason=st.sampled_from(["length", "abort", "error", "token"]),
        texts=st.lists(st.text("abhelo wé#世👍", min_size=1, max_size=3), min_size=1, max_size=4),
    )
    def step(self, open_now: list[int], ending: list[int], data: st.DataObject, reason: str, texts: list[str]) -> None:
        ids = [token for text in texts for token in ids_of(text)] + [EOS, 10_000]
        receivers = [seq_id for seq_id in open_now + ending if seq_id not in self.ends]
        tokens = [(seq_id, data.draw(st.sampled_from(ids))) for seq_id in receivers]
        ended = []
        for seq_id in ending:
            last = next((token for receiver, token in reversed(tokens) if receiver == seq_id), None)
            by_token = last if reason == "token" else None
            ended.append(End(seq_id, "stop" if reason == "token" else reason, by_token))
        self.apply(step(*tokens, ended=ended))

    @rule(token=st.integers(0, 300), past=st.integers(0, 3))
    def late_message(self, token: int, past: int) -> None:
        seq_id = next((seq_id for seq_id in self.ends if seq_id % 4 == past), self.next + 100)
        assert self.detokenizer.apply(step((seq_id, token), ended=[End(seq_id, "abort")])) == ([], [])
        self.late += 1

    def check(self, seq_id: int) -> None:
        """Check that a sequence has said everything at its End."""
        end, options, sent = self.ends[seq_id], self.options[seq_id], self.sent[seq_id]
        *_, last = pieces = self.pieces[seq_id]
        text = "".join(piece.text for piece in pieces)
        got = [int(token) for piece in pieces for token in unpack_ids(piece.ids)]
        assert got == sent[: len(got)]
        by_string = last.finish == "stop" and isinstance(last.stop_reason, str)
        to_text = got if end.stop_token is None or (by_string and len(got) < len(sent)) else sent[:-1]
        full = TOKENIZER.decode(to_text, skip_special_tokens=options.skip_special_tokens)
        assert (text, last.stop_reason if by_string else None) == oracle(full, options.stop)
        assert (last.cached_tokens, last.admitted) == (cached_of(seq_id), float(seq_id))
        if not by_string:
            assert got == sent
            assert (last.finish, last.stop_reason) == (end.reason, end.stop_token)

    @invariant()
    def state_is_what_is_open(self) -> None:
        assert self.detokenizer.open_sequences == self.next - len(self.ends)
        assert self.detokenizer.dropped_tokens == self.late


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
