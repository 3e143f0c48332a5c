"""Text state of all running sequences: takes token ids, returns text deltas, and finds stop strings.

Only a sequence's Open creates its state and only its End frees it, so a late token cannot revive a sequence. Each
sequence gets exactly one finishing delta: at a stop string, at ids that `tokenizers` cannot decode, or else at its End.
There is no I/O here: the detokenizer worker and the offline LLM pass the messages.
"""

from __future__ import annotations

import logging

import msgspec

from minisgl.core import FinishReason
from minisgl.message.logprobs import PackedLogprobs, pack_positions, unpack_logprobs
from minisgl.message.packed_ids import ID_BYTES, unpack_ids
from minisgl.message.to_api import OutputDelta
from minisgl.message.to_detokenizer import End, Open, StepOutput
from minisgl.message.to_scheduler import Stopped
from minisgl.panics import LibraryPanic
from minisgl.parsers.streaming import possible_start
from minisgl.tokenizer.decoders.base import TextDecoder

logger = logging.getLogger(__name__)

_NO_TEXT = "output cannot be decoded: its sequence ends with an error"
NO_TEXT_ID = 2**31 - 1  # outside every vocabulary, so it decodes to ""


class Detokenizer:
    """Holds the states of all sequences, and counts tokens of sequences that are not open."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._running: dict[int, _Sequence] = {}
        self._stopped: set[int] = set()  # sequences that ended here and whose End is still to come
        self.dropped_tokens = 0

    @property
    def open_sequences(self) -> int:
        """Number of sequences that are opened and not yet ended."""
        return len(self._running) + len(self._stopped)

    def apply(self, step: StepOutput) -> tuple[list[OutputDelta], list[Stopped]]:
        """Apply a step; return a delta of each sequence with output, and the sequences that the scheduler must stop."""
        running = self._running
        for opened in step.opened:
            running[opened.seq_id] = _Sequence(self._decoder, opened)

        deltas: dict[int, OutputDelta] = {}
        packed = step.tokens
        ids_of_each = [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]
        for seq_id, ids, token in zip(step.seq_ids, ids_of_each, self._tokens_with_text(step), strict=True):
            state = running.get(seq_id)
            if state is None:
                self.dropped_tokens += seq_id not in self._stopped
                continue
            stop: str | None = None
            finish: FinishReason | None = None
            try:
                text = state.feed(token)
            except LibraryPanic:
                logger.exception(_NO_TEXT)
                text, finish = "", "error"
            else:
                if state.matcher is not None:
                    text, stop = state.match(text)
                    finish = None if stop is None else "stop"
            if seq_id in deltas:  # its second token in this step
                ids = deltas[seq_id].ids + ids
                text = deltas[seq_id].text + text
            if finish is None:
                deltas[seq_id] = OutputDelta(seq_id, ids, text)
            else:
                deltas[seq_id] = OutputDelta(
                    seq_id, ids, text, finish, state.cached_tokens, stop, admitted=state.admitted
                )
                del running[seq_id]
                self._stopped.add(seq_id)

        for end in step.ended:
            ending = running.pop(end.seq_id, None)
            if ending is not None:
                deltas[end.seq_id] = ending.finish(end, deltas.get(end.seq_id))
            self._stopped.discard(end.seq_id)
        stopped = [Stopped(seq_id) for seq_id in deltas if seq_id in self._stopped] if self._stopped else []
        self._add_logprobs(deltas, step)
        for pooled in step.pooled:
            if pooled.seq_id in deltas:
                deltas[pooled.seq_id] = msgspec.structs.replace(deltas[pooled.seq_id], vector=pooled.vector)
        return list(deltas.values()), stopped

    def _tokens_with_text(self, step: StepOutput) -> list[int]:
        """Return the step's token ids, with NO_TEXT_ID in place of tokens that end a sequence and are no text.

        These are stop tokens, unless the request includes them, and tokens that break a grammar, which are an error.
        """
        tokens: list[int] = unpack_ids(step.tokens).tolist()
        ended_by_token = {end.seq_id: end.reason for end in step.ended if end.stop_token is not None}
        if ended_by_token:
            last = {seq_id: index for index, seq_id in enumerate(step.seq_ids)}
            for seq_id in ended_by_token.keys() & last.keys() & self._running.keys():
                if ended_by_token[seq_id] == "error" or not self._running[seq_id].include_stop:
                    tokens[last[seq_id]] = NO_TEXT_ID
        return tokens

    def _add_logprobs(self, deltas: dict[int, OutputDelta], step: StepOutput) -> None:
        """Add the requested log-probabilities to the deltas: those of tokens, and in the first delta of the prompt."""
        if step.logprobs is not None:
            for seq_id, positions in unpack_logprobs(step.logprobs, self._decoder).items():
                if seq_id in deltas:
                    deltas[seq_id] = msgspec.structs.replace(deltas[seq_id], logprobs=pack_positions(positions))
        for rows in step.prompt_logprobs:
            (seq_id,) = rows.seq_ids
            if seq_id in deltas:
                packed = PackedLogprobs.pack(rows, self._decoder)
                deltas[seq_id] = msgspec.structs.replace(deltas[seq_id], prompt_logprobs=packed)


class _Sequence:
    """State of one running sequence."""

    __slots__ = ("_flush", "_min_tokens", "_num_tokens", "admitted", "cached_tokens", "feed", "include_stop", "matcher")

    def __init__(self, decoder: TextDecoder, opened: Open) -> None:
        options = opened.text
        stream = decoder.stream(options.skip_special_tokens, options.keep, continues=options.continues)
        self.cached_tokens = opened.cached_tokens
        self.admitted = opened.admitted
        self.include_stop = options.include_stop
        self.feed = stream.feed
        self._flush = stream.flush
        self._min_tokens = opened.min_tokens
        self._num_tokens = 0  # counted if there are stop strings
        self.matcher = StopMatcher(options.stop) if options.stop else None

    def match(self, text: str, num_tokens: int = 1) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string if one is complete.

        `text`: that of `num_tokens` more tokens. No stop string is looked for before there are more than min_tokens.
        """
        assert self.matcher is not None
        self._num_tokens += num_tokens
        if self._num_tokens <= self._min_tokens:
            return self.matcher.pass_over(text), None
        text, stop = self.matcher.feed(text)
        return (text + stop if stop is not None and self.include_stop else text), stop

    def finish(self, end: End, delta: OutputDelta | None) -> OutputDelta:
        """Return the last delta: this step's output and the text held back, in which a stop string may be found."""
        ids, shown = (b"", "") if delta is None else (delta.ids, delta.text)
        stop: str | None = None
        try:
            text = self._flush()
        except LibraryPanic:
            logger.exception(_NO_TEXT)
            text, end = "", End(end.seq_id, "error")
        if self.matcher is not None:
            text, stop = self.match(text, 0)
            text += self.matcher.flush()
        if stop is not None and end.reason != "error":
            return OutputDelta(end.seq_id, ids, shown + text, "stop", self.cached_tokens, stop, admitted=self.admitted)
        stop_token = end.stop_token if end.reason == "stop" else None
        last = OutputDelta(end.seq_id, ids, shown + text, end.reason, self.cached_tokens, stop_token)
        return msgspec.structs.replace(last, cause=end.cause, admitted=self.admitted)


