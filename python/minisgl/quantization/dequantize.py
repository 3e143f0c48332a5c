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


@dataclass
class QuantizedTensors:
    """Contents of a quantized checkpoint other than its plain tensors."""

    # By the name of the plain tensor that they stand for.
    matrices: dict[str, QuantizedMatrix | Mxfp4Experts] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # names of stored tensors that a matrix has taken
    kv_scales: dict[str, StoredTensor] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # modules of the matrices


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
    return found


class _Parts:
    """Stored tensors of one quantized module; notes which are used."""

    def __init__(self, tensors: Mapping[str, StoredTensor], module: str, used: set[str]) -> None:
        self._tensors, self.module, self._used = tensors, module, used

    def optional(self, leaf: str, *, separator: str = ".") -> StoredTensor | None:
        name = f"{self.module}{separator}{leaf}"
        if name in self._tensors:
            self._used.add(name)
        return self._tensors.get(name)

    def required(self, leaf: str, *, dtypes: tuple[str, ...] = (), separator: str = ".") -> StoredTensor:
        """Return the tensor, which must exist and have one of these dtypes if any are given."""
        tensor = self.optional(leaf, separator=separator)
        if tensor is None:
            self.fail(f"{self.module}{separator}{leaf} is not there")
        if dtypes and tensor.dtype not in dtypes:
            self.fail(f"{leaf} is stored as {tensor.dtype}, but the format asks for {' or '.join(dtypes)}")
        return tensor

    def fail(self, why: str) -> NoReturn:
        raise ValueError(f"{self.module}: {why}")


def _open(scheme: Scheme, parts: _Parts) -> QuantizedMatrix | Mxfp4Experts:
    words = ("I32",)
    try:
        match scheme:
            case ScaledWeights():
                scales = [scale for name in _SCALES if (scale := parts.optional(name)) is not None]
                if len(scales) != 1:
                    parts.fail(f"it has {len(scales)} of {' and '.join(_SCALES)}, but the format asks for one")
                weight = parts.required("weight", dtypes=_DTYPES[scheme.dtype])
                more = parts.optional("weight_zero_point"), parts.optional("input_scale")
                return ScaledMatrix(weight, scales[0], *more, scheme)
            case AwqWeights():
                packed = parts.required("qweight", dtypes=words), parts.required("qzeros", dtypes=words)
                return AwqMatrix(scheme, *packed, parts.required("scales"))
            case GptqWeights():
                packed = parts.required("qweight", dtypes=words), parts.required("qzeros", dtypes=words)
                return GptqMatrix(scheme, *packed, parts.required("scales"), parts.optional("g_idx"))
            case PackedWeights():
                return PackedMatrix(
                    scheme,
                    parts.required("weight_packed", dtypes=words),
                    parts.required("weight_scale"),
                    parts.required("weight_shape"),
                    parts.optional("weight_zero_point"),
                    parts.optional("weight_g_idx"),
                )
            case Mxfp4Weights():
                blocks = parts.required("blocks", dtypes=("U8",), separator="_")
                return Mxfp4Experts(blocks, parts.required("scales", dtypes=("U8",), separator="_"))
    except ValueError as error:
        if str(error).startswith(parts.module):
            raise
        raise ValueError(f"{parts.module}: {error}") from error
