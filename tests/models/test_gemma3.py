"""Gemma 3's configs and checkpoints: as published, with a vision tower, and in transformers' old and new forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import SingleRank
from minisgl.layers.layer_config import LinearScaling, MLPConfig, NormNames, RopeConfig
from minisgl.models.config.model_config import UnsupportedModel, WeightError
from minisgl.models.load_config import load_model_config, parse_config
from minisgl.models.weights.loading import load_model
from models.harness import Harness

# The text part of gemma-3-4b-it as it is published: what it leaves out are transformers' defaults.
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
}
NAMES_OF_4 = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NAMES_OF_5 = {"model.": "model.language_model.", "lm_head.": "lm_head."}


def test_a_published_config() -> None:
    config = parse_config(GEMMA_3_4B)
    assert (config.vocab_size, config.num_layers, config.dtype) == (262_208, 34, "bfloat16")
    assert config.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    window, full = config.layers[0].attention, config.layers[5].attention
    assert window.rope == RopeConfig(10_000.0)
    assert full.rope == RopeConfig(1_000_000.0, LinearScaling(8.0))
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.scale) == (8, 4, 256, 1 / 16)
    assert full.qk_norm == "head"
    assert config.layers[0].mlp == MLPConfig(10240, activation="gelu_tanh")
    assert config.layers[0].norms == NormNames(
        "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    )
    assert config.tie_word_embeddings
    assert config.norm.unit_offset
    assert config.embedding_scale == 2560**0.5
    assert config.eos_token_ids == (1, 106)


def test_transformers_reads_and_writes_the_same(tmp_path: Path) -> None:
    import transformers

    transformers.Gemma3Config.from_dict(GEMMA_3_4B).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in raw["text_config"]
    assert parse_config(raw | {"architectures": GEMMA_3_4B["architectures"]}) == parse_config(GEMMA_3_4B)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
        ({"hidden_activation": "relu"}, 'hidden_activation "relu" is not supported'),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 34"),
        ({"rope_parameters": {"full_attention": 3}, "rope_scaling": None}, "an object for each layer type"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(GEMMA_3_4B | {"text_config": GEMMA_3_4B["text_config"] | change})


@pytest.mark.parametrize("names", [NAMES_OF_4, NAMES_OF_5], ids=["transformers 4", "transformers 5"])
def test_a_checkpoint_with_a_vision_tower_is_served_as_text(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path, names: dict[str, str]
) -> None:
    theirs, folder = saved("gemma3")
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": raw, "dtype": raw["dtype"]})
    )
    tensors = {"vision_tower.vision_model.post_layernorm.weight": torch.ones(3)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        ours = next(prefix for prefix in names if name.startswith(prefix))
        tensors[names[ours] + name.removeprefix(ours)] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(
        load_model_config(tmp_path), tmp_path, tp=SingleRank(), dtype=torch.float32, device=torch.device("cpu")
    )
    harness, tokens = Harness(model), [5, 17, 3, 190, 44]
    logits = harness.step([(harness.add(tokens), 5)], every_token=True)
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    assert (logits - want).abs().max() < 1e-4 * want.abs().max()
    save_file({**tensors, "audio_tower.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"does not use: audio_tower\.weight"):
        load_model(model.config, tmp_path, tp=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))
