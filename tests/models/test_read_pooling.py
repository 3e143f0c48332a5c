"""Pooling as config.json and sentence-transformers' files ask for it; other poolings are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config
from minisgl.pooling.pooling_config import PoolingConfig
from minisgl.pooling.vectors import check_dimensions
from minisgl.sampling_params import InvalidRequest

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
GRANITE = {"architectures": ["GraniteModel"], "logits_scaling": 8.0}
GENERIC = {"model_type": "starcoder2", "tie_word_embeddings": True}
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}


def folder(path: Path, steps: dict[str, Any] | None = None, vocab: tuple[str, ...] = (), **changes: Any) -> Path:
    """A model's folder; `steps`: classes of sentence-transformers, each with its config."""
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    vocabulary = {word: index for index, word in enumerate(vocab)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    for name, config in (steps or {}).items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    if steps is not None:
        modules = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in steps]
        (path / "modules.json").write_text(json.dumps(modules))
    return path


def pooling(path: Path, *args: Any) -> PoolingConfig:
    found = load_model_config(path, *args).pooling
    assert found is not None
    return found


def test_pooling_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    for name in ("causal", "headless", "sentences", "unit", "classes"):
        (tmp_path / name).mkdir()
    for names in (["Qwen3ForCausalLM"], ["Qwen3Reader", "Qwen3ForCausalLM"]):
        assert load_model_config(folder(tmp_path / "causal", architectures=names)).pooling is None
    headless = pooling(folder(tmp_path / "headless", architectures=["Qwen3Model"]))
    assert (headless.makes, headless.method, headless.normalize, headless.size) == ("embedding", "last", True, 32)
    last = {**LAST, "include_prompt": False}  # only a mean depends on it
    sentences = folder(tmp_path / "sentences", {"Transformer": {}, "Pooling": last}, matryoshka_dimensions=[8, 16])
    (sentences / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert (pooling(sentences).normalize, pooling(sentences).dimensions) == (False, (8, 16))
    assert pooling(folder(tmp_path / "unit", {"Transformer": {}, "Pooling": LAST, "Normalize": {}})).normalize
    for dimensions in (None, 8, 16, 32):
        check_dimensions(dimensions, pooling(sentences))
    with pytest.raises(InvalidRequest, match="must be one of 8, 16 for this model, not 9"):
        check_dimensions(9, pooling(sentences))
    assert load_model_config(sentences).max_position_embeddings == 100
    assert load_model_config(sentences, "generate").pooling is None
    labels = {"1": "good", "0": "bad"}
    classes = folder(tmp_path / "classes", architectures=["Qwen3ForSequenceClassification"], id2label=labels)
    assert (pooling(classes).labels, pooling(classes).activation) == (("bad", "good"), "softmax")


@pytest.mark.parametrize(
    "changes",
    [
        GRANITE,  # its logits are scaled, its states are not
        {"architectures": ["Gemma3TextModel"], "head_dim": 16, "num_key_value_heads": 2},  # not Gemma3Model
    ],
)
def test_embeddings_of_other_families(changes: dict[str, Any], tmp_path: Path) -> None:
    assert pooling(folder(tmp_path, **changes)).makes == "embedding"


def test_a_language_model_of_an_older_name_generates(tmp_path: Path) -> None:
    names = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    for runner in ("auto", "generate"):
        assert load_model_config(folder(tmp_path, **names), runner).pooling is None


def test_causal_rerankers(tmp_path: Path) -> None:
    """The two answers are named by words as in vLLM, or by the ids of LogitScore."""
    (tmp_path / "words").mkdir()
    (tmp_path / "score").mkdir()
    words = folder(tmp_path / "words", vocab=("a", "yes", "no"))
    assert pooling(words, "pooling", "classify").answer_ids == (2, 1)
    score = {"true_token_id": 7, "false_token_id": 9}
    found = pooling(folder(tmp_path / "score", {"Transformer": {}, "LogitScore": score}))
    assert (found.answer_ids, found.is_reranker, found.activation) == ((9, 7), True, "sigmoid")


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"architectures": ["BertModel"]}, (), "BertModel is a bidirectional encoder"),
    ({"architectures": ["XLMRobertaForSequenceClassification"]}, (), "is a bidirectional encoder"),
    ({"architectures": ["Qwen3Model"], "is_causal": False}, (), "is_causal"),
    ({"architectures": ["Qwen3Model"], "use_bidirectional_attention": True}, (), "use_bidirectional_attention"),
    ({"architectures": ["Qwen3Model"]}, ("generate",), "Qwen3Model has no head that generates"),
    ({"architectures": ["Qwen3Model"]}, ("pooling", "classify"), "Qwen3Model has no head whose logits"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, ("auto", "embed"), "is a classifier"),
    ({**GRANITE, "architectures": ["GraniteForCausalLM"]}, ("pooling", "classify"), "whose logits are scaled"),
    ({**GENERIC, "architectures": ["Starcoder2Model"]}, (), "Starcoder2Model is computed by transformers"),
    ({}, ("auto", "classify"), "--convert classify is for --runner pooling"),
    ({}, ("pooling", "classify"), 'no token "no"'),
    ({"steps": {"Transformer": {}, "Pooling": {"pooling_mode": "cls"}}}, (), r'pooling \["cls"\] is not supported'),
    ({"steps": {"Transformer": {}, "Pooling": {**LAST, "pooling_mode_mean_tokens": True}}}, (), "is not supported"),
    ({"steps": {"Pooling": {"pooling_mode": "mean", "include_prompt": False}}}, (), "include_prompt false"),
    ({"steps": {"Transformer": {}, "Pooling": LAST, "Dense": {}}}, (), "modules.json has Dense"),
    ({"steps": {"../outside": {}}}, (), "outside the model's"),
    ({"steps": {"LogitScore": {"true_token_id": 50}}}, (), "outside the model's vocabulary"),
]


@pytest.mark.parametrize(("changes", "args", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_unsupported_pooling_is_refused(
    changes: dict[str, Any], args: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UnsupportedModel, match=message):
        load_model_config(folder(tmp_path / "model", **changes), *args)
