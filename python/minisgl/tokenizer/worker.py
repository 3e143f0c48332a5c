"""The tokenizer worker: prompts in, token ids out to the scheduler, refusals and prompt ids to the API server.

Messages are handled one after the other in the order they came, so an abort cannot overtake its request. It holds
nothing of a request. Whatever goes wrong with one prompt is answered as that request's refusal.
"""

from __future__ import annotations

import logging

import msgspec
import zmq

from minisgl.core import Int32Array, InvalidRequest, Limits, resolve_max_tokens
from minisgl.message import to_scheduler
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_api import Accepted, Refused, ToApi
from minisgl.message.to_scheduler import Add, ToScheduler
from minisgl.message.to_tokenizer import Abort, ChatPrompt, Generate, IdsPrompt, Query, TextPrompt, ToTokenizer
from minisgl.message.types import ProcessCounts, pack_ids, unpack_ids
from minisgl.server.worker import Worker
from minisgl.tokenizer.text import TextTokenizer

logger = logging.getLogger(__name__)


def run(worker: Worker) -> None:
    """The process: load, say ready, serve until the supervisor ends it."""
    with worker.phase("load tokenizer"):
        tokenizer = TextTokenizer.from_folder(worker.config.engine.model_path)
    context = zmq.Context()
    inbox: Inbox[ToTokenizer] = Inbox(
        context,
        worker.addresses.tokenizer(worker.index),
        ToTokenizer,
    )
    api: Outbox[ToApi] = Outbox(context, worker.addresses.api)
    scheduler: Outbox[ToScheduler] = Outbox(context, worker.addresses.scheduler)
    limits = worker.ready()
    while True:
        message = inbox.receive()
        if isinstance(message, Generate):
            answer, adds = admit(message, tokenizer, limits)
            api.send(answer)
            for add in adds:
                scheduler.send(add)
        elif isinstance(message, Abort):
            scheduler.send(to_scheduler.Abort(message.sequences))
        elif isinstance(message, Query):
            counts = ProcessCounts(f"tokenizer-{worker.index}", {"sequences": 0})
            scheduler.send(to_scheduler.Query(message.query, [counts]))


def admit(request: Generate, tokenizer: TextTokenizer, limits: Limits) -> tuple[Accepted | Refused, list[Add]]:
    """The answer to the API server, and what the scheduler is to run: one Add for each of the request's choices."""
    field = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    try:
        ids = encode_prompt(request.prompt, tokenizer)
        check_vocabulary(ids, limits)
        max_tokens = resolve_max_tokens(len(ids), request.sampling.max_tokens, limits)
    except InvalidRequest as error:
        named = field if error.field == "prompt" else error.field
        return Refused(request.sequences, named, error.message), []
    except Exception as error:
        logger.exception("the prompt of sequences %s could not be encoded", request.sequences)
        reason = f"the prompt could not be encoded: {type(error).__name__}: {error}"
        return Refused(request.sequences, field, reason), []
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
    packed = pack_ids(ids)
    adds = [
        Add(sequence, packed, sampling, seed, request.text, request.priority)
        for sequence, seed in zip(request.sequences, request.seeds, strict=True)
    ]
    return Accepted(request.sequences, packed), adds


def encode_prompt(prompt: TextPrompt | IdsPrompt | ChatPrompt, tokenizer: TextTokenizer) -> Int32Array:
    """The prompt's ids, whichever way it was given."""
    if isinstance(prompt, TextPrompt):
        return tokenizer.encode(prompt.text)
    if isinstance(prompt, IdsPrompt):
        return unpack_ids(prompt.ids)
    return tokenizer.encode_chat(prompt.messages, prompt.tools, prompt.template_kwargs)


def check_vocabulary(ids: Int32Array, limits: Limits) -> None:
    """Raise InvalidRequest for the first id that the model has no embedding for."""
    outside = (ids < 0) | (ids >= limits.vocab_size)
    if outside.any():
        token = int(ids[outside.argmax()])
        raise InvalidRequest(
            "prompt", f"token id {token} is outside the vocabulary: ids are 0 to {limits.vocab_size - 1}"
        )
