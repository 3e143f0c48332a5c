"""Decoders of transformers over the paged pool: their own modules, our attention, token for token."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.distributed import SingleRank
from minisgl.distributed.shared_memory import SharedMemoryTP
from minisgl.kernel.torch_ops import TorchOps
from minisgl.layers.linear import bind_weights
from minisgl.models.config.model_config import UnsupportedModel, WeightError
from minisgl.models.generic.linears import MergedLinear
from minisgl.models.generic.meta_run import check_sharding
from minisgl.models.generic.numeric_probe import GatedForm, NormForm, gated_form, norm_form
from minisgl.models.load_config import load_model_config
from minisgl.models.weights.loading import LoadOptions, build_model, load_model
from models.harness import Harness
from models.quantized import save_quantized
from models.tiny import FAMILIES, make_model

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
# Each brings what no family here has: LayerNorms and biases, learned positions, parallel blocks, a logit scale,
# windows, another experts' layout, and values that are smaller than keys.
KINDS: dict[str, dict[str, Any]] = {
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": 6},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {"rotary_pct": 0.25},
    "cohere": {"num_key_value_heads": 2, "logit_scale": 0.25},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "minicpm3": {
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "head_dim", "v_head_dim"), 8),
        "num_key_value_heads": 4,
    },
}
# transformers' plans gather outputs and divide heads after their norms, or divide the product of q, k and v.
DIVIDED: dict[str, dict[str, Any]] = {
    **{kind: KINDS[kind] for kind in ("starcoder2", "gpt_neox", "mixtral")},
    "olmo2": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2},
}
# Tiny models of our families that transformers' modules cannot compute here.
NOT_PAGED = ("phi3-longrope", "gemma4-parts", "qwen3-next", "qwen3.5", "qwen3.5-moe")
PROMPTS = [[3, 5, 7, 9, 11] * 4, [2, 4, 6], [*[3, 5, 7, 9, 11] * 4, 8, 4]]
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SMALL_PAGES: dict[str, Any] = {"tokenizer": "demo", "page_size": 4, "max_extend_tokens": 8}


def save(kind: str, folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **{**DIVIDED, **KINDS}.get(kind, {}), **changes})
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
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Tokens are the oracle's in one batch, in chunks, over pages with a shared prefix, and with logits of a prompt."""
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


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in NOT_PAGED])
def test_attention_is_what_our_families_read(kind: str, tmp_path: Path) -> None:
    """The calls of transformers' modules have the heads, scales, windows and sinks that config.json names."""
    model = make_model(kind)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    ours, theirs = (load_model_config(tmp_path, implementation=by) for by in ("auto", "transformers"))
    for have, want in zip(theirs.attentions, ours.attentions, strict=True):
        if want.latent is None:
            assert (have.num_heads, have.head_dim) == (want.num_heads, want.head_dim)
            assert have.num_kv_heads == want.num_kv_heads
        assert have.scale == pytest.approx(want.scale)
        assert (have.window, have.has_sinks) == (want.window, want.has_sinks)
    assert theirs.transformers is not None
    if ours.attention.rope.interleaved:  # our kernels rotate halves
        assert set(theirs.transformers.rotaries) == {None}


@pytest.mark.parametrize(("kind", "name"), [("llama", "modelopt"), ("llama", "gptq v2"), ("qwen3-moe", "fp8 blocks")])
def test_quantized_weights_are_dequantized(kind: str, name: str, tmp_path: Path) -> None:
    """transformers alone would take FP8 of an unknown method for values, and not read the other formats on a CPU."""
    quantized, plain = save_quantized(tmp_path, kind, name)
    tokens = PROMPTS[0]
    logits = []
    for folder in (quantized, plain):
        harness = Harness(by_transformers(folder), num_pages=20)
        logits.append(harness.step([(harness.add(tokens), len(tokens))], every_token=True))
    assert torch.equal(*logits)


