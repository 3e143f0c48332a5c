"""The other side of the API server's sockets, scripted: tokenizer workers, scheduler and detokenizer in one thread.

The first word of a prompt (or of a chat's last message) says what happens to it:

    refuse    Refused, naming max_tokens           silent    nothing at all
    broken    Refused, with status 500             busy      Refused, with status 503
    hold      Accepted, then nothing               fail      two tokens, then the end "error"
    endless   tokens until aborted                 stop      ends by the stop string "END"
    big       tokens of 100,000 characters         say       the texts of the JSON list that follows, then "stop"
    vector    the numbers that follow, as a pooling model's
    (others)  max_tokens tokens (8 if none), then "length"

Each tick sends one OutputDeltas message with one token of every live sequence, as an engine's step does. An abort is
answered as the real pipeline answers it: a token too late, and the end "abort".
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import zmq

from minisgl.limits import Limits
from minisgl.message.engine_state import EngineState, StateReport, StateRequest, StepRecord
from minisgl.message.logprobs import (
    LogprobRows,
    PackedLogprobs,
    PackedPositions,
    PositionLogprobs,
    TokenLogprob,
    pack_positions,
)
from minisgl.message.packed_ids import pack_ids, unpack_ids
from minisgl.message.shared import Abort, FlushCache, Flushed, ProcessCounts, StatsReport, StatsRequest
from minisgl.message.socket import Addresses, Inbox, Outbox
from minisgl.message.to_api import (
    Accepted,
    Decoded,
    Described,
    Echo,
    Encoded,
    OutputDelta,
    OutputDeltas,
    Refused,
    ToApi,
    Unanswered,
)
from minisgl.message.to_tokenizer import (
    ChatPrompt,
    Decode,
    Describe,
    Encode,
    Generate,
    IdsPrompt,
    PairPrompt,
    Prompt,
    TextPrompt,
    ToTokenizer,
)
from minisgl.sampling_params import SamplingParams

LIMITS = Limits(max_seq_len=4096, vocab_size=1000)
DEFAULT_TOKENS = 8


def prompt_text(prompt: Prompt) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case IdsPrompt(ids):
            return "ids " + " ".join(map(str, unpack_ids(ids)))
        case ChatPrompt(messages):
            return str(messages[-1]["content"])
        case PairPrompt(document=document):
            return document


def answer(text: str, choice: int, num_tokens: int) -> str:
    """Return what the fake engine says in the end."""
    return "".join(f"{text[:12]}·{choice}·{i} " for i in range(num_tokens))


def fake_logprobs(word: str, token: int, choice: int, top: int | None) -> PackedPositions:
    """Return log-probabilities of a token: the second of five; a choice is the likelier the higher its number."""
    if top is None:
        return b""
    alternatives = [
        TokenLogprob(100, b"\xe4\xb8", -0.25),
        TokenLogprob(token, word.encode(), -1.0 / (choice + 1)),
        TokenLogprob(101, b"\xf0\x9f", -2.0),
        TokenLogprob(102, b" y", -3.0),
        TokenLogprob(103, b" z", float("-inf")),
    ]
    return pack_positions([PositionLogprobs(alternatives[1], 2, alternatives[:top])])


def fake_prompt_logprobs(text: str, top: int | None) -> PackedLogprobs | None:
    """Return those of all words but the first: the most likely ones."""
    if top is None:
        return None
    words = {i: f" {word}".encode() for i, word in enumerate(text.split())}
    other = max(900, len(words))
    count, top = len(words) - 1, min(top, 2)
    rows = LogprobRows(
        [0],
        [count],
        [top],
        pack_ids(list(range(1, count + 1))),
        np.full(count, -0.5, "<f4").tobytes(),
        pack_ids([1] * count),
        pack_ids([token for i in range(1, count + 1) for token in (i, other)[:top]]),
        np.array([(-0.5, -4.0)[:top]] * count, "<f4").tobytes(),
    )
    return PackedLogprobs(rows, {**words, other: b"?"}, frozenset())


def prompt_end(message: Generate) -> str:
    """Return the end as the chat template would have it; tests say what that is."""
    return message.prompt.template_kwargs.get("prompt_end", "") if isinstance(message.prompt, ChatPrompt) else ""


class FakeEngine(threading.Thread):
    def __init__(self, run_dir: str, num_tokenizers: int = 1, tick: float = 0.0005) -> None:
        super().__init__(daemon=True)
        self.addresses = Addresses(run_dir)
        self.num_tokenizers = num_tokenizers
        self.tick = tick
        self.received: list[tuple[int, ToTokenizer]] = []  # (tokenizer worker, message)
        self.answers_queries = True
        self.generates = True
        self.scheduler_counts: dict[str, int] = {}
        self._commands: queue.SimpleQueue[ToApi | None] = queue.SimpleQueue()
        self._live: dict[int, Iterator[OutputDelta]] = {}

    # For tests.

    def say(self, message: ToApi) -> None:
        self._commands.put(message)

    def of_type(self, kind: type[Any]) -> list[Any]:
        return [message for _, message in list(self.received) if isinstance(message, kind)]

    def wait_for(self, kind: type[Any], count: int = 1) -> list[Any]:
        wait_until(lambda: len(self.of_type(kind)) >= count)
        return self.of_type(kind)

    def stop(self) -> None:
        self._commands.put(None)
        self.join(120)

    # The thread.

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inboxes = [Inbox(context, self.addresses.tokenizer(i), ToTokenizer) for i in range(self.num_tokenizers)]
        api = Outbox[ToApi](context, self.addresses.api)
        while True:
            for index, inbox in enumerate(inboxes):
                for message in inbox.drain():
                    self.received.append((index, message))
                    for reply in self._replies(index, message):
                        api.send(reply)
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    context.destroy(linger=0)
                    return
                api.send(command)
            if pieces := self._step():
                api.send(OutputDeltas(pieces))
            time.sleep(self.tick)

    def _replies(self, worker: int, message: ToTokenizer) -> Iterator[ToApi]:
        match message:
            case Generate():
                text = prompt_text(message.prompt)
                mode = text.partition(" ")[0]
                if mode == "refuse":
                    yield Refused(message.seq_ids, "max_tokens", "max_tokens is too large for this prompt")
                elif mode == "broken":
                    yield Refused(message.seq_ids, status=500)
                elif mode == "busy":
                    yield Refused(message.seq_ids, message="too many grammars wait", status=503)
                elif mode != "silent" and self.generates:
                    echo = Echo(text, text.split()[0].encode()) if message.echo else None
                    yield Accepted(message.seq_ids, pack_ids(list(range(len(text.split())))), echo, prompt_end(message))
                    for choice, seq_id in enumerate(message.seq_ids):
                        self._live[seq_id] = self._pieces(seq_id, text, choice, message)
            case Abort(seq_ids):
                late = [seq_id for seq_id in seq_ids if self._live.pop(seq_id, None) is not None]
                for seq_id in late:
                    yield OutputDeltas([OutputDelta(seq_id, pack_ids([7]), "late")])
                    yield OutputDeltas([OutputDelta(seq_id, b"", "", "abort")])
            case StatsRequest(query):
                if self.answers_queries:
                    counts = [
                        ProcessCounts(f"tokenizer-{worker}", {"waiting": 0}),
                        ProcessCounts("scheduler-0", {"requests_running": len(self._live), **self.scheduler_counts}),
                        ProcessCounts("detokenizer", {"open": len(self._live)}),
                    ]
                    yield StatsReport(query, counts)
            case Encode(query, prompt, strings):
                words = prompt_text(prompt).split()
                if words[0] == "refuse":
                    yield Unanswered(query, "messages", "messages cannot be rendered")
                elif words[0] == "broken":
                    yield Unanswered(query, status=500)
                elif words[0] != "silent":
                    ids = pack_ids([len(word) for word in words])  # a token is its word's length
                    yield Encoded(query, ids, msgspec.json.encode(words) if strings else b"")
            case Decode(query, ids):
                yield Decoded(query, " ".join("x" * token for token in unpack_ids(ids).tolist()))
            case Describe(query):
                yield Described(query, {"tokenizer_class": "Words", "chat_template": None})
            case FlushCache(query):
                yield Flushed(query, 17)
            case StateRequest(query, since):
                steps = [StepRecord(step=step, begin=step, end=step + 1, decodes=1) for step in range(since + 1, 10)]
                counts = {"pages_evicted": 3, **self.scheduler_counts}
                yield StateReport(query, EngineState(time=1.0, counts=counts, sequences=[], nodes=[], steps=steps))

    def _pieces(self, seq_id: int, text: str, choice: int, message: Generate) -> Iterator[OutputDelta]:
        mode = text.partition(" ")[0]
        if mode == "hold":
            return
        if mode == "vector":  # a pooling model
            values = np.array(text.split()[1:], dtype="<f4")
            yield OutputDelta(seq_id, b"", "", "stop", vector=values.tobytes())
            return
        sampling = message.sampling
        limit = DEFAULT_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        prompt = fake_prompt_logprobs(text, sampling.prompt_logprobs)
        if limit == 0:
            yield OutputDelta(seq_id, b"", "", "length", 1, prompt_logprobs=prompt)
        if mode == "endless":
            limit = 10**9
        if mode == "say":
            yield from self._say(seq_id, json.loads(text.removeprefix("say ")), message.sampling)
            return
        held = ""
        for i in range(limit):
            word = "x" * 100_000 if mode == "big" else f"{text[:12]}·{choice}·{i} "
            if mode == "fail" and i == 2:
                yield OutputDelta(seq_id, b"", "", "error")
                return
            logprobs = fake_logprobs(word, i, choice, sampling.logprobs)
            if i == limit - 1:
                finish, reason = ("stop", "END") if mode == "stop" else ("length", None)
                yield OutputDelta(seq_id, pack_ids([i]), held + word, finish, 1, reason, logprobs, prompt)  # type: ignore[arg-type]
            elif i % 3 == 1:  # text that is held back, then comes with the next
                yield OutputDelta(seq_id, pack_ids([i]), "", logprobs=logprobs)
                held = word
            else:
                yield OutputDelta(seq_id, pack_ids([i]), held + word, logprobs=logprobs, prompt_logprobs=prompt)
                held, prompt = "", None

    def _say(self, seq_id: int, texts: list[str], sampling: SamplingParams) -> Iterator[OutputDelta]:
        shown = texts[: sampling.max_tokens]
        end = "stop" if shown == texts else "length"
        for i, text in enumerate(shown):
            logprobs = fake_logprobs(text, i, 0, sampling.logprobs)
            prompt = fake_prompt_logprobs("say so", sampling.prompt_logprobs) if i == 0 else None
            yield OutputDelta(seq_id, pack_ids([i]), text, logprobs=logprobs, prompt_logprobs=prompt)
        yield OutputDelta(seq_id, b"", "", end, 1)  # type: ignore[arg-type]

    def _step(self) -> list[OutputDelta]:
        pieces = []
        for seq_id, script in list(self._live.items()):
            piece = next(script, None)
            if piece is None:
                continue  # held
            pieces.append(piece)
            if piece.finish is not None:
                del self._live[seq_id]
        return pieces


def wait_until(condition: Callable[[], bool], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
