"""Tokenizer worker: sends prompts as token ids to the scheduler, and refusals and prompt ids to the API server.

Clients take turns: prompts and queries wait here until it is their client's. A request with a new grammar waits until a
process has checked the grammar; later requests overtake it. Other messages are handled as they come. An abort cannot
overtake its request, because it also removes what waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from minisgl.limits import Limits
from minisgl.message.engine_state import StateRequest
from minisgl.message.packed_ids import pack_ids, unpack_ids
from minisgl.message.shared import Abort, FlushCache, ProcessCounts, StatsRequest
from minisgl.message.socket import Inbox, Outbox, Sender
from minisgl.message.to_api import Decoded, Described, Encoded, Reply, ToApi, Unanswered
from minisgl.message.to_scheduler import ToScheduler
from minisgl.message.to_tokenizer import Decode, Describe, Encode, Generate, ToTokenizer
from minisgl.process.worker import Worker
from minisgl.sampling_params import InvalidRequest
from minisgl.structured_output.translate import named_tokens
from minisgl.structured_output.validator import GrammarValidator, PendingCheck
from minisgl.tokenizer.admission import Admission, admit, check_vocabulary, prompt_field, prompt_text
from minisgl.tokenizer.text import TextTokenizer
from minisgl.tokenizer.tokenizer_config import chat_templates, load_tokenizer_config, model_parsers, special_tokens
from minisgl.tokenizer.turns import Turns

logger = logging.getLogger(__name__)

MAX_CHARS_TO_ENCODE = 1_000_000  # per query; encoding takes half a second, in which no other prompt is encoded
QUERIES = ""  # stands for the clients of all queries, which do not name theirs
CHECK_INTERVAL = 0.002  # seconds between polls of the grammars that are being checked, if there are any


class GenerateHead(msgspec.Struct, frozen=True, tag="Generate"):
    """Part of a Generate by which it waits for its turn."""

    seq_ids: list[int]
    client: str = ""


class QueryHead(msgspec.Struct, frozen=True):
    """Part of a query that the worker answers itself."""

    query_id: int


class EncodeHead(QueryHead, frozen=True, tag="Encode"): ...


class DecodeHead(QueryHead, frozen=True, tag="Decode"): ...


class DescribeHead(QueryHead, frozen=True, tag="Describe"): ...


# Waiting messages stay encoded, because their objects take up to ten times the memory.
Head: TypeAlias = (
    GenerateHead | EncodeHead | DecodeHead | DescribeHead | Abort | StatsRequest | FlushCache | StateRequest
)
_HEADS: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)


def run(worker: Worker) -> None:
    """Run the process: load, report ready, serve until the supervisor ends it."""
    folder = worker.config.tokenizer_folder
    with worker.phase("load tokenizer"):
        pooling = worker.config.pooling
        tokenizer = TextTokenizer.from_folder(
            folder,
            worker.config.source.chat_template,
            causal_reranker=pooling is not None and pooling.is_causal_reranker,
        )
        reasoning = model_parsers(worker.config).reasoning_format
        closes_objects = not worker.config.structured_output_additional_properties
        grammars = GrammarValidator(named_tokens(tokenizer.tokenizer), reasoning, closes_objects=closes_objects)
    context = zmq.Context()
    inbox: Inbox[ToTokenizer] = Inbox(context, worker.addresses.tokenizer(worker.index), ToTokenizer)
    api: Outbox[ToApi] = Outbox(context, worker.addresses.api)
    scheduler: Outbox[ToScheduler] = Outbox(context, worker.addresses.scheduler)
    pending = PendingAdmissions(api, scheduler)
    turns: Turns[bytes] = Turns()  # encoded messages
    limits = worker.ready()
    while True:
        for data in arrived(inbox, is_busy=len(turns) > 0, checks=pending.num_sequences > 0):
            match _HEADS.decode(data):
                case GenerateHead(seq_ids, client):
                    turns.add(seq_ids[0], client, data)
                case QueryHead(query):
                    turns.add(-query, QUERIES, data)
                case Abort(seq_ids) as abort:
                    turns.remove(seq_ids)
                    pending.drop(seq_ids)
                    scheduler.send(abort)
                case StatsRequest(query):
                    counts = {"waiting": len(turns), "sequences": pending.num_sequences}
                    scheduler.send(StatsRequest(query, [ProcessCounts(f"tokenizer-{worker.index}", counts)]))
                case (FlushCache() | StateRequest()) as message:
                    scheduler.send(message)
        grammars.poll()
        pending.release()
        if not turns:
            continue
        client, data = turns.next()
        begin = time.perf_counter()  # not the thread's time: `tokenizers` has threads of its own
        match inbox.decode(data):
            case Generate() as request:
                pending.add(admit(request, tokenizer, limits, grammars))
            case (Encode() | Decode()) as question:
                api.send(reply_to(question, tokenizer, limits))
            case Describe(query):
                api.send(Described(query, describe(folder, worker.config.source.chat_template)))
        turns.charge(client, time.perf_counter() - begin)


def arrived(inbox: Inbox[ToTokenizer], *, is_busy: bool, checks: bool) -> Iterator[bytes]:
    """Yield the messages that have come, encoded.

    Unless prompts wait (`is_busy`) wait for one, but not for long while grammars are being checked (`checks`).
    """
    if not is_busy:
        if checks and not inbox.has_message(CHECK_INTERVAL):
            return
        yield inbox.receive_data()
    while inbox.has_message(0):
        yield inbox.receive_data()


class PendingAdmissions:
    """Sends admissions once they are settled; most are at once, others wait for the check of their grammar.

    Thousands of prompts may wait for one grammar, and each message of any client calls `release`: it visits checks, not
    admissions.
    """

    def __init__(self, api: Sender[ToApi], scheduler: Sender[ToScheduler]) -> None:
        self._api = api
        self._scheduler = scheduler
        self._waiting: dict[PendingCheck, dict[int, Admission]] = {}  # by their first sequence, oldest first
        self._checks: dict[int, PendingCheck] = {}  # of each waiting admission, by its first sequence
        self.num_sequences = 0  # sequences whose admissions wait

    def add(self, admission: Admission) -> None:
        """Send an admission now or, if it is not settled, in a later `release`."""
        check = admission.check
        if check is None or check.is_done:
            self._send(admission)
            return
        first = admission.answer.seq_ids[0]
        self._waiting.setdefault(check, {})[first] = admission
        self._checks[first] = check
        self.num_sequences += len(admission.answer.seq_ids)

    def release(self) -> None:
        """Send the admissions that are settled, to the API server and the scheduler."""
        for check in [check for check in self._waiting if check.is_done]:
            for first in list(self._waiting[check]):
                self._send(self._take(first))

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Drop the waiting admissions of an aborted request; the abort names every sequence of each."""
        for seq_id in seq_ids:
            if seq_id in self._checks:
                self._take(seq_id).abandon()

    def _take(self, first: int) -> Admission:
        check = self._checks.pop(first)
        admission = self._waiting[check].pop(first)
        if not self._waiting[check]:
            del self._waiting[check]
        self.num_sequences -= len(admission.answer.seq_ids)
        return admission

    def _send(self, admission: Admission) -> None:
        settled = admission.settled()
        self._api.send(settled.answer)
        for add in settled.adds:
            self._scheduler.send(add)


