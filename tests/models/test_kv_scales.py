"""Scales of an FP8 KV cache: applied to weights, they change what is stored by powers of two and no logit at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.layers.layer_config import AttentionConfig
from minisgl.models.config.model_config import UnsupportedModel, WeightError
from minisgl.models.load_config import parse_config
from minisgl.quantization.kv_scales import KVScales, read_kv_scales
from models.harness import Harness
from models.quantized import DYNAMIC_FP8, compressed, save_quantized
from models.test_logits import prompt
from models.test_model_tp import Rank
from models.test_model_weights import load
from models.test_quantization import InMemory
from models.tiny import make_model
from support.tiny_tokenizer import save_byte_tokenizer

KV_ALONE: dict[str, Any] = {  # weights as they are
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}
K_SCALE, V_SCALE = 0.3, 3.5  # rounded up to 1/2 and 4


def add_scales(folder: Path, *, k: float = K_SCALE, v: float = V_SCALE, config: dict[str, Any] | None = None) -> None:
    """Give each layer its scales, by different names, and the config its scheme."""
    tensors = load_file(folder / "model.safetensors")
    attentions = sorted({name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name})
    for layer, attention in enumerate(attentions):
        leaf = ("k_scale", "k_proj.k_scale", "k_proj.output_scale")[layer % 3]
        tensors |= {f"{attention}.self_attn.{leaf}": torch.tensor([k])}
        tensors |= {f"{attention}.self_attn.{leaf.replace('k_', 'v_')}": torch.tensor(v)}
        tensors |= {f"{attention}.self_attn.q_scale": torch.tensor(9.0)}  # queries are not rounded here
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))


@pytest.mark.parametrize("kind", ["llama-bias", "qwen3", "gemma3", "olmo2", "gpt-oss", "qwen3-next"])
def test_k_and_v_are_divided_and_logits_are_the_same(tmp_path: Path, kind: str) -> None:
    """With biases, norms of heads and of projections, norms of 1 + weight, sinks, gates; on a rank of two as well."""
    make_model(kind).save_pretrained(tmp_path)
    plain = load(tmp_path)
    add_scales(tmp_path, config=KV_ALONE)
    tokens = prompt(40)
    runs = []
    for model in (plain, load(tmp_path, fp8_kv=True), load(tmp_path)):
        harness = Harness(model)
        sequence = harness.add(tokens)
        steps = harness.step([(sequence, 39)], every_token=True), harness.step([(sequence, 1)])
        layers = [i for i, each in enumerate(model.config.layers) if isinstance(each.attention, AttentionConfig)]
        stored = [
            [half(layer)[sequence.pages] for layer in layers] for half in (harness.pool.keys, harness.pool.values)
        ]
        runs.append((torch.cat(steps), *stored))
    (logits, keys, values), (same, scaled_keys, scaled_values), (as_stored, keys_aside, _) = runs
    assert torch.equal(same, logits)
    assert torch.equal(as_stored, logits)
    for layer in range(len(keys)):
        assert torch.equal(scaled_keys[layer], keys[layer] * 2)
        assert torch.equal(scaled_values[layer], values[layer] / 4)
        assert torch.equal(keys_aside[layer], keys[layer])
    if kind == "llama-bias":
        half = load(tmp_path, fp8_kv=True, tp=Rank(1, 2)).model.layers[0].self_attn
        whole = load(tmp_path, tp=Rank(1, 2)).model.layers[0].self_attn
        assert torch.equal(half.o_proj.weight, whole.o_proj.weight * 4)
        assert torch.equal(half.o_proj.bias, whole.o_proj.bias)


def test_quantized_weights_have_them_in_their_scales(tmp_path: Path) -> None:
    folder, _ = save_quantized(tmp_path, "llama", "compressed fp8 channel")
    add_scales(folder, config=compressed("float-quantized", "float", 8, "channel", DYNAMIC_FP8))
    plain, scaled = (load(folder, fp8_kv=fp8, keeps=lambda *_: True).model.layers[1].self_attn for fp8 in (False, True))
    factors = torch.ones(8 * 24 + 2 * 4 * 24, 1)
    factors[: 8 * 24], factors[8 * 24 : 12 * 24], factors[12 * 24 :] = 0.5, 2.0, 0.25
    for name, factor in (("qkv_proj", factors), ("o_proj", 4.0)):
        have, want = getattr(scaled, name).levels, getattr(plain, name).levels
        assert torch.equal(have.codes, want.codes)
        assert torch.equal(have.scales, want.scales * factor)


def test_values_beyond_fp8_are_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Served: K and V a thousand times larger, with their scales, give the answers that they had before."""
    base, large = tmp_path / "base", tmp_path / "large"
    for folder in (base, large):
        make_model("llama").save_pretrained(folder)
        save_byte_tokenizer(folder, 99)
    tensors = load_file(large / "model.safetensors")
    for name, weight in tensors.items():
        factor = {"q_proj": 2.0**-12, "k_proj": 2.0**12, "v_proj": 2.0**12, "o_proj": 2.0**-12}
        weight.mul_(next((each for part, each in factor.items() if part in name), 1.0))
    save_file(tensors, large / "model.safetensors", {"format": "pt"})
    add_scales(large, k=4096.0, v=4000.0, config=KV_ALONE)
    answers = {}
    for folder in (base, large):
        with (
            caplog.at_level(logging.INFO, "minisgl"),
            LLM(str(folder), device="cpu", num_page_override=20, kv_cache_dtype="fp8_e4m3") as llm,
        ):
            found = llm.generate([prompt(30)], SamplingParams(max_tokens=12, ignore_eos=True))
            answers[folder] = found[0]["token_ids"]
    assert answers[large] == answers[base]
    assert "scales of the FP8 KV cache of 2 layers, 4096 to 4096" in caplog.text


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("k_scale", torch.ones(4), r"k_scale has shape \[4\], but one scale for all heads"),
        ("v_scale", torch.tensor(0.0), r"v_scale is 0, which is no scale"),
        ("kv_scale", torch.tensor(float("nan")), r"kv_scale is nan, which is no scale"),
    ],
)
def test_scales_that_are_none(name: str, scale: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_kv_scales({f"model.layers.0.self_attn.{name}": InMemory(scale, "F32")})


def test_two_scales_that_differ() -> None:
    module = "model.layers.0.self_attn"
    stored = {f"{module}.k_proj.k_scale": InMemory(torch.tensor(2.0), "F32")}
    for leaf, scale in (("attn.k_scale", 1.5), ("v_proj.v_scale", 8.0)):  # 1.5 is rounded up to 2
        stored[f"{module}.{leaf}"] = InMemory(torch.tensor(scale), "F32")
    assert read_kv_scales(stored) == {module: KVScales(2.0, 8.0)}
    stored[f"{module}.kv_scale"] = InMemory(torch.tensor(2.0), "F32")
    with pytest.raises(ValueError, match=r"\.kv_scale differs from another scale of the values in .*\.self_attn$"):
        read_kv_scales(stored)


def test_models_and_schemes_that_have_no_place_for_scales(tmp_path: Path) -> None:
    for kind, error, message in (
        ("phi3", WeightError, r"self_attn has scales of a KV cache, but no q_proj\.weight that could"),
        ("deepseek-v2", UnsupportedModel, "scales of DeepseekV2ForCausalLM's KV cache"),
        ("gemma4", UnsupportedModel, "scales of Gemma4ForCausalLM's KV cache"),
    ):
        folder = tmp_path / kind
        make_model(kind).save_pretrained(folder)
        add_scales(folder, config=KV_ALONE)
        with pytest.raises(error, match=f"--kv-cache-dtype fp8_e4m3: .*{message}"):
            load(folder, fp8_kv=True)
        load(folder)
    rounded = load(tmp_path / "phi3", quantization="fp8")  # scales of the KV cache do not exclude rounded weights
    assert rounded.config.quantization is not None
    scheme = {**KV_ALONE["kv_cache_scheme"], "strategy": "attn_head"}
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=r'kv_cache_scheme\.strategy "attn_head" is not supported'):
        parse_config({**raw, "quantization_config": {**KV_ALONE, "kv_cache_scheme": scheme}})
