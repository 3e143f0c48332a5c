"""Turns a request into the sequences that the scheduler runs, or into a refusal."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import msgspec

from minisgl.core import Int32Array
from minisgl.limits import Limits
from minisgl.message.packed_ids import pack_ids, unpack_ids
from minisgl.message.to_api import Accepted, Echo, Refused
from minisgl.message.to_scheduler import Add
from minisgl.message.to_tokenizer import ChatPrompt, Generate, IdsPrompt, PairPrompt, Prompt, TextPrompt
from minisgl.sampling_params import MAX_BAD_WORD_TOKENS, Grammar, InvalidRequest, SamplingParams, resolve_max_tokens
from minisgl.structured_output.compile_queue import QueueFull
from minisgl.structured_output.translate import field_of
from minisgl.structured_output.validator import GrammarValidator, PendingCheck
from minisgl.tokenizer.pairs import encode_pair
from minisgl.tokenizer.text import TextTokenizer

logger = logging.getLogger(__name__)

PROMPT_END_TOKENS = 32  # enough for a marker and the line breaks around it, even if each token is one character


@dataclass(frozen=True, slots=True)
class Admission:
    """Outcome of a request: the answer to the API server, and an Add for each choice.

    If there is a `check`, the outcome is valid only if the check accepts the grammar, which came in `field`.
    """

    answer: Accepted | Refused
    adds: list[Add]
    check: PendingCheck | None = None
    field: str = ""

    def settled(self) -> Admission:
        """Wait for the check, and return the admission without one."""
        if self.check is not None:
            try:
                grammar = self.check.result(self.field)
            except InvalidRequest as error:
                return Admission(Refused(self.answer.seq_ids, error.field, error.message, error.code), [])
            except Exception:
                name = {"request_id": self.adds[0].request_id}
                logger.exception("the grammar of request %(request_id)s could not be checked", name, extra=name)
                return Admission(Refused(self.answer.seq_ids, status=500), [])
            return Admission(self.answer, [_with_grammar(add, grammar) for add in self.adds])
        return Admission(self.answer, self.adds)

    def abandon(self) -> None:
        """Drop the check, because the request has been aborted."""
        if self.check is not None:
            self.check.abandon()


def _with_grammar(add: Add, grammar: Grammar) -> Add:
    return msgspec.structs.replace(add, sampling=msgspec.structs.replace(add.sampling, grammar=grammar))


def admit(request: Generate, tokenizer: TextTokenizer, limits: Limits, grammars: GrammarValidator) -> Admission:
    """Admit a request, or refuse it; errors of any kind become a refusal."""
    field = prompt_field(request.prompt)
    check, grammar_field = None, ""
    try:
        keep = tokens_to_keep(request, limits)
        ids = encode_prompt(request.prompt, tokenizer, limits, keep, keep_first=request.keep_first)
        check_vocabulary(ids, limits)
        max_tokens = resolve_max_tokens(len(ids), request.sampling.max_tokens, limits, fewer=request.fewer_tokens)
        sampling = resolve_bad_words(request.sampling.with_max_tokens(max_tokens), tokenizer, limits.vocab_size)
        end = prompt_end(request, ids, tokenizer)
        if sampling.grammar is not None:
            grammar_field = field_of(sampling.grammar)
            check = grammars.check(grammars.fit(sampling.grammar, request.prompt, end), request.client)
    except InvalidRequest as error:
        named = field if error.field == "prompt" else error.field
        return Admission(Refused(request.seq_ids, named, error.message, error.code), [])
    except QueueFull as error:
        return Admission(Refused(request.seq_ids, message=str(error), status=503), [])
    except Exception:
        name = {"request_id": request.request_id}
        logger.exception("the prompt of request %(request_id)s could not be encoded", name, extra=name)
        return Admission(Refused(request.seq_ids, status=500), [])
    packed = pack_ids(ids)
    # A digest, because the prefix cache needs salts of equal length.
    salt = hashlib.blake2b(request.cache_salt.encode(), digest_size=16).digest() if request.cache_salt else b""
    adds = [
        Add(
            seq_id,
            packed,
            sampling,
            seed,
            request.text,
            priority=request.priority,
            cache_salt=salt,
            request_id=request.request_id,
        )
        for seq_id, seed in zip(request.seq_ids, request.seeds, strict=True)
    ]
    echo = echo_of(request, ids, tokenizer) if request.echo else None
    return Admission(Accepted(request.seq_ids, packed, echo, end), adds, check, grammar_field)


def prompt_field(prompt: Prompt) -> str:
    """Name the request's field for the prompt."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def tokens_to_keep(request: Generate, limits: Limits) -> int | None:
    """Return the largest number of prompt tokens to keep; None: all."""
    if request.truncate != -1:
        return request.truncate
    wanted = 1 if request.sampling.max_tokens is None else request.sampling.max_tokens
    return max(limits.max_seq_len - wanted, 1)


