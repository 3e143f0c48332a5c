"""Published quantized formats: every value exact, in every division among ranks, and refusals that name the field."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import SingleRank
from minisgl.kernel.torch_ops import TorchOps
from minisgl.layers.linear import Linear, RowParallelLinear, bind_weights
from minisgl.models.config.model_config import UnsupportedModel, WeightError
from minisgl.models.load_config import load_model_config, parse_config
from minisgl.models.weights import checkpoint
from minisgl.quantization.dequantize import find_quantized
from minisgl.quantization.random_levels import format_of
from minisgl.quantization.schemes import Mxfp4Weights, Quantization
from models.harness import Harness
from models.quantized import FORMATS, GROUP, compressed, save_quantized
from models.test_logits import assert_close, oracle, prompt
from models.test_model_tp import Rank
from models.test_model_weights import assert_same, load

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """format -> the folders of a model in it and of its values, made once."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            kind = "qwen3-moe" if name in ("fp8 blocks", "compressed int4") else "llama"
            made[name] = save_quantized(tmp_path_factory.mktemp("model"), kind, name)
        return made[name]

    return get


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_exact_on_any_rank(pair: Callable[[str], Pair], name: str) -> None:
    quantized, plain = pair(name)
    assert_same(load(quantized), load(plain))
    assert_same(load(quantized, dtype=torch.bfloat16), load(plain, dtype=torch.bfloat16))
    for size in (2, 4):
        for rank in range(size):
            assert_same(load(quantized, tp=Rank(rank, size)), load(plain, tp=Rank(rank, size)))


