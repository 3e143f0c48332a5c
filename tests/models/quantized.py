"""Writers of quantized checkpoints, in numpy and from the formats' descriptions, with the values that they mean."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from models.tiny import make_model

Values = np.ndarray[Any, np.dtype[Any]]
Written = tuple[dict[str, torch.Tensor], Values]  # tensors by the last component of their name, float32 [out, in]
Writer = Callable[[np.random.Generator, int, int], Written]

GROUP = 32
BLOCK = (48, 40)  # that divides nothing
# 8 heads for 4 ranks; 320 / 4 columns end inside a group, 192 / 4 inside a block.
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
}


def e4m3(bits: Values) -> Values:
    """Values of FP8 e4m3 without infinities: a sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = bits >> 7, (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7))
    return np.where(sign == 1, -size, size)


def words(values: Values, bits: int) -> torch.Tensor:
    """[rows, n] unsigned -> int32 [rows, n * bits / 32], the first values in the lowest bits; rows are padded."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint64)
    packed = sum(padded[:, place::per_word] << np.uint64(bits * place) for place in range(per_word))
    return torch.from_numpy(np.asarray(packed).astype(np.uint32).view(np.int32))


def scales_of(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.001, 0.02, shape)).to(torch.float16)


def wide(scales: torch.Tensor) -> Values:
    return scales.double().numpy()


def fp8(name: str, block: tuple[int, int] | None, dtype: torch.dtype = torch.float32) -> Writer:
    """`block` of (0, 0): a scale for all; None: one a row."""

    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        bits = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        bits[bits & 127 == 127] = 0  # not a number
        if block == (0, 0):
            scale = torch.tensor(0.00123)
            each = np.full((rows, columns), scale.double().item())
        elif block is None:
            scale = (scales_of(rng, rows, 1) / 10).to(dtype)
            each = np.repeat(wide(scale), columns, 1)
        else:
            scale = (scales_of(rng, -(-rows // block[0]), -(-columns // block[1])) / 10).to(dtype)
            each = np.repeat(np.repeat(wide(scale), block[0], 0), block[1], 1)[:rows, :columns]
        weight = torch.from_numpy(bits).view(torch.float8_e4m3fn)
        return {"weight": weight, name: scale}, np.float32(e4m3(bits)) * np.float32(each)

    return write


def awq(rng: np.random.Generator, rows: int, columns: int) -> Written:
    values, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // GROUP, rows))
    scales = scales_of(rng, columns // GROUP, rows)

    def interleaved(table: Values) -> torch.Tensor:  # a word's lowest bits hold output 0, then 2, 4, 6, 1, 3, 5, 7
        return words(table.reshape(len(table), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(table), -1), 4)

    group = np.arange(columns) // GROUP
    meant = (values - zeros[group]) * wide(scales)[group]
    return {"qweight": interleaved(values), "qzeros": interleaved(zeros), "scales": scales}, np.float32(meant.T)


def gptq(bits: int, *, desc_act: bool, version: int) -> Writer:
    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        groups = columns // GROUP
        values, zeros = rng.integers(0, 2**bits, (columns, rows)), rng.integers(0, 2**bits, (groups, rows))
        scales = scales_of(rng, groups, rows)
        group = np.arange(columns) // GROUP
        if desc_act:
            group = rng.permutation(group)
        meant = (values - zeros[group]) * wide(scales)[group]
        stored = (zeros - 1) % 2**bits if version == 1 else zeros
        tensors = {
            "qweight": words(values.T, bits).T.contiguous(),
            "qzeros": words(stored, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        return tensors, np.float32(meant.T)

    return write


def packed(bits: int, *, symmetric: bool, grouped: bool = True) -> Writer:
    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        middle, group_size = 2 ** (bits - 1), GROUP if grouped else columns
        values = rng.integers(0, 2**bits, (rows, columns))
        zeros = rng.integers(0, 2**bits, (rows, columns // group_size))
        if symmetric:
            zeros[:] = middle
        scales = scales_of(rng, rows, columns // group_size)
        tensors = {
            "weight_packed": words(values, bits),
            "weight_scale": scales.to(torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        group = np.arange(columns) // group_size
        return tensors, np.float32((values - zeros[:, group]) * wide(tensors["weight_scale"])[:, group])

    return write


def int8(*, symmetric: bool) -> Writer:
    def write(rng: np.random.Generator, rows: int, columns: int) -> Written:
        values = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
        scales = scales_of(rng, rows, 1) / 16
        tensors = {"weight": torch.from_numpy(values), "weight_scale": scales}
        zeros = np.zeros((rows, 1), np.int8)
        if not symmetric:
            zeros = rng.integers(-20, 20, (rows, 1)).astype(np.int8)
            tensors["weight_zero_point"] = torch.from_numpy(zeros)
        return tensors, np.float32((values.astype(int) - zeros) * wide(scales))

    return write


def compressed(
    layout: str, kind: str, bits: int, strategy: str, activations: Any = None, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*down_proj$"],
        "kv_cache_scheme": None,
    }


DYNAMIC_FP8 = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False, "damp_percent": 0.01, "true_sequential": True}
# name -> what config.json says, and who writes a matrix
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        fp8("weight_scale_inv", BLOCK),
    ),
    "fp8 blocks of bf16": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        fp8("weight_scale_inv", (128, 128), torch.bfloat16),
    ),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", (0, 0))),
    "modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*.norm*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        },
        fp8("weight_scale", (0, 0)),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8("weight_scale", None)),
    "compressed fp8 tensor": (compressed("float-quantized", "float", 8, "tensor"), fp8("weight_scale", (0, 0))),
    "compressed fp8 channel": (
        compressed("float-quantized", "float", 8, "channel", DYNAMIC_FP8),
        fp8("weight_scale", None),
    ),
    "compressed fp8 block": (
        compressed("float-quantized", "float", 8, "block", DYNAMIC_FP8, block_structure=list(BLOCK)),
        fp8("weight_scale", BLOCK),
    ),
    "compressed fp8 group": (
        compressed("float-quantized", "float", 8, "group", group_size=GROUP),
        fp8("weight_scale", (1, GROUP)),
    ),
    "compressed int8": (compressed("int-quantized", "int", 8, "channel", DYNAMIC_INT8), int8(symmetric=True)),
    "compressed int8 asymmetric": (
        compressed("int-quantized", "int", 8, "channel", symmetric=False),
        int8(symmetric=False),
    ),
    "compressed int4 channel": (
        compressed("pack-quantized", "int", 4, "channel"),
        packed(4, symmetric=True, grouped=False),
    ),
    "compressed int4": (
        compressed("pack-quantized", "int", 4, "group", group_size=GROUP),
        packed(4, symmetric=True),
    ),
    "compressed int4 asymmetric": (
        compressed("pack-quantized", "int", 4, "group", group_size=GROUP, symmetric=False),
        packed(4, symmetric=False),
    ),
    "compressed packed int8": (
        compressed("pack-quantized", "int", 8, "group", group_size=GROUP, symmetric=False),
        packed(8, symmetric=False),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq": ({**GPTQ, "bits": 4, "desc_act": False}, gptq(4, desc_act=False, version=1)),
    "gptq desc_act": ({**GPTQ, "bits": 4, "desc_act": True}, gptq(4, desc_act=True, version=1)),
    "gptq v2": ({**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, desc_act=True, version=2)),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, gptq(8, desc_act=False, version=1)),
}


def quantized_modules(config: dict[str, Any], names: list[str]) -> list[str]:
    """Modules to quantize of a tiny model: the layers' matrices, but none that the config leaves out."""
    ignored = ("down_proj",) if "config_groups" in config else ()
    modules = [name.removesuffix(".weight") for name in names if name.endswith(("_proj.weight", "_with_mqa.weight"))]
    return [module for module in modules if not module.endswith(ignored or ("-",))]


def save_quantized(folder: Path, kind: str, name: str, **changes: Any) -> tuple[Path, Path]:
    """Save a tiny model in a format, and one of the values that it means in float32; return both folders."""
    config, write = FORMATS[name]
    quantized, plain = folder / "quantized", folder / "plain"
    make_model(kind, **{**SHAPE, **changes}).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    stored, rng = dict(tensors), np.random.default_rng(0)
    for module in quantized_modules(config, list(tensors)):
        rows, columns = tensors[f"{module}.weight"].shape
        parts, meant = write(rng, rows, columns)
        del stored[f"{module}.weight"]
        stored |= {f"{module}.{leaf}": tensor for leaf, tensor in parts.items()}
        tensors[f"{module}.weight"] = torch.from_numpy(meant).contiguous()
    save_file(tensors, plain / "model.safetensors")
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**raw, "quantization_config": copy.deepcopy(config)}))
    return quantized, plain


def save_mxfp4(folder: Path, *, largest_scale: int = 125, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a tiny gpt-oss with experts in MXFP4; return the values that they mean, by the names of plain tensors.

    Scales go from 2^-5 up to 2 to the power of `largest_scale` - 127.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    make_model("gpt-oss", **changes).save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, largest_scale + 1, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return values
