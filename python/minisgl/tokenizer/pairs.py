"""Encodes pairs of a query and a document for rerankers, in the form that the model was trained on.

If the chat template has the roles query and document, as those of sentence-transformers and vLLM do, it is used.
Otherwise a causal reranker gets the form of Qwen3-Reranker (Zhang et al., 2025), and a classifier the tokenizer's own
form of pairs.
"""

from __future__ import annotations

import msgspec

from minisgl.core import Int32Array
from minisgl.limits import Limits
from minisgl.message.to_tokenizer import PairPrompt
from minisgl.sampling_params import InvalidRequest
from minisgl.tokenizer.decoders.base import REPLACEMENT
from minisgl.tokenizer.text import TextTokenizer

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
FIELD = "prompt"


def encode_pair(pair: PairPrompt, tokenizer: TextTokenizer, limits: Limits, keep: int | None = None) -> Int32Array:
    """Return the ids of a pair, at most `keep`, for which the document is cut; InvalidRequest if that is impossible."""
    tokenizer.check_length(pair.query, limits, add_special_tokens=False, field=FIELD)
    if keep is None:
        tokenizer.check_length(pair.document, limits, add_special_tokens=False, field=FIELD)
        return _encode(pair, tokenizer)
    document = pair.document[: tokenizer.most_chars(keep)]
    ids = _encode(_with_document(pair, document), tokenizer)
    if len(ids) <= keep:
        return ids
    around = len(_encode(_with_document(pair, ""), tokenizer))
    if around >= keep:
        raise InvalidRequest(
            "truncate_prompt_tokens",
            f"the query and what stands around it have {around} tokens, but truncate_prompt_tokens is {keep}",
        )
    kept = tokenizer.encode(document, add_special_tokens=False, field=FIELD)[: keep - around]
    while len(ids) > keep:
        beginning = tokenizer.decode(kept, skip_special_tokens=False).rstrip(REPLACEMENT)
        ids = _encode(_with_document(pair, beginning), tokenizer)
        kept = kept[: keep - len(ids)]
    return ids


def _with_document(pair: PairPrompt, document: str) -> PairPrompt:
    return msgspec.structs.replace(pair, document=document)


def _encode(pair: PairPrompt, tokenizer: TextTokenizer) -> Int32Array:
    if tokenizer.templates.takes_pairs:
        instruction = [] if pair.instruction is None else [{"role": "system", "content": pair.instruction}]
        query, document = {"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}
        return tokenizer.encode_chat([*instruction, query, document])
    if not tokenizer.causal_reranker:
        if pair.instruction is not None:
            raise InvalidRequest("instruction", "instruction: this model's form of pairs has no place for one")
        return tokenizer.encode(pair.query, field=FIELD, pair=pair.document)
    text = _QWEN3_RERANKER.format(
        instruction=pair.instruction or _INSTRUCTION, query=pair.query, document=pair.document
    )
    return tokenizer.encode(text, add_special_tokens=False, field=FIELD)
