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
_LINEAR = "Linear"  # the only class of modules with quantized weights
_BY_ACTIVATIONS = (True, "group", "dynamic")  # values of actorder that give columns another group
_ORDERS = (*_BY_ACTIVATIONS, False, "weight", "static")
_GROUP_SIZES = (-1, *(2**power for power in range(3, 12)))


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the checkpoint of a config.json stores its weights; None: as they are. Raises UnsupportedModel."""
    raw = described_quantization(config)
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"quantization_config must be an object, not {brief(raw)}")
    method = raw.get("quant_method")
    if method is None and "config_groups" in raw:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"quantization_config with quant_method {brief(method)} is not supported; known are {', '.join(_METHODS)}"
        )
    return _METHODS[method](_Fields(method, raw))


def described_quantization(config: Mapping[str, Any]) -> Any:
    """Return what a config.json says of how weights are quantized; None: nothing."""
    inner = config.get("text_config")
    objects = [config, inner] if isinstance(inner, dict) else [config]
    return next((one[key] for one in objects for key in _KEYS if one.get(key) is not None), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that says nothing of quantized weights."""
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    inner = config.get("text_config")
    return {**plain, "text_config": without_quantization(inner)} if isinstance(inner, dict) else plain


def optimizer_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that stands for a file hf_quant_config.json. Raises UnsupportedModel."""
    quantized = content.get("quantization")
    if not isinstance(quantized, dict):
        raise UnsupportedModel(f"hf_quant_config.json: quantization must be an object, not {brief(quantized)}")
    return {"quant_method": "modelopt", **quantized}


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

    def key_of(self, *keys: str) -> str:
        """Return the key, of several for one setting, that has a value. Refuse another one with another value."""
        given = [key for key in keys if self.raw.get(key) is not None]
        for key in given[1:]:
            if self.raw[key] != self.raw[given[0]]:
                raise self.refuse(key)
        return given[0] if given else keys[0]

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

    def block(self, key: str, *, required: bool = False) -> tuple[int, int] | None:
        """Return the rows and columns of a block."""
        value = self.raw.get(key)
        if value is None and not required:
            return None
        if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
            raise self.refuse(key)
        return value[0], value[1]

    def size(self, key: str) -> int:
        """Return a positive integer."""
        value = self.raw.get(key)
        if type(value) is not int or value < 1:
            raise self.refuse(key)
        return value

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
    fields.one_of(fields.key_of("bits", "w_bit"), (4,))
    fields.one_of("zero_point", (True,), True)
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    for key in ("format", "checkpoint_format"):  # as GPTQModel names it
        fields.one_of(key, ("gemm", "awq"), "gemm")
    group_size = fields.one_of(fields.key_of("group_size", "q_group_size"), _GROUP_SIZES)
    return Quantization("awq", (((), AwqWeights(group_size)),), _left_out(fields))


def _read_gptq(fields: _Fields) -> Quantization:
    bits = fields.one_of("bits", (2, 4, 8))
    group_size = fields.one_of("group_size", _GROUP_SIZES)
    layout = fields.one_of(fields.key_of("checkpoint_format", "format"), ("gptq", "gptq_v2"), "gptq")
    fields.neutral("is_marlin_format", "adapter")
    in_order = group_size == -1 or fields.one_of("static_groups", (True, False), False)
    reordered = fields.one_of("desc_act", (True, False), False) and not in_order
    scheme = GptqWeights(bits, group_size, zero_offset=1 if layout == "gptq" else 0, reordered=reordered)
    return Quantization("gptq", (((), scheme),), _left_out(fields))


def _left_out(fields: _Fields) -> tuple[str, ...]:
    """Return the patterns of modules that are not quantized, those of GPTQModel's rules `dynamic` too.

    Such a rule begins with "-:" if it leaves modules out. All others change their quantization, and are refused.
    """
    rules = fields.inside("dynamic")
    left_out = []
    for pattern in {} if rules is None else rules.raw:
        if not pattern.startswith("-:") or not _compiles(f"re:{pattern[2:]}"):
            raise fields.refuse("dynamic")
        left_out.append(f"re:{pattern[2:]}")
    return (*fields.names(*_IGNORE_KEYS), *left_out)


def _read_modelopt(fields: _Fields) -> Quantization:
    """Read FP8 of NVIDIA's Model Optimizer: one scale per tensor, static activations, modules excluded by wildcards."""
    fields.one_of("quant_algo", ("FP8",))
    fields.one_of("kv_cache_quant_algo", ("FP8", "none"), "none")
    _has_kv_cache(fields)
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
    has_cache, groups = _has_kv_cache(fields), fields.inside("config_groups")
    if groups is None or not (groups.raw or has_cache):
        raise fields.refuse("config_groups")
    layout = fields.raw.get("format")
    by_target: dict[str, Scheme] = {}
    for key in groups.raw:
        group = cast(_Fields, groups.inside(key))
        targets = group.names("targets")
        if not targets:
            raise group.refuse("targets")
        by_target |= dict.fromkeys(targets, _compressed_scheme(group, group.raw.get("format") or layout, fields))
    schemes = [(_modules_of(target), by_target[target]) for target in sorted(by_target, key=_specificity)]
    return Quantization(f"compressed-tensors {layout}", tuple(schemes), fields.names(*_IGNORE_KEYS))