def test_quantized_layers_after_the_last_one_are_left_out(tmp_path: Path) -> None:
    """Some checkpoints have a layer of multi-token prediction there. transformers knows its number for few models."""
    quantized, _ = save_quantized(tmp_path, "llama", "fp8 tensor")
    tensors = load_file(quantized / "model.safetensors")
    num_layers = json.loads((quantized / "config.json").read_text())["num_hidden_layers"]
    for name, tensor in load_file(quantized / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("layers.0", f"layers.{num_layers}")] = tensor.clone()
    save_file(tensors, quantized / "model.safetensors")
    by_transformers(quantized)


def test_quantized_weights_that_do_not_fit(tmp_path: Path) -> None:
    """FP8 weights that config.json does not describe, a bias of a model without one, and scales of a KV cache."""
    quantized, _ = save_quantized(tmp_path, "llama", "fp8 tensor")
    tensors = load_file(quantized / "model.safetensors")
    up = "model.layers.0.mlp.up_proj"
    save_file({**tensors, f"{up}.bias": torch.ones(320)}, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=rf"weights that the model does not use: {up}\.bias$"):
        by_transformers(quantized)
    save_file({**tensors, f"{up}.bias": torch.zeros(320)}, quantized / "model.safetensors")  # as AutoGPTQ writes it
    by_transformers(quantized)
    save_file({**tensors, "model.layers.0.self_attn.k_scale": torch.ones(1)}, quantized / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"--kv-cache-dtype fp8_e4m3: scales of LlamaForCausalLM's KV cache"):
        by_transformers(quantized, fp8_kv=True)
    by_transformers(quantized)
    changed = {name: tensor for name, tensor in tensors.items() if name != f"{up}.weight_scale"}
    save_file(changed, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{up}\.weight is stored as F8_E4M3, and config\.json does not say how"):
        by_transformers(quantized)
    save_file({**tensors, "model.norm.weight": torch.ones(191)}, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=r"norm\.weight has shape \[191\], but config\.json asks for \[192\]"):
        by_transformers(quantized)
    save_file(tensors, quantized / "model.safetensors")
    raw = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**raw, "quantization_config": None}))
    with pytest.raises(WeightError, match=r"\.weight_scale: config\.json has no quantization_config that says how"):
        by_transformers(quantized)
    scales = [name for name in tensors if name.endswith("weight_scale")]
    save_file({name: tensors[name] for name in tensors if name not in scales}, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=r"_proj\.weight is stored as F8_E4M3, and config\.json does not say how"):
        by_transformers(quantized)


def by_transformers(folder: Path, **options: Any) -> Any:
    config = load_model_config(folder, implementation="transformers")
    device = torch.device("cpu")
    return load_model(config, folder, LoadOptions(**options), tp=SingleRank(), dtype=torch.float32, device=device)


@pytest.mark.parametrize("kind", DIVIDED)
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    """Logits of a prefill, a chunk and a decode are transformers'; ranks are threads. No rank has all weights."""
    model = save(kind, tmp_path)
    config = load_model_config(tmp_path, implementation="transformers")
    config.check_tp(2)

    def logits_on(rank: int) -> tuple[torch.Tensor, int]:
        tp = SharedMemoryTP.connect(rank=rank, size=2, init_method=f"file://{tmp_path / 'meeting'}", timeout_s=60)
        with loading:  # transformers loads in one thread at a time
            ours = load_model(config, tmp_path, tp=tp, dtype=torch.float32, device=torch.device("cpu"))
        harness = Harness(ours, num_pages=20)
        a, b = harness.add(PROMPTS[0]), harness.add(PROMPTS[1])
        rows = [harness.step(plan) for plan in ([(a, 11), (b, 2)], [(b, 1), (a, 8)], [(a, 1)])]
        tp.close()
        return torch.cat(rows), sum(weight.numel() for weight in ours.parameters())

    loading = threading.Lock()
    with ThreadPoolExecutor(2) as threads:
        (logits, size), (others, _) = threads.map(logits_on, range(2))
    with torch.inference_mode():
        a, b = (model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS[:2])
    assert (logits - torch.stack([a[10], b[1], b[2], a[18], a[19]])).abs().max() < 1e-4
    assert torch.equal(others, logits)
    assert size < 0.75 * sum(weight.numel() for weight in model.parameters())  # a small model is half embeddings


