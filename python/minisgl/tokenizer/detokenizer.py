"""The text state of all sequences in generation: token ids in, pieces of text out.

A sequence's state is made by its Open and freed by its End, and by nothing else, so that a late token cannot bring it
back. Each sequence gets exactly one finishing piece: at a stop string, or else at its End. Pure: the worker and the
offline LLM bring the messages.
"""

from __future__ import annotations

import msgspec

from minisgl.message.to_api import OutputDelta
from minisgl.message.to_detokenizer import End, Open, StepOutput
from minisgl.message.to_scheduler import Stopped
from minisgl.message.types import ID_BYTES, unpack_ids
from minisgl.tokenizer.incremental import TextDecoder
from minisgl.tokenizer.logprobs import unpack_logprobs
from minisgl.tokenizer.stop import StopMatcher

NO_TEXT_ID = 2**31 - 1  # an id that no vocabulary has: it decodes to nothing


class Detokenizer:
    """Holds the states, and counts the tokens that came for no open sequence."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._running: dict[int, _Sequence] = {}
        self._stopped: set[int] = set()  # ended by a stop string; their End is still to come
        self.dropped_tokens = 0

    @property
    def open_sequences(self) -> int:
        """Opened and not yet ended."""
        return len(self._running) + len(self._stopped)

    def apply(self, step: StepOutput) -> tuple[list[OutputDelta], list[Stopped]]:
        """Apply a step; return a piece for each sequence that got something, and those the scheduler must stop."""
        running = self._running
        for opened in step.opened:
            running[opened.seq_id] = _Sequence(self._decoder, opened)

        pieces: dict[int, OutputDelta] = {}
        packed = step.tokens
        ids_of_each = [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]
        for seq_id, ids, token in zip(step.seq_ids, ids_of_each, self._tokens_with_text(step), strict=True):
            state = running.get(seq_id)
            if state is None:
                self.dropped_tokens += seq_id not in self._stopped
                continue
            text = state.feed(token)
            stop = None
            if state.matcher is not None:
                text, stop = state.match(text)
            if seq_id in pieces:  # its second token in this step
                ids = pieces[seq_id].ids + ids
                text = pieces[seq_id].text + text
            if stop is None:
                pieces[seq_id] = OutputDelta(seq_id, ids, text)
            else:
                pieces[seq_id] = OutputDelta(seq_id, ids, text, "stop", state.cached_tokens, stop)
                del running[seq_id]
                self._stopped.add(seq_id)

        for end in step.ended:
            ending = running.pop(end.seq_id, None)
            if ending is not None:
                pieces[end.seq_id] = ending.finish(end, pieces.get(end.seq_id))
            self._stopped.discard(end.seq_id)
        stopped = [Stopped(seq_id) for seq_id in pieces if seq_id in self._stopped] if self._stopped else []
        self._add_logprobs(pieces, step)
        return list(pieces.values()), stopped

    def _tokens_with_text(self, step: StepOutput) -> list[int]:
        """The step's token ids. Where a sequence ended by its last token, that token becomes text only if asked for."""
        tokens: list[int] = unpack_ids(step.tokens).tolist()
        ended_by_token = {end.seq_id for end in step.ended if end.stop_token is not None}
        if ended_by_token:
            last = {seq_id: index for index, seq_id in enumerate(step.seq_ids)}
            for seq_id in ended_by_token & last.keys() & self._running.keys():
                if not self._running[seq_id].include_stop:
                    tokens[last[seq_id]] = NO_TEXT_ID
        return tokens

    def _add_logprobs(self, pieces: dict[int, OutputDelta], step: StepOutput) -> None:
        """Add log-probabilities to the pieces of those who asked: of their tokens, and of the prompt to the first."""
        if step.logprobs is not None:
            for seq_id, positions in unpack_logprobs(step.logprobs, self._decoder).items():
                if seq_id in pieces:
                    pieces[seq_id] = msgspec.structs.replace(pieces[seq_id], logprobs=positions)
        for rows in step.prompt_logprobs:
            for seq_id in pieces.keys() & set(rows.seq_ids):
                positions = unpack_logprobs(rows, self._decoder)[seq_id]
                pieces[seq_id] = msgspec.structs.replace(pieces[seq_id], prompt_logprobs=positions)


class _Sequence:
    """The state of one running sequence."""

    __slots__ = ("_feed", "_flush", "_quiet", "_stop", "cached_tokens", "feed", "include_stop", "matcher")

    def __init__(self, decoder: TextDecoder, opened: Open) -> None:
        options = opened.text
        stream = decoder.stream(options.skip_special_tokens, options.keep, continues=options.continues)
        self.cached_tokens = opened.cached_tokens
        self.include_stop = options.include_stop
        self.feed = self._feed = stream.feed
        self._flush = stream.flush
        self._stop = options.stop
        self._quiet = opened.min_tokens  # tokens in which no stop string is looked for
        self.matcher: StopMatcher | None = None
        if options.stop and self._quiet:
            self.feed = self._feed_quietly
        elif options.stop:
            self.matcher = StopMatcher(options.stop)

    def _feed_quietly(self, token: int) -> str:
        if self._quiet == 0:
            self.feed = self._feed
            self.matcher = StopMatcher(self._stop)
        self._quiet -= 1
        return self._feed(token)

    def match(self, text: str) -> tuple[str, str | None]:
        """Return what may be shown of more text, and the stop string if one is complete."""
        assert self.matcher is not None
        text, stop = self.matcher.feed(text)
        return (text + stop if stop is not None and self.include_stop else text), stop

    def finish(self, end: End, piece: OutputDelta | None) -> OutputDelta:
        """The last piece: what this step brought, and what was held back. That may still have a stop string."""
        ids, shown = (b"", "") if piece is None else (piece.ids, piece.text)
        text, stop = self._flush(), None
        if self.matcher is not None:
            text, stop = self.match(text)
            text += self.matcher.flush()
        if stop is not None:
            return OutputDelta(end.seq_id, ids, shown + text, "stop", self.cached_tokens, stop)
        text = shown + text
        return OutputDelta(end.seq_id, ids, text, end.reason, self.cached_tokens, end.stop_token, excluded=end.excluded)
