"""Descriptions of how a checkpoint stores its quantized matrices. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Activations = Literal["16 bits", "dynamic 8 bits", "static 8 bits"]  # activations with which the format is multiplied


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """Values of 8 bits in `weight`, each multiplied by the scale of its tensor, channel or block.

    The shape of the scales tells a tensor's from channels'. Blocks have a shape, (rows, columns): that of a group of
    input columns is (1, columns).
    """

    dtype: Literal["fp8", "int8"]
    block: tuple[int, int] | None = None
    activations: Activations = "16 bits"
    zeros: bool = False  # zero points are stored

    @property
    def kind(self) -> str:
        return self.dtype


@dataclass(frozen=True, slots=True)
class AwqWeights:
    """AWQ (Lin et al., 2023) as AutoAWQ's GEMM version packs it: 4 bits, interleaved, with zero points."""

    group_size: int  # input columns of a scale; -1: all

    @property
    def kind(self) -> str:
        return "int4"


@dataclass(frozen=True, slots=True)
class GptqWeights:
    """GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel pack it; `g_idx` may order the groups by activation."""

    bits: int
    group_size: int  # input columns of a scale; -1: all
    zero_offset: int  # 1 where zero points are stored less one (checkpoint_format gptq), 0 for gptq_v2
    reordered: bool = False  # groups are not in order (desc_act), so `g_idx` must be there

    @property
    def kind(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Integers of compressed-tensors' pack-quantized format."""

    bits: int
    group_size: int = -1  # input columns of a scale; -1: all
    zeros: bool = False  # zero points are stored; without them the middle of the range is zero
    reordered: bool = False  # groups are not in order (actorder), so `weight_g_idx` must be there

    @property
    def kind(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True, slots=True)
class Mxfp4Weights:
    """OCP microscaling FP4 (2023) as gpt-oss stores its experts: pairs of e2m1 values, a power of two for 32."""

    @property
    def kind(self) -> str:
        return "mxfp4"


Scheme = ScaledWeights | AwqWeights | GptqWeights | PackedWeights | Mxfp4Weights


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's `quantization_config`: the format of each of its modules.

    `schemes` are tried in order; their targets, like `ignored`, are a module's name, some components of it in a row, or
    "re:" and a regular expression that matches from the beginning. No targets: every module.
    """

    name: str  # for messages, such as "fp8" or "compressed-tensors pack-quantized"
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the format of a quantized module's weight; None if the config leaves the module unquantized."""
        if names_module(self.ignored, module):
            return None
        for targets, scheme in self.schemes:
            if not targets or names_module(targets, module):
                return scheme
        return None

    @property
    def kind(self) -> str:
        """Kind of all schemes' weights: fp8, int8 or int4; mixed if they differ."""
        kinds = {scheme.kind for _, scheme in self.schemes}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    def describe(self, dtype: str, kept: str = "") -> str:
        """Return one line on how a model of this dtype computes with the weights; the modules `kept` stay as stored."""
        if kept:
            return f"weights of {self.name}: {kept} stay as they are stored, others are dequantized to {dtype}"
        rounded = {one.activations for _, one in self.schemes if isinstance(one, ScaledWeights)} - {"16 bits"}
        left_out = f"; activations stay in {dtype}, where the format has {rounded.pop()}" if rounded else ""
        return f"weights of {self.name} are dequantized to {dtype} as they are loaded{left_out}"


def names_module(patterns: tuple[str, ...], module: str) -> bool:
    """Return True if one of the patterns, as in `Quantization`, is for this module."""
    dotted = f".{module}."
    return any(
        re.match(pattern.removeprefix("re:"), module) is not None
        if pattern.startswith("re:")
        else f".{pattern}." in dotted
        for pattern in patterns
    )
