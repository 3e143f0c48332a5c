"""Vectors of LLM are those of transformers, however prompts are batched, chunked, cached and retracted."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooling_models import Reference, save, save_embedder, texts, unit

from minisgl import LLM
from minisgl.core import DeviceOutOfMemory
from minisgl.models.hub import demo_folder
from minisgl.sampling_params import InvalidRequest, SamplingParams
from support.small_models import spoil_token

TOLERANCE = 1e-5
TIGHT: dict[str, Any] = {"max_extend_tokens": 24, "page_size": 4, "max_running_req": 4}  # prompts are cut into chunks


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "causal", "ForCausalLM", tie_word_embeddings=True)


def test_embeddings_of_the_last_token(embedder: Path) -> None:
    """Prompts run in chunks beside others, from the prefix cache, cut to some dimensions, and as long as fits."""
    reference, prompts = Reference(embedder, "Model"), texts(10)
    ids = [reference.ids(text) for text in prompts]
    longest = [5] * 512
    expected = np.stack([reference.embedding(one) for one in ids])
    with LLM(str(embedder), **TIGHT) as llm:
        assert np.abs(llm.embed(prompts) - expected).max() < TOLERANCE
        again = llm.embed([*ids, longest])
        assert np.abs(again[:-1] - expected).max() < TOLERANCE
        assert np.abs(again[-1] - reference.embedding(longest)).max() < TOLERANCE
        hits = llm.loop.scheduler.counts()["prefix_tokens_hit"]
        assert hits >= sum((len(one) - 1) // 4 * 4 for one in ids)
        cut = np.stack([reference.embedding(one, 7) for one in ids])
        assert np.abs(llm.embed(prompts, dimensions=7) - cut).max() < TOLERANCE
        plain = llm.embed(prompts[0], normalize=False)
        assert np.abs(plain - reference.states(ids[0])[-1]).max() < TOLERANCE * 10
        cosine = float(expected[0] @ expected[1])
        assert llm.score(prompts[0], prompts[1]) == pytest.approx([cosine], abs=TOLERANCE)
        llm.check_idle()


def test_the_mean_adds_up_over_chunks_without_the_cache(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "mean", {"pooling_mode": "mean"}, normalize=False)
    reference, prompts = Reference(folder, "Model"), texts(8)
    prompts += prompts[:3]
    expected = np.stack([reference.states(reference.ids(text)).mean(0) for text in prompts])
    with LLM(str(folder), **TIGHT) as llm:
        assert np.abs(llm.embed(prompts) - expected).max() < TOLERANCE
        assert np.abs(llm.embed(prompts, normalize=True) - [unit(one) for one in expected]).max() < TOLERANCE
        assert llm.loop.scheduler.counts()["prefix_tokens_hit"] == 0
        llm.check_idle()


def test_a_retracted_prompt_gets_its_vector(tmp_path: Path) -> None:
    """A step that finds too little memory is taken back, in the midst of prompts whose mean is being added up."""
    folder = save_embedder(tmp_path / "mean", {"pooling_mode": "mean"})
    reference, prompts = Reference(folder, "Model"), texts(6, seed=1)
    expected = np.stack([unit(reference.states(reference.ids(text)).mean(0)) for text in prompts])
    with LLM(str(folder), **TIGHT) as llm:
        engine: Any = llm._engine
        sample, steps = engine.sample, count()

        def fails_at_times(*args: Any) -> Any:
            pending = sample(*args)
            if next(steps) not in (2, 8):
                return pending

            def raises() -> Any:
                pending()
                raise DeviceOutOfMemory("too little")

            return raises

        engine.sample = fails_at_times
        assert np.abs(llm.embed(prompts) - expected).max() < TOLERANCE
        assert llm.retractions > 0
        llm.check_idle()


def test_a_vector_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    """JSON has no NaN, and a vector of nulls would only fail later, in the client's index."""
    folder = save_embedder(tmp_path / "damaged")
    spoil_token(folder, 5)
    with LLM(str(folder), **TIGHT) as llm:
        expected = llm.embed([[1, 2, 3]])
        good = list(range(10, 30))
        llm.embed([good])
        cached = llm.loop.scheduler.counts()["pages_cached"]
        with pytest.raises(RuntimeError, match="NaN or infinite"):
            llm.embed([[1, 2, 3], [4, 5, 6], [*good, 5, *good]])
        assert llm.loop.scheduler.counts()["pages_cached"] == cached, "those of the good prompt"
        assert np.array_equal(llm.embed([[1, 2, 3]]), expected)
        llm.check_idle()


