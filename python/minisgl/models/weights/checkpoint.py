"""A checkpoint's tensors under this decoder's names, as floating-point values whatever their stored format."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.error_text import abridged, file_error
from minisgl.models.config.model_config import CheckpointNames, WeightError
from minisgl.quantization.dequantize import QuantizedTensors, find_quantized, is_of_quantized
from minisgl.quantization.kv_scales import read_kv_scales, weight_factors
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.matrix import QuantizedMatrix
from minisgl.quantization.mxfp4 import Mxfp4Experts
from minisgl.quantization.schemes import Quantization

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OPEN_FILES = 4  # at a time, because a matrix and its scales may be in different files
_BLOCK = 1 << 24  # number of values dequantized at a time
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsTensor:
    """Implements quantization.matrix.StoredTensor over a safetensors file."""

    def __init__(self, open_file: Callable[[Path], Any], path: Path, name: str) -> None:
        self._open_file, self.path, self.name = open_file, path, name
        about = open_file(path).get_slice(name)
        self.shape: tuple[int, ...] = tuple(about.get_shape())
        self.dtype: str = about.get_dtype()

    def read(self, *index: slice) -> Tensor:
        file = self._open_file(self.path)
        tensor: Tensor
        if all(axis == slice(None) for axis in index):
            tensor = file.get_tensor(self.name)
        else:
            tensor = file.get_slice(self.name)[index]
        return tensor


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raise WeightError, which begins with `what`, in the place of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise WeightError(f"{what}: {error}") from error


class Checkpoint:
    """Tensors of a model's folder; quantized matrices have the names of the plain tensors that they replace.

    Raises WeightError for files that cannot be read and for quantized matrices that do not fit the config.
    """

    def __init__(self, folder: Path, names: CheckpointNames, quantization: Quantization | None) -> None:
        stored = _stored_tensors(folder, names)
        self._quantized = QuantizedTensors()
        self.zero_biases: set[str] = set()  # names of biases that a model without biases may leave out
        if quantization is None:
            undescribed = next(filter(is_of_quantized, stored), None)
            if undescribed is not None:
                raise WeightError(f"{undescribed}: config.json has no quantization_config that says how to read it")
        else:
            with naming(f"the checkpoint in {folder} ({quantization.name})"):
                self._quantized = find_quantized(stored, quantization)
            self.zero_biases = {names.ours(name) or name for name in self._find_zero_biases(stored)}
        plain = {name: tensor for name, tensor in stored.items() if name not in self._quantized.used}
        both: dict[str, SafetensorsTensor | QuantizedMatrix | Mxfp4Experts] = {**plain, **self._quantized.matrices}
        self._tensors = {names.ours(name) or name: tensor for name, tensor in both.items()}
        self._kv_scales = {names.ours(name) or name: tensor for name, tensor in self._quantized.kv_scales.items()}
        self._factors: dict[str, float] = {}  # powers of two, by which weights are multiplied

    def __iter__(self) -> Iterator[str]:
        """Yield the names, file by file."""
        return iter(self._tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @property
    def has_kv_scales(self) -> bool:
        """True if the checkpoint has scales of an 8-bit KV cache."""
        return bool(self._kv_scales)

    def apply_kv_scales(self) -> None:
        """Multiply weights around the KV cache by its scales from here on (quantization/kv_scales.py)."""
        try:
            scales = read_kv_scales(self._kv_scales)
            self._factors = weight_factors(scales, self._tensors)
        except ValueError as error:
            raise WeightError(f"--kv-cache-dtype fp8_e4m3: {error}; auto leaves the scales aside") from error
        every = [scale for each in scales.values() for scale in (each.keys, each.values)]
        logger.info("scales of the FP8 KV cache of %d layers, %g to %g", len(scales), min(every), max(every))

    def factor(self, name: str) -> float:
        """Return the power of two by which `read_into` and `read_levels_into` multiply a tensor."""
        return self._factors.get(name, 1.0)

    def read_into(self, target: Tensor, name: str, source: tuple[slice, ...]) -> None:
        """Fill `target` from a part of a tensor, rounded to its dtype; a quantized matrix a few rows at a time."""
        tensor = self._tensors[name]
        if isinstance(tensor, SafetensorsTensor):
            target.copy_(tensor.read(*source))
        else:
            for at, rows, columns, steps in _parts(tensor.shape, source):
                with naming(name):
                    values = tensor.read(rows, *columns)
                target[at].copy_(values[steps])
        if name in self._factors:
            target.mul_(self._factors[name])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor: a quantized matrix in this dtype, another one as it is stored."""
        tensor = self._tensors[name]
        if isinstance(tensor, SafetensorsTensor):
            return tensor.read()
        values = torch.empty(tuple(tensor.shape), dtype=dtype)
        self.read_into(values, name, (slice(None),) * values.ndim)
        return values

    def must_be_used(self, name: str) -> bool:
        """Return True for a tensor of a quantized module, unless it is a bias of zero."""
        return name.rpartition(".")[0] in self._quantized.modules and name not in self.zero_biases

    def check_dtypes(self, names: Iterable[str]) -> None:
        """Raise WeightError for the first of these tensors that is not quantized and has no floating-point values."""
        for name in names:
            tensor = self._tensors.get(name)
            if isinstance(tensor, SafetensorsTensor) and tensor.dtype not in _FLOATS:
                raise WeightError(f"{name} is stored as {tensor.dtype}, and config.json does not say how to read it")

    def level_format(self, name: str, source: tuple[slice, ...]) -> LevelFormat | None:
        """Return how the columns of a part are stored, if `read_levels_into` can read them as they are."""
        tensor = self._tensors[name]
        if isinstance(tensor, SafetensorsTensor):
            return None
        start, stop, step = source[1].indices(tensor.shape[1])
        return tensor.level_format(slice(start, stop)) if step == 1 else None

    def read_levels_into(self, target: Levels, name: str, source: tuple[slice, ...]) -> None:
        """Fill `target`, of the part's `level_format`, from a part of a quantized matrix, a few rows at a time."""
        tensor = self._tensors[name]
        if isinstance(tensor, SafetensorsTensor | Mxfp4Experts):
            raise TypeError(f"{name} is not a quantized matrix")
        for at, rows, columns, steps in _parts(tensor.shape, source):
            with naming(name):
                values = tensor.levels(rows, *columns)
            target[at].copy_(values[steps[0]])
        if name in self._factors:
            target.scales.mul_(self._factors[name])

    def expert_levels(
        self, name: str, source: tuple[slice, ...], form: LevelFormat, device: torch.device
    ) -> Iterator[Levels]:
        """Read each expert's part, of this `level_format`, as [out, in]: one of a matrix, several of stacked ones."""
        tensor = self._tensors[name]
        axes = [range(*axis.indices(size)) for axis, size in zip(source, tensor.shape, strict=True)]
        if isinstance(tensor, Mxfp4Experts):
            experts, columns, rows = axes
            part = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
            for expert in experts:
                with naming(name):
                    values = tensor.expert_levels(expert, *part)
                yield values[:: rows.step].to(device)
            return
        levels = Levels.empty(form, torch.Size(map(len, axes)), device)
        self.read_levels_into(levels, name, source)
        yield levels

    def _find_zero_biases(self, stored: dict[str, SafetensorsTensor]) -> Iterator[str]:
        """Find biases of quantized modules that are all zero: AutoGPTQ writes them for models without biases."""
        for module in self._quantized.modules:
            bias = stored.get(f"{module}.bias")
            if bias is not None and not bias.read().any():
                yield bias.name


