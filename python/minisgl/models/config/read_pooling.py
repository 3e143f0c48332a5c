"""Reads the pooling of a model's folder: the architecture's ending, and files of sentence-transformers. No torch.

`modules.json` lists the steps of a sentence-transformers model, each with a folder of its own: a Transformer, then
Pooling and Normalize (embeddings), or LogitScore (a causal reranker). What is not understood is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl.models.config.checkpoint_metadata import vocabulary_ids
from minisgl.models.config.config_reader import brief, read_json, read_object
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel
from minisgl.pooling.pooling_config import ClassActivation, Convert, PoolingConfig, PoolingMethod, Runner

CAUSAL, CLASSIFIER, HEADLESS = "ForCausalLM", "ForSequenceClassification", "Model"
_GENERATING = CAUSAL, "ForConditionalGeneration"
_ANSWERS = "no", "yes"  # answers of Qwen3-Reranker: "yes" means that the document is relevant
_METHODS: Mapping[str, PoolingMethod] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_ACTIVATIONS: Mapping[str, ClassActivation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}


def read_pooling(
    folder: Path, raw: Mapping[str, Any], model: ModelConfig, runner: Runner, convert: Convert
) -> PoolingConfig | None:
    """Return how the model of a folder pools prompts; None if it generates. Raises UnsupportedModel.

    `raw` is its config.json. "auto" pools if there is a modules.json or the architecture has no language model's head.
    """
    names = [str(name) for name in raw["architectures"]]
    name = next((name for name in names if name.endswith((*_GENERATING, CLASSIFIER, HEADLESS))), names[0])
    steps = _steps(folder)
    generates = not name.endswith((CLASSIFIER, HEADLESS)) or name.endswith("LMHeadModel")  # GPT2LMHeadModel
    if runner == "generate" or (runner == "auto" and not steps and generates):
        if not generates:
            raise UnsupportedModel(f"architecture {name} has no head that generates text: use --runner pooling")
        if convert != "auto":
            raise UnsupportedModel(f"--convert {convert} is for --runner pooling")
        return None
    classifies = name.endswith(CLASSIFIER) or "LogitScore" in steps
    if convert == "classify" or (convert == "auto" and classifies):
        return _classifier(folder, raw, model, name, steps)
    if name.endswith(CLASSIFIER):
        raise UnsupportedModel(f"--convert embed: {name} is a classifier")
    return _embedding(folder, model, steps)


def _embedding(folder: Path, model: ModelConfig, steps: Mapping[str, Path]) -> PoolingConfig:
    if others := steps.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedModel(f"modules.json has {min(others)}; known are Transformer, Pooling and Normalize")
    method: PoolingMethod = "last"
    if "Pooling" in steps:
        method = _method(read_object(steps["Pooling"] / "config.json"))
    sentences = read_object(folder / "sentence_bert_config.json")
    if sentences.get("do_lower_case"):
        raise UnsupportedModel("sentence_bert_config.json: do_lower_case is not supported")
    longest = sentences.get("max_seq_length")
    dimensions = read_object(folder / "config.json").get("matryoshka_dimensions")
    return PoolingConfig(
        makes="embedding",
        method=method,
        size=model.hidden_size,
        normalize=not steps or "Normalize" in steps,
        dimensions=tuple(dimensions) if isinstance(dimensions, list) else (),
        max_seq_len=longest if isinstance(longest, int) else None,
    )


def _method(pooling: Mapping[str, Any]) -> PoolingMethod:
    """Return the single pooling method; config.json names it, or, before version 6, has a flag for each method."""
    modes = pooling.get("pooling_mode")
    if modes is None:
        modes = [key.removeprefix("pooling_mode_") for key, on in pooling.items() if on is True and "mode_" in key]
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _METHODS:
        raise UnsupportedModel(f"pooling {brief(modes)} is not supported; known are the last token and the mean")
    method = _METHODS[modes[0]]
    if method == "mean" and pooling.get("include_prompt") is False:
        raise UnsupportedModel("pooling of the mean with include_prompt false is not supported")
    return method


def _classifier(
    folder: Path, raw: Mapping[str, Any], model: ModelConfig, name: str, steps: Mapping[str, Path]
) -> PoolingConfig:
    if name.endswith(CLASSIFIER):
        named = raw.get("id2label")
        labels = [str(label) for _, label in sorted(named.items(), key=lambda item: int(item[0]))] if named else []
        size = len(labels) or int(raw.get("num_labels") or 2)
        labels = labels or [f"LABEL_{index}" for index in range(size)]
        return PoolingConfig(
            makes="classes", method="last", size=size, labels=tuple(labels), activation=_activation(raw, size)
        )
    if not name.endswith(CAUSAL):
        raise UnsupportedModel(f"--convert classify: {name} has no head whose logits could be compared")
    if model.logits_softcap is not None or model.logits_scale != 1.0:
        raise UnsupportedModel(f"--convert classify is not supported for {name}, whose logits are scaled")
    return PoolingConfig(
        makes="classes",
        method="last",
        size=1,
        labels=("LABEL_0",),
        activation="sigmoid",
        answer_ids=_answer_ids(folder, raw, steps),
    )


def _activation(raw: Mapping[str, Any], size: int) -> ClassActivation:
    """Return the activation of the logits: the config's, or by default the one that gives probabilities."""
    inner = raw.get("sentence_transformers")
    wanted = inner.get("activation_fn") if isinstance(inner, dict) else raw.get("sbert_ce_default_activation_function")
    if wanted is not None:
        function = str(wanted).rpartition(".")[2]
        if function not in _ACTIVATIONS:
            raise UnsupportedModel(f"activation {brief(wanted)} is not supported; known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[function]
    if raw.get("problem_type") == "regression":
        return "identity"
    return "sigmoid" if size == 1 or raw.get("problem_type") == "multi_label_classification" else "softmax"


def _answer_ids(folder: Path, raw: Mapping[str, Any], steps: Mapping[str, Path]) -> tuple[int, ...]:
    """Return the ids of the tokens for no and yes: by id from LogitScore's config, or by text as in vLLM."""
    if "LogitScore" in steps:
        score = read_object(steps["LogitScore"] / "config.json")
        ids = [score.get("false_token_id"), score.get("true_token_id")]
        found = [one for one in ids if type(one) is int]
        if not found or type(ids[1]) is not int:
            raise UnsupportedModel(f"LogitScore: true_token_id must be a token id, not {brief(ids[1])}")
    else:
        texts = raw.get("classifier_from_token") or list(_ANSWERS)
        if not isinstance(texts, list) or len(texts) not in (1, 2) or not all(isinstance(text, str) for text in texts):
            raise UnsupportedModel(f"classifier_from_token must be one or two tokens, not {brief(texts)}")
        known = vocabulary_ids(folder, texts)
        if missing := [text for text in texts if text not in known]:
            raise UnsupportedModel(f"--convert classify: the tokenizer has no token {brief(missing[0])}")
        found = [known[text] for text in texts]
    if max(found) >= int(raw.get("vocab_size") or 0) or min(found) < 0:
        raise UnsupportedModel(f"token ids {found} are outside the model's vocabulary")
    return tuple(found)


def _steps(folder: Path) -> dict[str, Path]:
    """Return the class name and folder of each step in modules.json; nothing without that file."""
    if not (folder / "modules.json").is_file():
        return {}
    listed = read_json(folder / "modules.json")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise UnsupportedModel("modules.json must be a list of modules")
    found = {str(one.get("type")).rpartition(".")[2]: folder / str(one.get("path") or "") for one in listed}
    if not all(path.resolve().is_relative_to(folder.resolve()) for path in found.values()):
        raise UnsupportedModel("modules.json names a folder outside the model's")
    return found