@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "gptq desc_act", "compressed int4 asymmetric"])
def test_a_few_rows_are_dequantized_at_a_time(
    pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However large a matrix is: no copy of all its values is made beside the parameter."""
    quantized, plain = pair(name)
    seen: list[int] = []

    def counted(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        seen.append(values.numel())
        return copy(target, values)

    copy = torch.Tensor.copy_
    monkeypatch.setattr(checkpoint, "_BLOCK", 2000)
    want = load(plain, tp=Rank(1, 2))
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    have = load(quantized, tp=Rank(1, 2))
    monkeypatch.undo()
    assert_same(have, want)
    assert sum(size <= 2000 for size in seen) > 100


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq desc_act"])
def test_logits_of_the_dequantized_checkpoint(pair: Callable[[str], Pair], name: str) -> None:
    from transformers import AutoModelForCausalLM

    quantized, plain = pair(name)
    tokens = prompt(40)
    theirs = oracle(AutoModelForCausalLM.from_pretrained(plain).eval(), tokens)
    harness = Harness(load(quantized))
    assert_close(harness.step([(harness.add(tokens), 40)], every_token=True), theirs)


@pytest.mark.parametrize("kind", ["phi3-partial", "glm"])
def test_q_k_v_in_one_matrix_and_rows_that_are_reordered(tmp_path: Path, kind: str) -> None:
    quantized, plain = save_quantized(tmp_path, kind, "fp8 blocks")
    for size in (1, 4):
        tp = SingleRank() if size == 1 else Rank(3, size)
        assert_same(load(quantized, tp=tp), load(plain, tp=tp))


class InMemory:
    """A stored tensor without a file."""

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), dtype

    def read(self, *index: slice) -> torch.Tensor:
        return self.tensor[index]


NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}


@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "gptq desc_act", "compressed int4 asymmetric"])
def test_parts_that_end_inside_words_groups_and_blocks(name: str) -> None:
    config, write = FORMATS[name]
    tensors, meant = write(np.random.default_rng(1), 96, 128)
    quantization = parse_config({**LLAMA, "quantization_config": config}).quantization
    assert quantization is not None
    stored = {f"up.{leaf}": InMemory(tensor, NAMES.get(tensor.dtype, "F32")) for leaf, tensor in tensors.items()}
    matrix = find_quantized(stored, quantization).matrices["up.weight"]
    assert matrix.shape == (96, 128)
    for rows in (slice(0, 96), slice(3, 5), slice(7, 50), slice(95, 96)):
        for columns in (slice(0, 128), slice(1, 2), slice(31, 97), slice(39, 41)):
            assert torch.equal(matrix.read(rows, columns), torch.from_numpy(meant[rows, columns]))


@pytest.mark.parametrize("name", FORMATS)
def test_levels_are_the_values(name: str) -> None:
    """A GPU keeps small numbers and scales of a matrix, for any rows and for columns that cut no group.

    Of groups that are not in order it takes all columns, and in another order.
    """
    config, write = FORMATS[name]
    tensors, meant = write(np.random.default_rng(1), 96, 256)
    quantization = parse_config({**LLAMA, "quantization_config": config}).quantization
    assert quantization is not None
    stored = {f"up.{leaf}": InMemory(tensor, NAMES.get(tensor.dtype, "F32")) for leaf, tensor in tensors.items()}
    matrix = find_quantized(stored, quantization).matrices["up.weight"]
    form = matrix.level_format(slice(0, 256))
    drawn = format_of(quantization.scheme_of("up"))  # of random weights in place of these
    assert form is None or drawn == replace(form, order=None)
    if form is None:
        assert matrix.level_format(slice(128, 256)) is None
        return
    for rows in (slice(0, 96), slice(3, 5)):
        for columns in (slice(0, 256), slice(128, 256)) if form.order is None else (slice(0, 256),):
            levels = matrix.levels(rows, columns)
            assert levels.format == matrix.level_format(columns) == form
            assert torch.equal(levels.dequantize(), matrix.read(rows, columns))
    assert torch.equal(matrix.levels(slice(0, 96), slice(0, 256)).dequantize(), torch.from_numpy(meant))
    assert form.group == 0 or matrix.level_format(slice(8, 256)) is None
    assert form.order is None or matrix.level_format(slice(128, 256)) is None
    assert (form.order is not None) == (name in ("gptq desc_act", "gptq v2"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stay_quantized_on_every_rank(pair: Callable[[str], Pair], dtype: torch.dtype) -> None:
    """Levels that products would read are those of the values, merged and divided as these are."""
    for name, kept in (("compressed fp8 channel", {1, 2, 4}), ("awq", {1, 2})):
        quantized, plain = pair(name)
        for size in (1, 2, 4):
            tp = SingleRank() if size == 1 else Rank(size - 1, size)
            model = load(quantized, tp=tp, dtype=dtype, keeps=lambda *_: True)
            divided = [module for module in model.modules() if isinstance(module, RowParallelLinear)]
            assert any(module.weight.is_meta for module in divided) == (size in kept)
            bind_weights(model, TorchOps())
            dense = load(plain, tp=tp, dtype=dtype)
            bind_weights(dense, TorchOps())
            for have, want in zip(model.modules(), dense.modules(), strict=True):
                if isinstance(have, Linear) and isinstance(want, Linear):
                    assert torch.equal(have.product.tensor, want.product.tensor)


def test_a_file_of_its_own_says_how_weights_are_stored(pair: Callable[[str], Pair], tmp_path: Path) -> None:
    """Older files of NVIDIA's Model Optimizer have hf_quant_config.json; their wildcards name what is left out."""
    quantized, plain = pair("modelopt")
    folder = changed(quantized, tmp_path, {})
    raw = json.loads((folder / "config.json").read_text())
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "model.layers.*.router"]}
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    assert_same(load(folder), load(plain))
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": None}))
    assert_same(load(folder), load(plain))
    quantization = load_model_config(folder).quantization
    assert quantization is not None
    assert quantization.scheme_of("model.layers.3.router") is None
    assert quantization.scheme_of("model.layers.3.mlp.up_proj") is not None
    (folder / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(UnsupportedModel, match=r'hf_quant_config\.json: quantization must be an object, not "FP8"'):
        load(folder)


def test_static_scales_of_activations(pair: Callable[[str], Pair], tmp_path: Path) -> None:
    """Products that round x have them, merged ones the largest; without the flag they make no difference."""
    quantized, _ = pair("fp8 tensor")
    layer = "model.layers.0"
    scales = {"self_attn.q_proj": 0.5, "self_attn.k_proj": 0.75, "self_attn.v_proj": 0.25, "mlp.down_proj": 2.0}
    changes = {f"{layer}.{name}.input_scale": torch.tensor([scale]) for name, scale in scales.items()}
    folder = changed(quantized, tmp_path, changes)
    for flag, expected in (
        (True, [(True, 0.75), (False, 0.0), (False, 0.0), (True, 2.0)]),
        (False, [(False, 0.0)] * 4),
    ):
        first = load(folder, keeps=lambda *_: True, fp8_activations=flag).model.layers[0]
        linears = first.self_attn.qkv_proj, first.self_attn.o_proj, first.mlp.gate_up_proj, first.mlp.down_proj
        forms = [linear.levels.format for linear in linears if linear.levels is not None]
        assert [(form.rounds_x, form.x_scale) for form in forms] == expected
    infinite = {name: torch.tensor([torch.inf]) for name in changes}
    for module in load(changed(quantized, tmp_path, infinite), keeps=lambda *_: True, fp8_activations=True).modules():
        assert not (isinstance(module, Linear) and module.levels is not None and module.levels.format.rounds_x)
    with pytest.raises(WeightError, match=r"down_proj: the input scale has shape \[2\]"):
        load(changed(quantized, tmp_path, {f"{layer}.mlp.down_proj.input_scale": torch.ones(2)}))


def test_mxfp4_as_transformers_reads_it() -> None:
    """gpt-oss's experts, against transformers' conversion and a table by hand."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 132, (3, 10, 4), dtype=torch.uint8, generator=generator)
    blocks[0, 0, 0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    scales[0, 0, 0] = 128
    stored = {"mlp.experts.up_blocks": InMemory(blocks, "U8"), "mlp.experts.up_scales": InMemory(scales, "U8")}
    found = find_quantized(stored, Quantization("mxfp4", (((), Mxfp4Weights()),)))
    assert found.used == set(stored)
    matrix = found.matrices["mlp.experts.up"]
    assert matrix.shape == (3, 128, 10)
    values = matrix.read(slice(0, 3), slice(0, 128), slice(0, 10))
    by_hand = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert values[0, :16, 0].tolist() == [*by_hand, *(-value for value in by_hand)]
    assert torch.equal(values, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    assert torch.equal(matrix.read(slice(1, 2), slice(33, 70), slice(3, 9)), values[1:2, 33:70, 3:9])


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def pack(**more: Any) -> dict[str, Any]:
    return {**compressed("pack-quantized", "int", 4, "group", group_size=GROUP), **more}


def weights(bits: int = 4, strategy: str = "group") -> dict[str, Any]:
    return compressed("pack-quantized", "int", bits, strategy, group_size=GROUP)


REFUSED: dict[str, tuple[Any, str]] = {
    "no method": ({"bits": 4}, "quant_method null is not supported; known are fp8, "),
    "no object": ([], "quantization_config must be an object, not []"),
    "method": ({"quant_method": "bitsandbytes"}, 'quant_method "bitsandbytes" is not supported; known are fp8, '),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, '(fp8): fmt "e5m2" is not supported'),
    "activations": ({"quant_method": "fp8", "activation_scheme": "wild"}, '(fp8): activation_scheme "wild"'),
    "optimizer": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        '(modelopt): quant_algo "NVFP4" is not supported',
    ),
    "block": ({"quant_method": "fp8", "weight_block_size": [128]}, "(fp8): weight_block_size [128] is not"),
    "empty block": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "(fp8): weight_block_size [0, 128] is not"),
    "modules": ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, 'modules_to_not_convert "lm_head"'),
    "awq bits": ({"quant_method": "awq", "bits": 3, "group_size": 128}, "(awq): bits 3 is not supported"),
    "awq gemv": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        '(awq): version "gemv" is not supported',
    ),
    "awq without zeros": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": False},
        "(awq): zero_point false",
    ),
    "gptq bits": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "(gptq): bits 3 is not supported"),
    "gptq groups": ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "(gptq): group_size 100 is not supported"),
    "marlin": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        '(gptq): checkpoint_format "marlin" is not supported',
    ),
    "bits by module": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*up_proj": {"bits": 8}}},
        "(gptq): dynamic ",
    ),
    "nvfp4": (pack(format="nvfp4-pack-quantized"), '(compressed-tensors): format "nvfp4-pack-quantized"'),
    "bits of a group": (weights(bits=3), "config_groups.group_0.weights.num_bits 3 is not supported"),
    "bits of integers": (
        compressed("int-quantized", "int", 4, "channel"),
        "group_0.weights.num_bits 4 is not supported",
    ),
    "bits of floats": (compressed("float-quantized", "float", 4, "tensor"), "group_0.weights.num_bits 4 is not"),
    "strategy": (weights(strategy="tensor_group"), 'config_groups.group_0.weights.strategy "tensor_group"'),
    "sparse": (pack(sparsity_config={"format": "sparse-24-bitmask"}), 'sparsity_config.format "sparse-24-bitmask"'),
    "rotations": (pack(transform_config={"config_groups": {"R1": {}}}), "transform_config "),
    "no groups": (pack(config_groups={}), "config_groups {} is not supported"),
    "4-bit activations": (
        compressed("int-quantized", "int", 8, "channel", {"num_bits": 4, "type": "int"}),
        "config_groups.group_0.input_activations.num_bits 4",
    ),
    "expression": (pack(ignore=["re:("]), 'ignore ["re:("] is not supported'),
    "a string": ("fp8", 'quantization_config must be an object, not "fp8"'),
    "marlin by the newer key": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "format": "marlin"},
        '(gptq): format "marlin" is not supported',
    ),
    "two formats": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq", "format": "gptq_v2"},
        '(gptq): format "gptq_v2" is not supported',
    ),
    "awq gemv by the newer key": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "format": "gemv"},
        '(awq): format "gemv" is not supported',
    ),
    "awq bits by module": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "dynamic": {"+:.*up_proj": {"bits": 8}}},
        "(awq): dynamic ",
    ),
    "no targets": (pack(config_groups={"a": {"targets": []}}), "config_groups.a.targets [] is not supported"),
    "no group size": (
        compressed("pack-quantized", "int", 4, "group"),
        "config_groups.group_0.weights.group_size null is not supported",
    ),
    "no block": (
        compressed("float-quantized", "float", 8, "block"),
        "config_groups.group_0.weights.block_structure null is not supported",
    ),
    "order": (
        compressed("pack-quantized", "int", 4, "group", group_size=GROUP, actorder="wild"),
        'config_groups.group_0.weights.actorder "wild" is not supported',
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_configs_are_refused_by_format_and_field(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        parse_config({**LLAMA, "quantization_config": config})
    assert message in str(error.value)


def test_modules_are_named_by_components_and_expressions() -> None:
    rules = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:.*mlp": {}}}
    config = {**rules, "modules_to_not_convert": ["lm_head", "layers.1.self_attn", "re:.*gate$"]}
    quantization = parse_config({**LLAMA, "text_config": {"quantization_config": config}}).quantization
    assert quantization is not None
    left_out = ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.0.gate", "model.layers.0.mlp.up_proj")
    assert [name for name in left_out if quantization.scheme_of(name)] == []
    assert quantization.scheme_of("model.layers.11.self_attn.gate_proj") is not None


def test_groups_of_compressed_tensors_by_target() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}},
        "b": {
            "targets": ["re:.*down_proj"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
    }
    quantization = parse_config({**LLAMA, "quantization_config": pack(config_groups=groups, ignore=[])}).quantization
    assert quantization is not None
    kinds = [type(quantization.scheme_of(f"layers.0.{name}")).__name__ for name in ("up_proj", "down_proj")]
    assert kinds == ["PackedWeights", "ScaledWeights"]


def test_targets_by_their_specificity() -> None:
    """A name goes before an expression, and an expression before a class, as in compressed-tensors."""
    groups = {
        name: {"targets": targets, "weights": {"num_bits": bits, "type": "int", "strategy": "channel"}}
        for name, targets, bits in (
            ("a", ["Linear"], 4),
            ("b", ["re:.*proj"], 8),
            ("c", ["layers.0.mlp.up_proj", "re:.*down_proj"], 2),
        )
    }
    for order in ("abc", "cba"):
        config = pack(config_groups={name: groups[name] for name in order}, ignore=[])
        quantization = parse_config({**LLAMA, "quantization_config": config}).quantization
        assert quantization is not None
        names = ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "layers.0.mlp.down_proj", "lm_head")
        kinds = [scheme.kind for name in names if (scheme := quantization.scheme_of(name))]
        assert kinds == ["int2", "int8", "int2", "int4"]


UP = "model.layers.0.mlp.up_proj"
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq", {f"{UP}.qzeros": None}, r"up_proj\.qzeros is not there"),
        ("awq", {f"{UP}.scales": torch.ones(5, 320)}, r"up_proj: scales has shape \[5, 320\], .* asks for \[6, 320\]"),
        ("fp8 tensor", {f"{UP}.weight_scale": None}, r"up_proj\.weight is stored as F8_E4M3, and config"),
        ("fp8 blocks of bf16", {f"{UP}.weight_scale_inv": torch.ones(3, 3)}, r"up_proj: the scale has shape \[3, 3\]"),
        ("gptq", {f"{UP}.g_idx": torch.full((192,), 6, dtype=torch.int32)}, r"g_idx does not .* 6 groups of 32"),
        ("gptq", {f"{UP}.g_idx": torch.zeros(192, dtype=torch.int32)}, r"up_proj.*g_idx does not divide"),
        ("gptq", {f"{UP}.g_idx": torch.zeros(191, dtype=torch.int32)}, r"up_proj: g_idx has shape \[191\]"),
        ("gptq", {f"{UP}.bias": torch.ones(320)}, r"does not use: .*up_proj\.bias$"),
        ("fp8 tensor", {"lm_head.weight_scale": torch.ones(1)}, r"lm_head: weight is stored as F32, but .* F8_E4M3"),
        ("compressed int8", {"lm_head.weight_scale": torch.ones(1)}, r"says that this module is not quantized"),
        ("gptq", {f"{UP}.qweight": torch.ones(9, dtype=torch.int32)}, r"up_proj: qweight has shape \[9\], .* a matrix"),
        ("gptq desc_act", {f"{UP}.g_idx": None}, r"up_proj\.g_idx is not there, but config\.json has desc_act true"),
        ("gptq", {f"{UP}.scales": torch.full((6, 320), NAN)}, r"up_proj\.weight: scales has a value .* not a number"),
        ("awq", {f"{UP}.scales": torch.full((6, 320), torch.inf)}, r"up_proj\.weight: scales has a value that is inf"),
        (
            "compressed packed int8",
            {f"{UP}.weight_scale": torch.full((320, 6), NAN)},
            r"weight_scale has a value that is",
        ),
        ("fbgemm", {f"{UP}.weight_scale": torch.full((320,), NAN)}, r"up_proj\.weight: the scale has a value that is"),
        ("fp8 tensor", {f"{UP}.weight_scale": torch.ones(1, dtype=torch.int32)}, r"weight_scale is stored as I32"),
        ("awq", {f"{UP}.scales": torch.ones(6, 320, dtype=torch.uint8)}, r"scales is stored as U8, but the format"),
        ("gptq", {f"{UP}.weight": torch.ones(320, 192)}, r"up_proj\.weight is there both as .*qweight and not"),
        ("compressed packed int8", {f"{UP}.weight_scale": torch.ones(320, 3)}, r"weight_scale has shape \[320, 3\]"),
        ("compressed int8", {f"{UP}.weight_zero_point": torch.ones(320, 1, dtype=torch.int8)}, r"calls .* symmetric"),
        ("compressed int4 asymmetric", {f"{UP}.weight_zero_point": None}, r"not there, but .* has symmetric false"),
        (
            "compressed int4 asymmetric",
            {f"{UP}.weight_zero_point": torch.ones(40, 6, dtype=torch.uint32)},
            r"weight_zero_point is stored as U32",
        ),
        (
            "compressed int4 asymmetric",
            {f"{UP}.weight_zero_point": torch.ones(39, 6, dtype=torch.int32)},
            r"weight_zero_point has shape \[39, 6\]",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_their_format(
    pair: Callable[[str], Pair], tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightError, match=message) as error:
        load(changed(pair(name)[0], tmp_path, changes))
    assert "\n" not in str(error.value)


def test_a_scale_that_is_no_number_is_refused_where_the_weight_stays_quantized(
    pair: Callable[[str], Pair], tmp_path: Path
) -> None:
    folder = changed(pair("fbgemm")[0], tmp_path, {f"{UP}.weight_scale": torch.full((320,), NAN)})
    with pytest.raises(WeightError, match=r"up_proj\.weight: the scale has a value that is"):
        load(folder, keeps=lambda *_: True)


def test_groups_in_another_order_have_their_index() -> None:
    """actorder group of older compressed-tensors."""
    config = compressed("pack-quantized", "int", 4, "group", group_size=GROUP, actorder="group")
    quantization = parse_config({**LLAMA, "quantization_config": config}).quantization
    assert quantization is not None
    tensors, _ = FORMATS["compressed int4"][1](np.random.default_rng(1), 96, 128)
    tensors["weight_scale"] = tensors["weight_scale"].half()
    stored = {f"up.{leaf}": InMemory(tensor, NAMES[tensor.dtype]) for leaf, tensor in tensors.items()}
    with pytest.raises(ValueError, match=r"up\.weight_g_idx is not there, but config\.json has actorder group"):
        find_quantized(stored, quantization)


@pytest.mark.parametrize(("name", "shape"), [("compressed int8", (192, 1)), ("compressed int4", (192, 6))])
def test_zero_points_of_symmetric_weights_are_zero(
    pair: Callable[[str], Pair], tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    """The first versions of compressed-tensors wrote them."""
    quantized, plain = pair(name)
    zeros = {"model.layers.0.self_attn.o_proj.weight_zero_point": torch.zeros(shape, dtype=torch.int8)}
    assert_same(load(changed(quantized, tmp_path, zeros)), load(plain))


def test_groups_that_stay_in_order_need_no_index(pair: Callable[[str], Pair], tmp_path: Path) -> None:
    """desc_act with static_groups changes the order in which columns are rounded alone."""
    quantized, plain = pair("gptq")
    indices = [name for name in load_file(quantized / "model.safetensors") if name.endswith("g_idx")]
    folder = changed(quantized, tmp_path, dict.fromkeys(indices))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"desc_act": false', '"desc_act": true, "static_groups": true'))
    assert_same(load(folder), load(plain))


def test_gptq_v2_by_the_newer_key(pair: Callable[[str], Pair], tmp_path: Path) -> None:
    """GPTQModel writes `format`; `checkpoint_format` is its older name."""
    quantized, plain = pair("gptq v2")
    folder = changed(quantized, tmp_path, {})
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"checkpoint_format"', '"format"'))
    assert_same(load(folder), load(plain))


def test_quantized_tensors_without_a_description(pair: Callable[[str], Pair], tmp_path: Path) -> None:
    folder = changed(pair("awq")[0], tmp_path, {})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": None}))
    with pytest.raises(WeightError, match=r"\.qweight: config\.json has no quantization_config that says how to read"):
        load(folder)


def test_dtypes_are_checked_before_anything_is_read(
    pair: Callable[[str], Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(pair("fp8 tensor")[0], tmp_path, {"model.layers.1.mlp.down_proj.weight_scale": None})
    monkeypatch.delattr(checkpoint.Checkpoint, "read_into")
    with pytest.raises(WeightError, match=r"down_proj\.weight is stored as F8_E4M3"):
        load(folder)


def changed(folder: Path, out: Path, changes: dict[str, Any]) -> Path:
    (out / "config.json").write_text((folder / "config.json").read_text())
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, out / "model.safetensors")
    return out


def test_scales_and_zero_biases_beside_the_weights_are_skipped(
    pair: Callable[[str], Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scales of activations, biases of zero as AutoGPTQ writes them, and scales of an 8-bit KV cache: a log line."""
    quantized, plain = pair("fp8 tensor")
    layer = "model.layers.0.self_attn"
    more = {f"{UP}.input_scale": torch.ones(1), f"{layer}.k_scale": torch.tensor(0.5), f"{UP}.bias": torch.zeros(320)}
    with caplog.at_level(logging.INFO, "minisgl"):
        assert_same(load(changed(quantized, tmp_path, {**more, f"{layer}.v_scale": torch.tensor(2.0)})), load(plain))
    assert "weights of fp8 are dequantized to float32" in caplog.text
    assert "activations stay in float32, where the format has static 8 bits" in caplog.text
    assert "the scales of an 8-bit KV cache are left aside: K and V have 16 bits" in caplog.text
