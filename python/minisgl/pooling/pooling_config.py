"""Description of a pooling model: the vector that it makes of a prompt. Pure: every process knows it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Runner: TypeAlias = Literal["auto", "generate", "pooling"]
Convert: TypeAlias = Literal["auto", "embed", "classify"]
PoolingMethod: TypeAlias = Literal["last", "mean"]
ClassActivation: TypeAlias = Literal["sigmoid", "softmax", "identity"]

NO_TEXT = "this model generates no text: it makes embeddings, scores or classes (runner pooling)"
NO_VECTORS = "this model generates text: it is loaded with --runner pooling for embeddings, scores and classes"


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A vector of each prompt: its embedding, or the logit of each class.

    Scores of (query, document) pairs are the probability of the only class. `answer_ids` are the tokens whose logits a
    causal reranker compares, (no, yes): the logit of its class is their difference; of one token it is its own.
    """

    makes: Literal["embedding", "classes"]
    method: PoolingMethod
    size: int  # values of a vector
    normalize: bool = True  # embeddings have length 1
    dimensions: tuple[int, ...] = ()  # sizes to which embeddings may be cut; (): any
    labels: tuple[str, ...] = ()  # names of the classes
    activation: ClassActivation = "identity"  # from logits to the classes' values for clients
    answer_ids: tuple[int, ...] = ()
    max_seq_len: int | None = None  # maximum length in tokens, if the model's folder states one

    @property
    def is_reranker(self) -> bool:
        """True if it scores pairs: it knows one class."""
        return self.makes == "classes" and self.size == 1

    @property
    def is_causal_reranker(self) -> bool:
        """True if its scores are the language model's logits of `answer_ids`."""
        return bool(self.answer_ids)

    @property
    def reuses_prefixes(self) -> bool:
        """True if a vector needs no states of tokens that are in the prefix cache: a mean needs all."""
        return self.method == "last"