def encode_prompt(
    prompt: Prompt,
    tokenizer: TextTokenizer,
    limits: Limits,
    keep: int | None,
    *,
    keep_first: bool,
) -> Int32Array:
    """Return the prompt's ids: all, or the last `keep` of them, or the first `keep` if `keep_first`."""
    if isinstance(prompt, PairPrompt):
        return encode_pair(prompt, tokenizer, limits, keep)
    if isinstance(prompt, IdsPrompt):
        ids = unpack_ids(prompt.ids)
        if keep is None:
            return ids
        return ids[:keep] if keep_first else ids[-keep:]
    field = prompt_field(prompt)
    text, add_special_tokens = prompt_text(prompt, tokenizer)
    if keep is None:
        return tokenizer.encode_fitting(text, limits, add_special_tokens, field)
    return tokenizer.encode_cut(text, keep, add_special_tokens, field, keep_first=keep_first)


def prompt_text(prompt: TextPrompt | ChatPrompt, tokenizer: TextTokenizer) -> tuple[str, bool]:
    """Return the prompt as text, and True if the tokenizer must add special tokens; chat templates write their own."""
    if isinstance(prompt, TextPrompt):
        return prompt.text, prompt.add_special_tokens
    text = tokenizer.templates.render(
        prompt.messages,
        prompt.tools,
        prompt.template_kwargs,
        prompt.add_generation_prompt,
        prompt.continue_final_message,
    )
    return text, False


def echo_of(request: Generate, ids: Int32Array, tokenizer: TextTokenizer) -> Echo:
    """Return the prompt's text: as it was sent, or decoded if it was sent as ids or was cut."""
    if isinstance(request.prompt, TextPrompt) and request.truncate is None:
        text = request.prompt.text
    else:
        text = tokenizer.decode(ids, request.text.skip_special_tokens)
    return Echo(text, tokenizer.first_token(ids))


def prompt_end(request: Generate, ids: Int32Array, tokenizer: TextTokenizer) -> str:
    """Return the end of a conversation's prompt as text; "" for other prompts."""
    if not isinstance(request.prompt, ChatPrompt):
        return ""
    return tokenizer.decode(ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)


def check_vocabulary(ids: Int32Array, limits: Limits) -> None:
    """Raise InvalidRequest for the first id that is not in the model's vocabulary."""
    outside = (ids < 0) | (ids >= limits.vocab_size)
    if outside.any():
        token = int(ids[outside.argmax()])
        raise InvalidRequest(
            "prompt", f"token id {token} is outside the vocabulary: ids are 0 to {limits.vocab_size - 1}"
        )


def resolve_bad_words(sampling: SamplingParams, tokenizer: TextTokenizer, vocab_size: int) -> SamplingParams:
    """Return the parameters with `bad_words` added to `bad_words_ids`, because the sampler needs token ids.

    A word is forbidden as the tokenizer encodes it at the start of a text and after a space; other splits of its
    letters into tokens are not forbidden. InvalidRequest if a word has no tokens, or too many. An encoding with a token
    outside the model's vocabulary is left out, because it cannot be generated.
    """
    if not sampling.bad_words:
        return sampling
    spellings = [spelling for word in sampling.bad_words for spelling in (word, f" {word.lstrip()}")]
    found = dict.fromkeys(map(tuple, sampling.bad_words_ids))  # an ordered set; `LLM` takes lists, too
    for spelling in spellings:
        ids = tuple(tokenizer.encode(spelling, add_special_tokens=False, field="bad_words").tolist())
        if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                "bad_words",
                f"bad_words: {spelling!r} has {len(ids)} tokens, but a bad word may have 1 to {MAX_BAD_WORD_TOKENS}",
            )
        if max(ids) < vocab_size:
            found[ids] = None
    return msgspec.structs.replace(sampling, bad_words_ids=tuple(found))
