"""Finds the quantized matrices among a checkpoint's tensors, and reads them in the config's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from minisgl.quantization.matrix import QuantizedMatrix, StoredTensor
from minisgl.quantization.mxfp4 import Mxfp4Experts
from minisgl.quantization.packed import AwqMatrix, GptqMatrix, PackedMatrix
from minisgl.quantization.scaled import ScaledMatrix
from minisgl.quantization.schemes import (
    AwqWeights,
    GptqWeights,
    Mxfp4Weights,
    PackedWeights,
    Quantization,
    ScaledWeights,
    Scheme,
)

_SCALES = ("weight_scale_inv", "weight_scale")  # the first as DeepSeek's files name what multiplies
_BLOCKS = "_blocks"
# Last components of names that only a quantized module has.
_MARKS = (*_SCALES, "qweight", "weight_packed", "weight_zero_point")
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "input_zero_point", "activation_scale")
_OF_KV_CACHE = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")
_OUTPUT_SCALE_OF_KV = ("k_proj.output_scale", "v_proj.output_scale")  # the older form of k_scale and v_scale
_DTYPES = {"fp8": ("F8_E4M3",), "int8": ("I8",)}
_SCALE_DTYPES = ("F32", "BF16", "F16", "F64", "F8_E8M0")
_WORDS = ("I32",)
_INDICES = ("I32", "I64")


@dataclass
class QuantizedTensors:
    """Contents of a quantized checkpoint other than its plain tensors."""

    # By the name of the plain tensor that they stand for.
    matrices: dict[str, QuantizedMatrix | Mxfp4Experts] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # names of stored tensors that a matrix has taken
    kv_scales: dict[str, StoredTensor] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # modules of the matrices


def is_of_quantized(name: str) -> bool:
    """Return True for the name of a tensor that only a quantized module has."""
    return name.rpartition(".")[2] in _MARKS


def find_quantized(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> QuantizedTensors:
    """Return the quantized matrices of a checkpoint. Raises ValueError, which names the module, if one does not fit."""
    found = QuantizedTensors()
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in _OF_KV_CACHE or name.endswith(_OUTPUT_SCALE_OF_KV):
            found.kv_scales[name] = tensor
            found.used.add(name)
        elif leaf in _OF_ACTIVATIONS:
            found.used.add(name)
        elif leaf in _MARKS or leaf.endswith(_BLOCKS):
            scheme = quantization.scheme_of(module)
            plain = name.removesuffix(_BLOCKS) if leaf.endswith(_BLOCKS) else f"{module}.weight"
            if scheme is None:
                raise ValueError(f"{name}: {quantization.name} says that this module is not quantized")
            if plain not in found.matrices:
                parts = _Parts(tensors, plain if leaf.endswith(_BLOCKS) else module, found.used)
                found.matrices[plain] = _open(scheme, parts)
                found.modules.add(module)
            if plain in tensors and plain not in found.used:
                raise ValueError(f"{plain} is there both as {name} and not quantized")
    return found


class _Parts:
    """Stored tensors of one quantized module; notes which are used."""

    def __init__(self, tensors: Mapping[str, StoredTensor], module: str, used: set[str]) -> None:
        self._tensors, self.module, self._used = tensors, module, used

    def optional(self, leaf: str, dtypes: tuple[str, ...], *, separator: str = ".") -> StoredTensor | None:
        """Return the tensor, which must have one of these dtypes; None if there is none."""
        name = f"{self.module}{separator}{leaf}"
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.dtype not in dtypes:
            self.fail(f"{leaf} is stored as {tensor.dtype}, but the format asks for {' or '.join(dtypes)}")
        self._used.add(name)
        return tensor

    def required(self, leaf: str, dtypes: tuple[str, ...], *, separator: str = ".", why: str = "") -> StoredTensor:
        """Return the tensor, which must exist and have one of these dtypes; `why` ends the error for a missing one."""
        tensor = self.optional(leaf, dtypes, separator=separator)
        if tensor is None:
            self.fail(f"{self.module}{separator}{leaf} is not there{why}")
        return tensor

    def groups(self, leaf: str, *, needed: bool, key: str) -> StoredTensor | None:
        """Return the group of each input column; needed if the config's `key` says that they are not in order."""
        if needed:
            return self.required(leaf, _INDICES, why=f", but config.json has {key}")
        return self.optional(leaf, _INDICES)

    def zero_point(self, dtypes: tuple[str, ...], *, stored: bool) -> StoredTensor | None:
        """Return zero points of compressed-tensors, which are there if the config calls the weights not symmetric.

        The library's first versions, up to May 2024, wrote those of symmetric weights, too: zeros in 8 bits.
        """
        if stored:
            return self.required("weight_zero_point", dtypes, why=", but config.json has symmetric false")
        zeros = self.optional("weight_zero_point", ("I8", *dtypes))
        if zeros is not None and zeros.read().float().any():
            self.fail("weight_zero_point is there and not zero, but config.json calls the weights symmetric")
        return None

    def fail(self, why: str) -> NoReturn:
        raise ValueError(f"{self.module}: {why}")


def _open(scheme: Scheme, parts: _Parts) -> QuantizedMatrix | Mxfp4Experts:
    try:
        match scheme:
            case ScaledWeights():
                scales = [scale for name in _SCALES if (scale := parts.optional(name, _SCALE_DTYPES)) is not None]
                if len(scales) != 1:
                    parts.fail(f"it has {len(scales)} of {' and '.join(_SCALES)}, but the format asks for one")
                dtypes = _DTYPES[scheme.dtype]
                weight = parts.required("weight", dtypes)
                zero_point = parts.zero_point((*dtypes, *_SCALE_DTYPES), stored=scheme.zeros)
                return ScaledMatrix(weight, scales[0], zero_point, parts.optional("input_scale", _SCALE_DTYPES), scheme)
            case AwqWeights():
                packed = parts.required("qweight", _WORDS), parts.required("qzeros", _WORDS)
                return AwqMatrix(scheme, *packed, parts.required("scales", _SCALE_DTYPES))
            case GptqWeights():
                packed = parts.required("qweight", _WORDS), parts.required("qzeros", _WORDS)
                g_idx = parts.groups("g_idx", needed=scheme.reordered, key="desc_act true")
                return GptqMatrix(scheme, *packed, parts.required("scales", _SCALE_DTYPES), g_idx)
            case PackedWeights():
                return PackedMatrix(
                    scheme,
                    parts.required("weight_packed", _WORDS),
                    parts.required("weight_scale", _SCALE_DTYPES),
                    parts.required("weight_shape", _INDICES),
                    parts.zero_point(_WORDS, stored=scheme.zeros),
                    parts.groups("weight_g_idx", needed=scheme.reordered, key="actorder group"),
                )
            case Mxfp4Weights():
                blocks = parts.required("blocks", ("U8",), separator="_")
                return Mxfp4Experts(blocks, parts.required("scales", ("U8",), separator="_"))
    except ValueError as error:
        if str(error).startswith(parts.module):
            raise
        raise ValueError(f"{parts.module}: {error}") from error
