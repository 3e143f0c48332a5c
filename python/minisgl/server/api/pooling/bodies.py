"""Request bodies of the pooling routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import WithJsonSchema

from minisgl.request_fields import RequestField
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.request_body import EMPTY, NEVER, STRING, STRINGS, QueuedBody, any_of
from minisgl.server.api.bodies.route_bodies import IDS

_DOCUMENT = {"anyOf": [STRING, {"type": "object", "required": ["text"], "properties": {"text": STRING}}]}
_Texts = Annotated[Any, any_of(STRING, STRINGS), RequestField("A text or several.", "What is a page?")]
Input = Annotated[
    Any,
    any_of(STRING, STRINGS, IDS, {"type": "array", "items": IDS}),
    RequestField("Text or token ids, one or many.", ["The capital of France is Paris."]),
]
Instruction = Annotated[
    str | None,
    RequestField(
        "Task that the reranker's prompt names; none: the default of its prompt.", "Find answers", max_length=65_536
    ),
]
UseActivation = Annotated[bool | None, RequestField("Return probabilities; false: logits.", True)]


class PoolingBody(QueuedBody):
    """Fields that every pooling route takes."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": EMPTY,
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "chat_template": NEVER,
        "mm_processor_kwargs": EMPTY,
        "lora_path": NEVER,
        "max_tokens_per_doc": NEVER,
        "max_chunks_per_doc": NEVER,
        "rank_fields": EMPTY,
        "stream": (False,),
    }
    no_effect: ClassVar[frozenset[str]] = frozenset({"user", "metadata"})

    truncate_prompt_tokens: Annotated[
        int | None,
        RequestField(
            "Keep this many tokens of each text; of a pair the document is cut; -1: as many as fit; none: a text that "
            "is longer than the context is refused.",
            512,
            ge=-1,
            le="max_seq_len",
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, RequestField("Side on which a text is cut; none: right, at its end.", "right")
    ] = None
    add_special_tokens: Annotated[bool, RequestField("Add the tokenizer's special tokens to texts.", True)] = True

    @property
    def tokens_to_keep(self) -> int | None:
        """Number of tokens of each text to keep; -1: as many as fit; None: all, and longer texts are refused."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0")
        return self.truncate_prompt_tokens


class VectorsBody(PoolingBody):
    """Texts, each of which becomes a vector."""

    example_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Input
    encoding_format: Annotated[
        Literal["float", "base64"], RequestField("float: a list of numbers; base64: little-endian float32.", "float")
    ] = "float"
    dimensions: Annotated[
        int | None, RequestField("Keep this many values of each embedding, normalized again; none: all.", 256, ge=1)
    ] = None
    normalize: Annotated[
        bool | None, RequestField("Scale embeddings to an L2 norm of 1; none: as the model's files say.", True)
    ] = None
    use_activation: Annotated[
        bool | None, RequestField("vLLM's name of normalize; false gives the logits of classes.", True)
    ] = None

    @property
    def normalized(self) -> bool | None:
        return self.use_activation if self.normalize is None else self.normalize


class EmbeddingsBody(VectorsBody):
    """POST /v1/embeddings"""


class PoolBody(VectorsBody):
    """POST /pooling"""

    task: Annotated[
        Literal["embed", "classify"] | None,
        RequestField("Kind of vector; none: the one that the model makes.", "embed"),
    ] = None


class ClassifyBody(PoolingBody):
    """POST /classify"""

    example_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Input
    use_activation: UseActivation = None


class PairsBody(PoolingBody):
    """Pairs of texts, each of which gets a score."""

    instruction: Instruction = None
    instruct: Instruction = None  # SGLang's name of the same
    use_activation: UseActivation = None

    @property
    def task(self) -> str | None:
        """Task that the reranker's prompt names, if any."""
        return self.instruction or self.instruct


class ScoreBody(PairsBody):
    """POST /score: each query with the document at the same index, or one query with all documents."""

    example_fields: ClassVar[tuple[str, ...]] = ("queries", "documents")

    queries: _Texts = None
    documents: _Texts = None
    text_1: _Texts = None  # older names of the same
    text_2: _Texts = None
    data_1: _Texts = None
    data_2: _Texts = None

    def texts(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """Return the names and texts of both sides, equally many; InvalidRequest if they cannot be paired."""
        first, second = self._side("queries", "text_1", "data_1"), self._side("documents", "text_2", "data_2")
        if len(first[1]) not in (1, len(second[1])):
            raise InvalidRequest(
                first[0], f"{first[0]} has {len(first[1])} texts: one, or as many as {second[0]} ({len(second[1])})"
            )
        return (first[0], first[1] * (len(second[1]) // len(first[1]))), second

    def _side(self, *names: str) -> tuple[str, list[str]]:
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise InvalidRequest(names[0], f"{names[0]} must be given, or {names[1]} in its place, and not both")
        ((name, value),) = given.items()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts:
            raise InvalidRequest(name, f"{name} must be a text or a list of texts, with at least one")
        return name, [document_text(text, f"{name}.{index}") for index, text in enumerate(texts)]


class RerankBody(PairsBody):
    """POST /rerank, as Jina, Cohere and vLLM have it."""

    example_fields: ClassVar[tuple[str, ...]] = ("query", "documents")

    query: Annotated[str, RequestField("Text that the documents are ranked for.", "What is the capital of France?")]
    documents: Annotated[
        list[Annotated[Any, WithJsonSchema(_DOCUMENT)]],
        RequestField("Texts, or objects with a text.", ["Paris is the capital.", "Rome is old."], min_length=1),
    ]
    top_n: Annotated[int | None, RequestField("Return this many of the best documents; none or 0: all.", 3, ge=0)] = (
        None
    )
    return_documents: Annotated[bool, RequestField("Return the documents' texts.", True)] = True


def document_text(document: Any, name: str) -> str:
    """Return the text of a document; InvalidRequest if it is neither a text nor an object with one."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise InvalidRequest(name, f"{name} must be a text, or an object with a text")
    return text
