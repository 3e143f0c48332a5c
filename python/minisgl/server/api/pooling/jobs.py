"""Jobs of the pooling routes, made of their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.limits import Limits
from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import TextOptions
from minisgl.message.to_tokenizer import IdsPrompt, PairPrompt, Prompt, TextPrompt
from minisgl.pooling.pooling_config import PoolingConfig
from minisgl.sampling_params import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, SamplingParams
from minisgl.server.api.bodies.plain_prompts import PROMPT_KINDS, checked_ids, is_ids
from minisgl.server.api.pooling.bodies import ClassifyBody, PairsBody, PoolingBody, VectorsBody
from minisgl.server.api.requests.open_request import Job

MAX_INPUTS = 2048  # inputs of a request, as OpenAI has it
MAX_PAIR_CHARS = 16 * 1024 * 1024  # characters of all queries and instructions; each pair has both


def vectors_job(body: VectorsBody | ClassifyBody, limits: Limits) -> Job:
    """Return the job that makes a vector of each input; InvalidRequest naming the input that is wrong."""
    value = body.input
    if isinstance(value, str) or is_ids(value):
        return make_job([_prompt(value, "input", body, limits)], ["input"], body)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input", f"input must be {PROMPT_KINDS}, and not empty")
    check_count("input", len(value))
    names = [f"input.{index}" for index in range(len(value))]
    if len(set(map(type, value))) > 1:
        raise InvalidRequest("input", f"input must be {PROMPT_KINDS}")
    return make_job([_prompt(one, name, body, limits) for name, one in zip(names, value, strict=True)], names, body)


def pairs_job(
    pooling: PoolingConfig, queries: Sequence[str], documents: Sequence[str], names: tuple[str, str], body: PairsBody
) -> tuple[Job, list[tuple[int, int]]]:
    """Return the job that scores queries[i] with documents[i], and the pairs of prompts to compare.

    A reranker scores each pair as one prompt, so the list of pairs is empty. For an embedding model the prompts are the
    distinct queries, then the documents, and a pair is the indices of two prompts. `names`: the client's fields of
    queries and documents.
    """
    if pooling.makes == "classes":
        return _reranking_job(queries, documents, names[1], body), []
    if body.task is not None:
        raise InvalidRequest("instruction", "instruction is for rerankers, but this model makes embeddings")
    distinct = list(dict.fromkeys(queries))  # mostly one query, which is embedded once
    places = {query: index for index, query in enumerate(distinct)}
    fields = [names[0] if len(distinct) == 1 else f"{names[0]}.{places[query]}" for query in distinct]
    fields += [f"{names[1]}.{index}" for index in range(len(documents))]
    texts = [*distinct, *documents]
    check_count(names[1], len(texts))
    pairs = [(places[query], len(distinct) + index) for index, query in enumerate(queries)]
    return make_job([TextPrompt(text, body.add_special_tokens) for text in texts], fields, body), pairs


def _reranking_job(queries: Sequence[str], documents: Sequence[str], name: str, body: PairsBody) -> Job:
    check_count(name, len(documents))
    if sum(map(len, queries)) + len(body.task or "") * len(queries) > MAX_PAIR_CHARS:
        raise InvalidRequest(
            name,
            f"{name}: with the query and the instruction of each they have more than {MAX_PAIR_CHARS} characters: "
            "send fewer at a time",
        )
    if body.truncation_side == "left":
        raise InvalidRequest("truncation_side", "truncation_side: the document of a pair is cut at its end")
    pairs = [PairPrompt(query, document, body.task) for query, document in zip(queries, documents, strict=True)]
    return make_job(pairs, [f"{name}.{index}" for index in range(len(pairs))], body)


def make_job(prompts: Sequence[Prompt], names: Sequence[str], body: PoolingBody) -> Job:
    """Return the job that pools these prompts; `names` are their fields, for errors."""
    return Job(
        SamplingParams(max_tokens=0),
        TextOptions(),
        body.priority,
        prompts=prompts,
        truncate=body.tokens_to_keep,
        keep_first=body.truncation_side != "left",
        prompt_fields=names,
        cache_salt=body.cache_salt or "",
        pools=True,
    )


def check_count(name: str, count: int) -> None:
    """Raise InvalidRequest if there are more inputs than a request may have."""
    if count > MAX_INPUTS:
        raise InvalidRequest(name, f"{name}: at most {MAX_INPUTS} are allowed in a request, not {count}")


def _prompt(value: Any, name: str, body: PoolingBody, limits: Limits) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value, body.add_special_tokens)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(name, f"{name} must be a text or a list of token ids, and not empty")
    if body.truncate_prompt_tokens is None and len(value) > limits.max_seq_len:
        raise InvalidRequest(
            name, f"{name} has {len(value)} tokens, but {limits.context_limit}", CONTEXT_LENGTH_EXCEEDED
        )
    most = limits.max_seq_len
    kept = value[-most:] if body.truncation_side == "left" else value[:most]
    return IdsPrompt(pack_ids(checked_ids(kept, limits, name)))