def test_a_causal_reranker(causal: Path, tmp_path: Path) -> None:
    """The score is the probability of yes against no, in Qwen3-Reranker's form of prompt."""
    reference = Reference(causal, "ModelForCausalLM")
    no, yes = (reference.tokenizer.token_to_id(answer) for answer in ("no", "yes"))
    queries, documents = texts(3, seed=2), texts(3, seed=3)
    with LLM(str(causal), runner="pooling", convert="classify", **TIGHT) as llm:
        scores = llm.score(queries, documents)
        told = llm.score(queries[0], documents[:1], instruction="Find it")
        with pytest.raises(InvalidRequest, match="makes no embedding"):
            llm.embed("x")
        with pytest.raises(InvalidRequest, match="generates no text"):
            llm.generate("x", SamplingParams(max_tokens=1))
    form = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
        ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n'
        "<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    task = "Given a web search query, retrieve relevant passages that answer the query"

    def expected(*parts: str) -> float:
        ids = reference.tokenizer.encode(form.format(*parts), add_special_tokens=False).ids
        return float(reference.logits(ids)[[no, yes]].softmax(0)[1])

    pairs = zip(queries, documents, strict=True)
    assert scores == pytest.approx([expected(task, *pair) for pair in pairs], abs=TOLERANCE)
    assert told == pytest.approx([expected("Find it", queries[0], documents[0])], abs=TOLERANCE)


def test_a_generating_model_makes_no_vectors(causal: Path) -> None:
    with LLM(str(causal)) as llm, pytest.raises(InvalidRequest, match="--runner pooling"):
        llm.embed("x")


@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_match_transformers(labels: int, tmp_path: Path) -> None:
    """Probabilities of classes; of one class it scores pairs, which the tokenizer joins."""
    folder = save(tmp_path / "classifier", "ForSequenceClassification", num_labels=labels)
    reference, prompts = Reference(folder, "ModelForSequenceClassification"), texts(5)
    logits = [reference.logits(reference.ids(text)) for text in prompts]
    expected = np.stack([(one.softmax(0) if labels > 1 else one.sigmoid()).numpy() for one in logits])
    with LLM(str(folder), **TIGHT) as llm:
        assert np.abs(llm.classify(prompts) - expected).max() < TOLERANCE
        if labels == 1:
            pair = reference.tokenizer.encode("the query", "of it").ids
            score = float(reference.logits(pair).sigmoid()[0])
            assert llm.score("the query", "of it") == pytest.approx([score], abs=TOLERANCE)
        else:
            with pytest.raises(InvalidRequest, match="scores no pairs"):
                llm.score("a", "b")


def test_trained_weights_in_16_bits() -> None:
    """Within rounding of the same weights in 32 bits: a cosine above 0.9999."""
    reference = Reference(demo_folder(), "Model")
    with LLM("demo", runner="pooling", dtype="bfloat16") as llm:
        prompts = ["What is Minisgl?", "How many tokens has a page of the KV cache?", "word"]
        ids = [llm.tokenizer.encode(text).tolist() for text in prompts]
        expected = np.stack([reference.embedding(one) for one in ids])
        assert (llm.embed(prompts) * expected).sum(1).min() > 0.9999
