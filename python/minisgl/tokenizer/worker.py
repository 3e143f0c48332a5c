"""The tokenizer worker: prompts in, token ids out to the scheduler, refusals and prompt ids to the API server.

Messages are handled one after the other in the order they came, so an abort cannot overtake its request. It holds
nothing of a request. Whatever goes wrong with one prompt is answered as that request's refusal.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import msgspec
import zmq

from minisgl.core import Int32Array, InvalidRequest, Limits, resolve_max_tokens
from minisgl.grammar.validate import GrammarValidator
from minisgl.grammar.vocabulary import named_tokens
from minisgl.message import to_scheduler
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_api import Accepted, Decoded, Described, Echo, Encoded, Refused, Reply, ToApi, Unanswered
from minisgl.message.to_scheduler import Add, ToScheduler
from minisgl.message.to_tokenizer import (
    Abort,
    ChatPrompt,
    Decode,
    Describe,
    Encode,
    FlushCache,
    Generate,
    IdsPrompt,
    Query,
    TextPrompt,
    ToTokenizer,
)
from minisgl.message.types import ProcessCounts, pack_ids, unpack_ids
from minisgl.server.worker import Worker
from minisgl.tokenizer.bad_words import resolve_bad_words
from minisgl.tokenizer.constraint import GrammarFitter
from minisgl.tokenizer.folder import chat_templates, load_tokenizer_config, model_parsers, special_tokens
from minisgl.tokenizer.text import TextTokenizer

logger = logging.getLogger(__name__)

MAX_CHARS_TO_ENCODE = 1_000_000  # of a question; it takes half a second, in which nobody else's prompt moves
PROMPT_END_TOKENS = 32  # that hold a marker and the line breaks around it, be a token a single character


def run(worker: Worker) -> None:
    """The process: load, say ready, serve until the supervisor ends it."""
    folder = Path(worker.config.engine.model_path)
    with worker.phase("load tokenizer"):
        tokenizer = TextTokenizer.from_folder(folder)
        names = named_tokens(tokenizer.tokenizer)
        form = model_parsers(worker.config).reasoning_format
        grammars = GrammarFitter(names, form, GrammarValidator(names))
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
        match message:
            case Generate():
                answer, adds = admit(message, tokenizer, limits, grammars)
                api.send(answer)
                for add in adds:
                    scheduler.send(add)
            case Abort(sequences):
                scheduler.send(to_scheduler.Abort(sequences))
            case Query(query):
                counts = ProcessCounts(f"tokenizer-{worker.index}", {"sequences": 0})
                scheduler.send(to_scheduler.Query(query, [counts]))
            case FlushCache(query):
                scheduler.send(to_scheduler.FlushCache(query))
            case Encode() | Decode():
                api.send(reply_to(message, tokenizer, limits))
            case Describe(query):
                api.send(Described(query, describe(folder)))


def admit(
    request: Generate, tokenizer: TextTokenizer, limits: Limits, grammars: GrammarFitter
) -> tuple[Accepted | Refused, list[Add]]:
    """The answer to the API server, and what the scheduler is to run: one Add for each of the request's choices."""
    field = prompt_field(request.prompt)
    try:
        ids = encode_prompt(request.prompt, tokenizer, limits, tokens_to_keep(request, limits))
        check_vocabulary(ids, limits)
        max_tokens = resolve_max_tokens(len(ids), request.sampling.max_tokens, limits)
        sampling = resolve_bad_words(request.sampling.with_max_tokens(max_tokens), tokenizer)
        end = prompt_end(request, ids, tokenizer)
        if sampling.grammar is not None:
            grammar = grammars.fit(sampling.grammar, request.prompt, end)
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
    except InvalidRequest as error:
        named = field if error.field == "prompt" else error.field
        return Refused(request.sequences, named, error.message, error.code), []
    except Exception as error:
        logger.exception("the prompt of sequences %s could not be encoded", request.sequences)
        reason = f"the prompt could not be encoded: {type(error).__name__}: {error}"
        return Refused(request.sequences, field, reason), []
    packed = pack_ids(ids)
    # A digest, because what the cache makes of it relies on their equal lengths.
    salt = hashlib.blake2b(request.cache_salt.encode(), digest_size=16).digest() if request.cache_salt else b""
    adds = [
        Add(sequence, packed, sampling, seed, request.text, request.priority, salt)
        for sequence, seed in zip(request.sequences, request.seeds, strict=True)
    ]
    echo = echo_of(request, ids, tokenizer) if request.echo else None
    return Accepted(request.sequences, packed, echo, end), adds


