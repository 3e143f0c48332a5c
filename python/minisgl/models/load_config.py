"""Reads a model's folder: config.json and the files that add to it. No torch.

What a config asks for and its family does not know is refused by name. Keys that do not change the result are ignored.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig
from minisgl.config.engine import ModelImplementation
from minisgl.models.config.checkpoint_metadata import checkpoint_dtype, tokenizer_eos
from minisgl.models.config.config_reader import ConfigReader, brief, read_object
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel
from minisgl.models.config.quantization_config import described_quantization, optimizer_config, read_quantization
from minisgl.models.config.read_pooling import CAUSAL, CLASSIFIER, HEADLESS, read_pooling
from minisgl.models.families import deepseek, gemma3, gemma4, glm4_moe, gpt_oss, llama, qwen3_next
from minisgl.models.generic.read_config import read_generic
from minisgl.pooling.pooling_config import Convert, PoolingConfig, Runner

# Architecture -> the function that reads its config.json. A family is one file in `families/`, and one line here.
FAMILIES: Mapping[str, Callable[[str, ConfigReader], ModelConfig]] = {
    **dict.fromkeys(llama.VARIANTS, llama.read_llama),
    **dict.fromkeys(llama.MULTIMODAL, llama.read_multimodal),
    **dict.fromkeys(gemma3.ARCHITECTURES, gemma3.read_gemma3),
    **dict.fromkeys(gemma4.ARCHITECTURES, gemma4.read_gemma4),
    **dict.fromkeys(gpt_oss.ARCHITECTURES, gpt_oss.read_gpt_oss),
    **dict.fromkeys(qwen3_next.ARCHITECTURES, qwen3_next.read_qwen3_next),
    **dict.fromkeys(glm4_moe.ARCHITECTURES, glm4_moe.read_glm4_moe),
    **dict.fromkeys(deepseek.ARCHITECTURES, deepseek.read_deepseek),
}

_ENCODERS = re.compile("bert|electra|mpnet|xlnet|longformer|t5|gtemodel|newmodel|bidirec", re.IGNORECASE)


def load_engine_model(folder: Path, config: EngineConfig) -> ModelConfig:
    """Read a folder's model as an engine's ranks hold it. Raises UnsupportedModel."""
    model = load_model_config(folder, config.runner, config.convert, config.model_impl)
    if config.expert_parallel:
        model = model.with_whole_experts()
    model.check_tp(config.tp_size)
    return model


def load_model_config(
    folder: Path,
    runner: Runner = "auto",
    convert: Convert = "auto",
    implementation: ModelImplementation = "auto",
) -> ModelConfig:
    """Read config.json and, if they are there, what other files add to it. Raises UnsupportedModel.

    `runner` and `convert` say if the model generates or pools, `implementation` who computes it, as in `EngineConfig`.
    """
    if not folder.is_dir():
        raise UnsupportedModel(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} has no config.json{_other_kind(folder)}")
    raw = read_object(folder / "config.json")
    if not (raw.get("dtype") or raw.get("torch_dtype")):
        raw = {**raw, "dtype": checkpoint_dtype(folder)}
    optimizer = folder / "hf_quant_config.json"
    if optimizer.is_file() and described_quantization(raw) is None:  # older files of NVIDIA's Model Optimizer
        raw = {**raw, "quantization_config": optimizer_config(read_object(optimizer))}
    generation = read_object(folder / "generation_config.json")
    model = parse_config(raw, generation, tokenizer_eos(folder), implementation)
    pooling = read_pooling(folder, raw, model, runner, convert)
    if pooling is not None and model.transformers is not None:
        raise UnsupportedModel(f"{model.architecture} is computed by transformers, which pools nothing here")
    return model if pooling is None else _pooling_model(model, pooling)


def _other_kind(folder: Path) -> str:
    """Return what a folder without config.json holds, if that is known, with what to do."""
    if (folder / "adapter_config.json").is_file():
        return ": it is a LoRA adapter; merge it into the weights of its model"
    if any(folder.glob("*.gguf")):
        return ": GGUF is not supported; take the safetensors that it was made from"
    return ""


def _pooling_model(model: ModelConfig, pooling: PoolingConfig) -> ModelConfig:
    """Return the model without a language model's head. Its checkpoint may name the decoder's tensors without a prefix.

    No prompt is longer than what it was made for.
    """
    bare = tuple((name, f"model.{name}") for name in ("embed_tokens", "layers.", "norm.", "per_layer_"))
    reads_head = pooling.is_causal_reranker and not model.tie_word_embeddings
    names = dataclasses.replace(
        model.checkpoint,
        renamed=(*model.checkpoint.renamed, *bare),
        ignored=(*model.checkpoint.ignored, *(() if reads_head else ("lm_head.",))),
    )
    longest = min(model.max_position_embeddings, pooling.max_seq_len or model.max_position_embeddings)
    return dataclasses.replace(model, checkpoint=names, pooling=pooling, max_position_embeddings=longest)


def parse_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    eos_of_tokenizer: int | None = None,
    implementation: ModelImplementation = "auto",
) -> ModelConfig:
    """Read the two files' contents and the tokenizer's eos_token, with the keys of transformers 4 or 5."""
    quantization = read_quantization(raw)
    config = _read_architecture(raw, implementation)
    if config.transformers is None and _disagrees_on_tying(raw):
        config = dataclasses.replace(config, tie_word_embeddings=None)
    eos = _eos_token_ids(raw, generation or {}, eos_of_tokenizer)
    # Ids beyond the vocabulary, which some tokenizers have, are never generated; -1 means that there is none.
    known = dict.fromkeys(token for token in eos if 0 <= token < config.vocab_size)
    return dataclasses.replace(config, eos_token_ids=tuple(known), quantization=quantization)


def _read_architecture(raw: Mapping[str, Any], implementation: ModelImplementation) -> ModelConfig:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise UnsupportedModel("config.json names no architecture (key architectures)")
    for name in map(str, names):
        for ending in ("", CLASSIFIER, HEADLESS):
            # Text models of families with vision towers are named Gemma3TextModel, but Gemma3ForCausalLM.
            family = name if not ending else name.removesuffix(ending).removesuffix("Text") + CAUSAL
            if name.endswith(ending) and family in FAMILIES and implementation != "transformers":
                return FAMILIES[family](family, ConfigReader(raw))
    if any(_ENCODERS.search(str(name)) for name in names):
        raise UnsupportedModel(
            f"architecture {', '.join(map(str, names))} is a bidirectional encoder, which is not supported: embeddings "
            "and scores are served of causal models, such as Qwen3-Embedding and Qwen3-Reranker"
        )
    architecture, known = ", ".join(map(str, names)), ", ".join(sorted(FAMILIES))
    if implementation == "minisgl":
        raise UnsupportedModel(f"architecture {architecture} is not supported; known are {known}")
    try:
        return read_generic(architecture, raw)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"architecture {architecture} is not supported, nor by transformers' modules: {error}; known are {known}"
        ) from error


def _disagrees_on_tying(raw: Mapping[str, Any]) -> bool:
    """Return True if only one of a multimodal config's two objects ties the head to the embedding.

    The other may have said nothing until transformers 5 saved it with a default.
    """
    inner = raw.get("text_config")
    said = [one.get("tie_word_embeddings") for one in (raw, inner) if isinstance(one, Mapping)]
    return True in said and False in said


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], eos_of_tokenizer: int | None) -> list[int]:
    """Return all ids that end an answer in any of the files, as vLLM and SGLang do."""
    ids: list[int] = []
    for source in (raw, raw.get("text_config"), generation, {"eos_token_id": eos_of_tokenizer}):
        value = source.get("eos_token_id") if isinstance(source, Mapping) else None
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if type(item) is not int:
                raise UnsupportedModel(f"eos_token_id must be a token id or a list of them, not {brief(value)}")
            ids.append(item)
    return ids
