"""Decoders of transformers over the paged pool: their own modules, our attention, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.models.config.load_config import load_model_config
from minisgl.models.config.model_config import UnsupportedModel, WeightError
from models.tiny import make_model

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Each brings what no family here has: LayerNorms and biases, learned positions, parallel blocks, a logit scale, windows
# and another experts' layout.
KINDS: dict[str, dict[str, Any]] = {
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": 6},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {"rotary_pct": 0.25},
    "cohere": {"num_key_value_heads": 2, "logit_scale": 0.25},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}
PROMPTS = [[3, 5, 7, 9, 11] * 4, [2, 4, 6], [*[3, 5, 7, 9, 11] * 4, 8, 4]]
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SMALL_PAGES: dict[str, Any] = {"tokenizer": "demo", "page_size": 4, "max_extend_tokens": 8}


def save(kind: str, folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **KINDS.get(kind, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def assert_best(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Each token must be the best one of transformers' forward over the whole sequence, but for rounding."""
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])
        assert float((logits.max(1, keepdim=True).values - chosen).max()) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_tokens(kind: str, tmp_path: Path) -> None:
    """In one batch, in chunks, over pages with a shared prefix, and with logits of a prompt."""
    model = save(kind, tmp_path)
    with LLM(str(tmp_path), "float32", **SMALL_PAGES) as llm:
        answers = [answer["token_ids"] for answer in llm.generate(PROMPTS, PARAMS)]
        again = llm.generate([PROMPTS[2]], PARAMS)[0]
        scored = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    assert again["cached_tokens"] >= 16
    assert_best(model, [*PROMPTS, PROMPTS[2]], [*answers, again["token_ids"]])
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0].log_softmax(-1)
    ours = [position.chosen.logprob for position in scored["prompt_logprobs"]]
    wanted = [float(row[token]) for row, token in zip(expected, PROMPTS[0][1:], strict=False)]
    assert ours == pytest.approx(wanted, abs=1e-4)


def test_a_family_of_ours_by_transformers(tmp_path: Path) -> None:
    model = make_model("gemma3")
    model.save_pretrained(tmp_path)
    prompts = [[3, 5, 7, 9, 11] * 4, [2, 4, 6]]
    with LLM(str(tmp_path), "float32", model_impl="transformers", **SMALL_PAGES) as llm:
        answers = [answer["token_ids"] for answer in llm.generate(prompts, PARAMS)]
    assert_best(model, prompts, answers)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma2", "softcap"),
        ("bloom", "not exchangeable"),
        ("lfm2", "cannot be probed"),
    ],
)
def test_what_cannot_be_paged_is_refused_by_name(kind: str, why: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind]()
    config.architectures = ["OtherForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=why):
        load_model_config(tmp_path)


def test_other_refusals(tmp_path: Path) -> None:
    save("starcoder2", tmp_path)
    with pytest.raises(UnsupportedModel, match="Starcoder2ForCausalLM is not supported; known are"):
        load_model_config(tmp_path, implementation="minisgl")
    with pytest.raises(ConfigError, match="on one rank alone"):
        load_model_config(tmp_path).check_tp(2)
    with pytest.raises(ConfigError, match="--quantization int8"):
        LLM(str(tmp_path), "float32", quantization="int8", **SMALL_PAGES)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    with pytest.raises(WeightError, match=r"lacks model\.layers\.2"):
        LLM(str(tmp_path), "float32", **SMALL_PAGES)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 16}  # whose package is not among ours
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": awq}))
    with pytest.raises(WeightError, match="transformers cannot load"):
        LLM(str(tmp_path), "float32", **SMALL_PAGES)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "unheard_of"}))
    with pytest.raises(UnsupportedModel, match="transformers does not know the model_type 'unheard_of'"):
        load_model_config(tmp_path)