def _specificity(target: str) -> tuple[int, str]:
    """Sort targets as compressed-tensors does: names, then expressions by alphabet, then the class."""
    return (2 if target == _LINEAR else int(target.startswith("re:"))), target


def _modules_of(target: str) -> tuple[str, ...]:
    """Return the patterns of a target's modules; none for the class of all that can be quantized."""
    return () if target == _LINEAR else (target,)


def _has_kv_cache(fields: _Fields) -> bool:
    """Return True for a KV cache of FP8 with one scale each for K and V per layer, or without scales. Refuse others."""
    scheme = fields.inside("kv_cache_scheme")
    if scheme is None:
        return False
    scheme.one_of("num_bits", (8,))
    scheme.one_of("type", ("float",))
    scheme.one_of("strategy", ("tensor",), "tensor")
    scheme.one_of("symmetric", (True,), True)
    return True


def _compressed_scheme(group: _Fields, layout: Any, outer: _Fields) -> Scheme:
    weights, inputs = group.inside("weights"), group.inside("input_activations")
    group.neutral("output_activations")
    if weights is None:
        raise group.refuse("weights")
    kind = weights.one_of("type", ("float", "int"))
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    group_size = weights.size("group_size") if strategy == "group" else -1
    block = weights.block("block_structure", required=True) if strategy == "block" else None
    if strategy == "group":
        block = 1, group_size
    zeros = not weights.one_of("symmetric", (True, False), True)
    activations: Activations = "16 bits"
    if inputs is not None:
        inputs.one_of("num_bits", (8,))
        inputs.one_of("type", (kind,))
        activations = "dynamic 8 bits" if inputs.raw.get("dynamic") else "static 8 bits"
    match layout, kind:
        case (("float-quantized" | "naive-quantized"), "float"):
            weights.one_of("num_bits", (8,))
            return ScaledWeights("fp8", block, activations, zeros)
        case (("int-quantized" | "naive-quantized"), "int"):
            weights.one_of("num_bits", (8,))
            return ScaledWeights("int8", block, activations, zeros)
        case "pack-quantized", "int":
            weights.one_of("strategy", ("channel", "group"))
            bits, order = weights.one_of("num_bits", (2, 4, 8)), weights.one_of("actorder", _ORDERS, False)
            reordered = order in _BY_ACTIVATIONS and group_size != -1
            return PackedWeights(bits, group_size, zeros, reordered)
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