def prompt_field(prompt: TextPrompt | IdsPrompt | ChatPrompt) -> str:
    """What the client calls it."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def tokens_to_keep(request: Generate, limits: Limits) -> int | None:
    """How many tokens of the prompt are kept at most; None: all."""
    if request.truncate != -1:
        return request.truncate
    wanted = 1 if request.sampling.max_tokens is None else request.sampling.max_tokens
    return max(limits.max_seq_len - wanted, 1)


def encode_prompt(
    prompt: TextPrompt | IdsPrompt | ChatPrompt, tokenizer: TextTokenizer, limits: Limits, keep: int | None = None
) -> Int32Array:
    """The prompt's ids, whichever way it was given: all, or the last `keep` of them."""
    if isinstance(prompt, IdsPrompt):
        ids = unpack_ids(prompt.ids)
        return ids if keep is None else ids[-keep:]
    field = prompt_field(prompt)
    text, add_special_tokens = prompt_text(prompt, tokenizer)
    if keep is None:
        return tokenizer.encode_fitting(text, limits, add_special_tokens, field)
    return tokenizer.encode_last(text, keep, add_special_tokens, field)


def prompt_text(prompt: TextPrompt | ChatPrompt, tokenizer: TextTokenizer) -> tuple[str, bool]:
    """The prompt as text, and whether special tokens are added to it: a chat template has written them all."""
    if isinstance(prompt, TextPrompt):
        return prompt.text, prompt.add_special_tokens
    text = tokenizer.render_chat(
        prompt.messages,
        prompt.tools,
        prompt.template_kwargs,
        prompt.add_generation_prompt,
        prompt.continue_final_message,
    )
    return text, False


def echo_of(request: Generate, ids: Int32Array, tokenizer: TextTokenizer) -> Echo:
    """The prompt's text: as it was sent, or else as the ids that are left of it read."""
    if isinstance(request.prompt, TextPrompt) and request.truncate is None:
        text = request.prompt.text
    else:
        text = tokenizer.decode(ids, request.text.skip_special_tokens)
    return Echo(text, tokenizer.decode(ids[:1], skip_special_tokens=False).encode())


def prompt_end(request: Generate, ids: Int32Array, tokenizer: TextTokenizer) -> str:
    """How a conversation's prompt ends."""
    if not isinstance(request.prompt, ChatPrompt):
        return ""
    return tokenizer.decode(ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)


def reply_to(question: Encode | Decode, tokenizer: TextTokenizer, limits: Limits) -> Reply:
    """The answer to a question about text and ids. A text may be longer than the context."""
    try:
        if isinstance(question, Encode):
            text, add_special_tokens = prompt_text(question.prompt, tokenizer)
            if len(text) > MAX_CHARS_TO_ENCODE:
                raise InvalidRequest(
                    prompt_field(question.prompt),
                    f"the prompt has {len(text)} characters; at most {MAX_CHARS_TO_ENCODE} are tokenized at a time",
                )
            ids = tokenizer.encode(text, add_special_tokens)
            return Encoded(question.query, pack_ids(ids), tokenizer.strings(ids) if question.strings else None)
        ids = unpack_ids(question.ids)
        check_vocabulary(ids, limits)
        return Decoded(question.query, tokenizer.decode(ids, skip_special_tokens=False))
    except InvalidRequest as error:
        return Unanswered(question.query, error.field, error.message)
    except Exception as error:
        logger.exception("a text could not be encoded or decoded")
        return Unanswered(question.query, "prompt", f"{type(error).__name__}: {error}")


def describe(folder: Path) -> dict[str, Any]:
    """The tokenizer's configuration, special tokens as texts, and the chat template wherever it is kept."""
    config = load_tokenizer_config(folder)
    templates = chat_templates(folder, config)
    return config | special_tokens(config) | {"chat_template": templates.get("default", templates or None)}


def check_vocabulary(ids: Int32Array, limits: Limits) -> None:
    """Raise InvalidRequest for the first id that the model has no embedding for."""
    outside = (ids < 0) | (ids >= limits.vocab_size)
    if outside.any():
        token = int(ids[outside.argmax()])
        raise InvalidRequest(
            "prompt", f"token id {token} is outside the vocabulary: ids are 0 to {limits.vocab_size - 1}"
        )
