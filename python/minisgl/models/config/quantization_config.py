"""Reads `quantization_config` of a config.json. Unknown contents are refused by format and field. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from minisgl.models.config.config_reader import brief
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.quantization.schemes import (
    Activations,
    AwqWeights,
    GptqWeights,
    Mxfp4Weights,
    PackedWeights,
    Quantization,
    ScaledWeights,
    Scheme,
)

# The second as older files of compressed-tensors have it; in a multimodal config either may be in text_config.
_KEYS = ("quantization_config", "compression_config")
_IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
_GROUP_SIZES = (-1, *(2**power for power in range(3, 12)))


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the checkpoint of a config.json stores its weights; None: as they are. Raises UnsupportedModel."""
    inner = config.get("text_config")
    objects = [config, inner] if isinstance(inner, dict) else [config]
    raw = next((one[key] for one in objects for key in _KEYS if one.get(key) is not None), None)
    if raw is None:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else raw
    if method is None and "config_groups" in raw:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"quantization_config with quant_method {brief(method)} is not supported; known are {', '.join(_METHODS)}"
        )
    return _METHODS[method](_Fields(method, raw))


class _Fields:
    """The object under quantization_config, or one inside it. Its errors name format and field."""

    def __init__(self, method: str, raw: Mapping[str, Any], path: str = "") -> None:
        self.method, self.raw, self._path = method, raw, path

    def refuse(self, key: str) -> UnsupportedModel:
        """Return the error for a value that is not supported."""
        return UnsupportedModel(
            f"quantization_config ({self.method}): {self._path}{key} {brief(self.raw.get(key))} is not supported"
        )

    def one_of(self, key: str, known: Iterable[Any], default: Any = None) -> Any:
        """Return the value or its default, which must be one of the known ones."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not any(value == one and type(value) is type(one) for one in known):
            raise self.refuse(key)
        return value

    def neutral(self, *keys: str) -> None:
        """Refuse these keys unless they are empty, zero or false."""
        for key in keys:
            if self.raw.get(key):
                raise self.refuse(key)

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the patterns of modules under any of the keys."""
        found: list[str] = []
        for key in keys:
            value = self.raw.get(key) or []
            if not isinstance(value, list) or not all(isinstance(name, str) and _compiles(name) for name in value):
                raise self.refuse(key)
            found += value
        return tuple(found)

    def block(self, key: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
            raise self.refuse(key)
        return value[0], value[1]

    def inside(self, key: str) -> _Fields | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key)
        return _Fields(self.method, value, f"{self._path}{key}.")


def _compiles(name: str) -> bool:
    try:
        re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    except re.error:
        return False
    return True


def _read_fp8(fields: _Fields) -> Quantization:
    """Read FP8 of DeepSeek and Qwen3 (weight_block_size), of AutoFP8, and of fbgemm (one scale per channel)."""
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    kind = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    scheme = ScaledWeights(
        "fp8", fields.block("weight_block_size"), "dynamic 8 bits" if kind == "dynamic" else "static 8 bits"
    )
    return Quantization(fields.method, (((), scheme),), fields.names(*_IGNORE_KEYS))


def _read_awq(fields: _Fields) -> Quantization:
    def either(short: str, long: str) -> str:
        return long if fields.raw.get(short) is None else short

    fields.one_of(either("bits", "w_bit"), (4,))
    fields.one_of("zero_point", (True,), True)
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    group_size = fields.one_of(either("group_size", "q_group_size"), _GROUP_SIZES)
    return Quantization("awq", (((), AwqWeights(group_size)),), fields.names(*_IGNORE_KEYS))