def reply_to(query: Encode | Decode, tokenizer: TextTokenizer, limits: Limits) -> Reply:
    """Answer a query about text and ids. A text may be longer than the context."""
    try:
        if isinstance(query, Encode):
            text, add_special_tokens = prompt_text(query.prompt, tokenizer)
            if len(text) > MAX_CHARS_TO_ENCODE:
                raise InvalidRequest(
                    prompt_field(query.prompt),
                    f"the prompt has {len(text)} characters; at most {MAX_CHARS_TO_ENCODE} are tokenized at a time",
                )
            ids = tokenizer.encode(text, add_special_tokens)
            strings = msgspec.json.encode(tokenizer.strings(ids)) if query.strings else b""
            return Encoded(query.query_id, pack_ids(ids), strings)
        ids = unpack_ids(query.ids)
        check_vocabulary(ids, limits)
        return Decoded(query.query_id, tokenizer.decode(ids, skip_special_tokens=False))
    except InvalidRequest as error:
        return Unanswered(query.query_id, error.field, error.message)
    except Exception:
        logger.exception("a text could not be encoded or decoded")
        return Unanswered(query.query_id, status=500)


def describe(folder: Path, chat_template: str | None = None) -> dict[str, Any]:
    """Return the tokenizer's configuration, with special tokens as texts and with the chat template."""
    config = load_tokenizer_config(folder)
    templates = chat_templates(folder, config, chat_template)
    return config | special_tokens(config) | {"chat_template": templates.get("default", templates or None)}