class StopMatcher:
    """Finds the first stop string in the text of one sequence, which comes in pieces.

    The match is the stop string that is complete first, and of those complete at the same character the longest. So the
    result does not depend on how the text is cut into pieces, and generation can end with the token that completes it.
    Only text that may be the beginning of a stop string is held back. After a match, create a new object.
    """

    __slots__ = ("_first_characters", "_held", "_passed", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._passed = 0  # number of characters of `_held` that were passed over

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that may be shown now, without the stop string, and that string if complete."""
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        text = self._held + text
        found = self._find(text)
        if found is None:
            return self._hold_back(text), None
        start, stop = found
        self._held = ""
        return text[:start], stop

    def pass_over(self, text: str) -> str:
        """Add text in which no stop string ends, though one may begin; return the text that may be shown now."""
        shown = self._hold_back(self._held + text)
        self._passed = len(self._held)
        return shown

    def _hold_back(self, text: str) -> str:
        """Hold back what may be the beginning of a stop string; return the rest."""
        keep = possible_start(text, self._stops)
        self._held = text[keep:]
        self._passed = max(self._passed - keep, 0)
        return text[:keep]

    def flush(self) -> str:
        """Return the text held back, when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the start and the text of the stop string that is complete first after the passed text, if any."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(self._passed - len(stop) + 1, 0))) >= 0
        ]
        return min(found)[1:] if found else None