def test_known_modules_are_replaced(tmp_path: Path) -> None:
    """A block of gate and up is one, q, k and v are a product, and what a probe finds to be another norm stays."""

    def parts(kind: str) -> Counter[str]:
        (tmp_path / kind).mkdir()
        save(kind, tmp_path / kind)
        model = build_model(
            load_model_config(tmp_path / kind, implementation="transformers"),
            tp=SingleRank(),
            dtype=torch.float32,
            device=torch.device("meta"),
        )
        return Counter(type(module).__name__ for module in model.modules())

    llama = parts("llama")
    assert (llama["ReplacementNorm"], llama["ReplacementGatedMLP"], llama["MergedPart"], llama["Linear"]) == (
        5,
        2,
        6,
        0,
    )
    assert parts("mixtral")["ReplacementExperts"] == 2
    cohere = parts("cohere")  # its norm has no attribute `eps`, and subtracts the mean
    assert (cohere["ReplacementNorm"], cohere["CohereLayerNorm"], cohere["ReplacementGatedMLP"]) == (0, 3, 2)


def test_norms_and_blocks_by_numbers() -> None:
    class Clamped(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x))

    class Flat(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).flatten()

    config = CONFIG_MAPPING["llama"](**SIZES)
    assert gated_form(LlamaMLP(config)) == GatedForm(("gate_proj", "up_proj"), "down_proj", "silu")
    assert gated_form(Clamped(config)) is None
    assert gated_form(Flat(config)) is None
    assert gated_form(Phi3MLP(CONFIG_MAPPING["phi3"](**SIZES))) == GatedForm(("gate_up_proj",), "down_proj", "silu")
    assert norm_form(LlamaRMSNorm(32, 1e-5)) == NormForm(1e-5, float32=False, unit_offset=False)
    assert norm_form(Gemma3RMSNorm(32, 1e-5)) == NormForm(1e-5, float32=True, unit_offset=True)
    assert norm_form(torch.nn.LayerNorm(32, bias=False)) is None