def _parts(
    shape: tuple[int, ...], source: tuple[slice, ...]
) -> Iterator[tuple[slice, slice, list[slice], tuple[slice, ...]]]:
    """Divide what `source` takes of a matrix into blocks of rows.

    Each is: where it goes in the target, the rows and columns to read, and the steps by which they are reordered.
    """
    first, *others = [range(*axis.indices(size)) for axis, size in zip(source, shape, strict=True)]
    columns = [slice(axis.start, axis[-1] + 1) for axis in others]
    steps = tuple(slice(None, None, axis.step) for axis in (first, *others))
    count = max(_BLOCK // max(math.prod(map(len, others)) * first.step, 1), 1)
    for start in range(0, len(first), count):
        rows = first[start : start + count]
        yield slice(start, start + len(rows)), slice(rows[0], rows[-1] + 1), columns, steps


def _stored_tensors(folder: Path, names: CheckpointNames) -> dict[str, SafetensorsTensor]:
    """Return the tensors of a model folder that text needs, by their names there."""
    open_file = lru_cache(maxsize=_OPEN_FILES)(_open)
    stored: dict[str, SafetensorsTensor] = {}
    left_out: list[str] = []
    paths, path_of = _files(folder)
    for path in paths:
        for name in open_file(path).keys():  # noqa: SIM118 (not a dict)
            if names.ours(name) is None:
                left_out.append(next(prefix for prefix in names.ignored if name.startswith(prefix)))
            elif name not in stored or path_of.get(name) == path:
                stored[name] = SafetensorsTensor(open_file, path, name)
            elif path_of.get(name) != stored[name].path:
                raise WeightError(
                    f"{name} is in {stored[name].path} and in {path.name}, and the index names neither for it"
                )
    if left_out:
        prefixes = ", ".join(sorted({prefix.removesuffix(".") for prefix in left_out}))
        logger.info("%d tensors that plain text does not need are left out: %s", len(left_out), prefixes)
    return stored


def has_safetensors(folder: Path) -> bool:
    """Return True if `Checkpoint` finds files in the folder."""
    return (folder / _SINGLE).is_file() or (folder / _INDEX).is_file()


def _files(folder: Path) -> tuple[list[Path], Mapping[str, Path]]:
    """Return the safetensors files of a model folder, and the one that an index names for each tensor.

    Raises WeightError if there are no files or one is missing.
    """
    if (folder / _SINGLE).is_file():  # takes precedence over an index, which an older save may have left
        return [folder / _SINGLE], {}
    index = folder / _INDEX
    if index.is_file():
        try:
            file_of = json.loads(index.read_bytes())["weight_map"]
            names = sorted(set(file_of.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightError(f"{index} is not a safetensors index: {error!r}") from error
        if not all(isinstance(name, str) and _is_inside(Path(name)) for name in names):
            raise WeightError(f"{index} names something else than files of its folder: {names}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise WeightError(f"{folder} lacks {abridged(missing)}, named by {_INDEX}")
        paths = {name: folder / name for name in names}
        return list(paths.values()), {tensor: paths[name] for tensor, name in file_of.items()}
    others = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.gguf"))
    hint = f" ({others[0]} is not supported: convert it to safetensors)" if others else ""
    raise WeightError(f"{folder} has neither {_SINGLE} nor {_INDEX}{hint}")


def _is_inside(path: Path) -> bool:
    """True if a relative path stays in its folder. The file there may be a link: in the hub's cache all are."""
    return not path.is_absolute() and ".." not in path.parts


def _open(path: Path) -> Any:  # safe_open's methods have no types
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} is not a readable safetensors file: {file_error(path, error)}") from error
