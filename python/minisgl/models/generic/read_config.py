"""Reads the config.json of an architecture that no family here knows, by transformers and a model without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minisgl.error_text import in_one_line
from minisgl.layers.layer_config import LayerConfig, MLPConfig, NormConfig
from minisgl.models.config.config_reader import ConfigReader
from minisgl.models.config.model_config import ModelConfig, TransformersModules, UnsupportedModel


def read_generic(architecture: str, raw: Mapping[str, Any]) -> ModelConfig:
    """Return the model as transformers has it; its layers' attention is what its modules ask for. UnsupportedModel."""
    from minisgl.models.generic.model_probe import hf_config, make_empty, probe
    from minisgl.models.generic.sharding import divided_sizes, missing_style

    content = json.dumps(raw)
    try:
        text = hf_config(content).get_text_config(decoder=True)
        _check_ropes(text)
        model = make_empty(content)
        found, merged = probe(model)
    except UnsupportedModel:
        raise
    except Exception as error:  # from any config or module of transformers
        raise UnsupportedModel(f"{type(error).__name__}: {in_one_line(error)}") from error
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        raise UnsupportedModel("config.json does not tell the context length (max_position_embeddings)")
    kv_heads = {name: config.num_kv_heads for name, config in zip(found.names, found.configs, strict=True)}
    return ModelConfig(
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        # Only transformers knows the blocks after attention.
        layers=tuple(LayerConfig(attention, MLPConfig(0)) for attention in found.configs),
        norm=NormConfig(eps=1e-6),
        max_position_embeddings=positions,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        dtype=ConfigReader(raw).dtype(),
        initializer_range=float(getattr(text, "initializer_range", 0.02)),
        transformers=TransformersModules(
            content,
            tuple(found.names),
            tuple(found.rotaries),
            merged,
            tp_plan=tuple(model._tp_plan.items()),
            tp_missing=missing_style(model._tp_plan),
            tp_sizes=tuple(dict.fromkeys(divided_sizes(model, model._tp_plan, kv_heads))),
        ),
    )


def _check_ropes(text: Any) -> None:
    """Raise UnsupportedModel for frequencies that depend on the longest sequence of a step.

    A token's would change with the batch, and cached keys would have been rotated by others.
    """
    parameters, positions = getattr(text, "rope_parameters", None) or {}, getattr(text, "max_position_embeddings", 0)
    for rope in (parameters, *parameters.values()):  # one for all layers, or one for each type of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "dynamic":
            raise UnsupportedModel('rope type "dynamic" is not supported: it depends on the longest sequence')
        if kind == "longrope" and positions > (original := rope.get("original_max_position_embeddings", positions)):
            raise UnsupportedModel(
                'rope type "longrope" is not supported beyond the original length: max_position_embeddings is '
                f"{positions}, original_max_position_embeddings {original}"
            )