def test_layers_with_and_without_a_bias_are_one_product() -> None:
    layers = [torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(8, 6), torch.nn.Linear(8, 2, bias=False)]
    merged = MergedLinear(layers, "whole", SingleRank())
    bind_weights(merged, TorchOps())
    x = torch.randn(3, 8)
    with torch.inference_mode():
        parts = [merged.part(index, x) for index in range(3)]
        for part, layer in zip(parts, layers, strict=True):
            assert torch.allclose(part, layer(x), atol=1e-6)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("gemma2", {}, "softcap"),
        ("bloom", {}, "not exchangeable"),
        ("lfm2", {}, "cannot be probed"),
        ("deepseek_v32", {"num_hidden_layers": 2}, "cannot be probed"),  # its modules need masks themselves
        ("doge", {}, "makes its attention mask itself"),
        ("diffllama", {}, "attends twice"),
    ],
)
def test_models_that_cannot_be_paged_are_refused_by_name(
    kind: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[kind](**changes)
    config.architectures = ["OtherForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=why):
        load_model_config(tmp_path)


def test_a_mistral_with_layer_types_is_probed_as_the_ministral_that_transformers_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "sliding_window": 5}
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mistral"](**sizes))
    made.config.architectures = ["MistralForCausalLM"]
    made.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    types = ["sliding_attention", "full_attention"] * (raw["num_hidden_layers"] // 2)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "layer_types": types}))
    config = load_model_config(tmp_path, implementation="transformers")
    assert config.windows == (5, None) * (len(types) // 2)
    ours = load_model(config, tmp_path, tp=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert "2 rotations" in ours.describe(), "our kernels rotate"
    harness, prompt = Harness(ours), PROMPTS[0]
    logits = harness.step([(harness.add(prompt), len(prompt))])
    with torch.inference_mode():
        assert (logits[0] - theirs(torch.tensor([prompt])).logits[0, -1]).abs().max() < 1e-4


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_kv_heads_that_do_not_divide_the_heads_are_refused(kv_heads: int, tmp_path: Path) -> None:
    """Such as a family's default beside fewer heads."""
    config = CONFIG_MAPPING["starcoder2"](**SIZES, num_key_value_heads=kv_heads)
    config.architectures = ["Starcoder2ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"4 query heads are not a multiple of {kv_heads} KV heads"):
        load_model_config(tmp_path)


def test_a_model_that_is_no_causal_language_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """transformers' own error names hundreds of classes."""
    kind = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    (tmp_path / "config.json").write_text(json.dumps(kind))
    with pytest.raises(UnsupportedModel, match="transformers' modules: transformers has no causal language model of"):
        load_model_config(tmp_path)


def test_ropes_that_depend_on_the_longest_sequence_are_refused(tmp_path: Path) -> None:
    """A step's batch would choose the frequencies, and keys in the cache would have others."""
    save("starcoder2", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())

    def read(**rope: Any) -> int:
        (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_parameters": {**rope, "rope_theta": 10000.0}}))
        return load_model_config(tmp_path).max_position_embeddings

    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    assert read(**factors, original_max_position_embeddings=256) == 256  # never beyond the original length
    with pytest.raises(UnsupportedModel, match=r"max_position_embeddings is 256, original_max_position_embeddings 255"):
        read(**factors, original_max_position_embeddings=255)
    with pytest.raises(UnsupportedModel, match='rope type "dynamic" is not supported'):
        read(rope_type="dynamic", factor=2.0)


def test_other_refusals(tmp_path: Path) -> None:
    save("starcoder2", tmp_path)
    with pytest.raises(UnsupportedModel, match="Starcoder2ForCausalLM is not supported; known are"):
        load_model_config(tmp_path, implementation="minisgl")
    with pytest.raises(ConfigError, match=r"does not divide the model's attention heads \(4\)"):
        load_model_config(tmp_path).check_tp(3)
    with pytest.raises(ConfigError, match=r"key and value heads \(2\)"):
        load_model_config(tmp_path).check_tp(4)
    save("opt", tmp_path / "opt")
    with pytest.raises(ConfigError, match=r"--tp 2: .*, which has no plan to divide it"):
        load_model_config(tmp_path / "opt").check_tp(2)
    config = load_model_config(tmp_path)
    assert config.transformers is not None
    plan = tuple((name, style) for name, style in config.transformers.tp_plan if not name.endswith("o_proj"))
    whole = dataclasses.replace(config, transformers=dataclasses.replace(config.transformers, tp_plan=plan))
    with pytest.raises(UnsupportedModel, match="plan does not fit its modules"):
        check_sharding(whole, 2)
    with pytest.raises(ConfigError, match="--quantization int8"):
        LLM(str(tmp_path), "float32", quantization="int8", **SMALL_PAGES)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    with pytest.raises(WeightError, match=r"lacks model\.layers\.2"):
        LLM(str(tmp_path), "float32", **SMALL_PAGES)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 40}))
    with pytest.raises(WeightError, match=r"c_fc\.bias has shape \[48\], but config\.json asks for \[40\]"):
        LLM(str(tmp_path), "float32", **SMALL_PAGES)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").unlink()
    for content, why in ((b"", "EOFError$"), (b"version https://git-lfs", "Weights only load failed")):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(WeightError, match=f"transformers cannot load .*: {why}"):
            by_transformers(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "unheard_of"}))
    with pytest.raises(UnsupportedModel, match="transformers does not know the model_type 'unheard_of'"):
        load_model_config(tmp_path)