def _read_gptq(fields: _Fields) -> Quantization:
    bits = fields.one_of("bits", (2, 4, 8))
    group_size = fields.one_of("group_size", _GROUP_SIZES)
    layout = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    fields.neutral("is_marlin_format", "adapter")
    rules = fields.inside("dynamic")
    left_out = []
    for pattern in {} if rules is None else rules.raw:  # GPTQModel's rules by module: "-:" leaves out, "+:" changes
        if not pattern.startswith("-:") or not _compiles(f"re:{pattern[2:]}"):
            raise fields.refuse("dynamic")
        left_out.append(f"re:{pattern[2:]}")
    scheme = GptqWeights(bits, group_size, zero_offset=1 if layout == "gptq" else 0)
    return Quantization("gptq", (((), scheme),), (*fields.names(*_IGNORE_KEYS), *left_out))


def _read_modelopt(fields: _Fields) -> Quantization:
    """Read FP8 of NVIDIA's Model Optimizer: one scale per tensor, static activations, modules excluded by wildcards."""
    fields.one_of("quant_algo", ("FP8",))
    fields.one_of("kv_cache_quant_algo", ("FP8", "none"), "none")
    cache = fields.inside("kv_cache_scheme")
    if cache is not None:
        _check_kv_cache(cache)
    left_out = (
        f"re:{fnmatch.translate(name)}" if "*" in name else name
        for name in fields.names(*_IGNORE_KEYS, "exclude_modules")
    )
    return Quantization("modelopt FP8", (((), ScaledWeights("fp8", activations="static 8 bits")),), tuple(left_out))


def _read_mxfp4(fields: _Fields) -> Quantization:
    return Quantization("mxfp4", (((), Mxfp4Weights()),), fields.names(*_IGNORE_KEYS))


def _read_compressed_tensors(fields: _Fields) -> Quantization:
    fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    fields.neutral("transform_config")
    sparsity = fields.inside("sparsity_config")
    if sparsity is not None:
        sparsity.one_of("format", ("dense",), "dense")
    cache = fields.inside("kv_cache_scheme")
    if cache is not None:
        _check_kv_cache(cache)
    groups = fields.inside("config_groups")
    if groups is None or not (groups.raw or cache):
        raise fields.refuse("config_groups")
    layout = fields.raw.get("format")
    named, others = [], []
    for key in groups.raw:
        group = cast(_Fields, groups.inside(key))
        targets = group.names("targets")
        entry = _compressed_scheme(group, group.raw.get("format") or layout, fields)
        # A name says more than a class, of which Linear alone has quantized weights.
        if "Linear" in targets:
            others.append(((), entry))
        else:
            named.append((targets, entry))
    return Quantization(f"compressed-tensors {layout}", (*named, *others), fields.names(*_IGNORE_KEYS))


def _check_kv_cache(scheme: _Fields) -> None:
    """Refuse a KV cache other than FP8 with one scale each for K and V per layer, or without scales."""
    scheme.one_of("num_bits", (8,))
    scheme.one_of("type", ("float",))
    scheme.one_of("strategy", ("tensor",), "tensor")
    scheme.one_of("symmetric", (True,), True)


def _compressed_scheme(group: _Fields, layout: Any, outer: _Fields) -> Scheme:
    weights, inputs = group.inside("weights"), group.inside("input_activations")
    group.neutral("output_activations")
    if weights is None:
        raise group.refuse("weights")
    kind = weights.one_of("type", ("float", "int"))
    weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    activations: Activations = "16 bits"
    if inputs is not None:
        inputs.one_of("num_bits", (8,))
        inputs.one_of("type", (kind,))
        activations = "dynamic 8 bits" if inputs.raw.get("dynamic") else "static 8 bits"
    match layout, kind:
        case (("float-quantized" | "naive-quantized"), "float"):
            weights.one_of("num_bits", (8,))
            return ScaledWeights("fp8", weights.block("block_structure"), activations)
        case (("int-quantized" | "naive-quantized"), "int"):
            weights.one_of("num_bits", (8,))
            return ScaledWeights("int8", weights.block("block_structure"), activations)
        case "pack-quantized", "int":
            return PackedWeights(weights.one_of("num_bits", (2, 4, 8)))
    raise (group if group.raw.get("format") else outer).refuse("format")


_METHODS: Mapping[str, Callable[[_Fields], Quantization]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
