"""Arithmetic on the vectors that a pooling model makes, on the host: embeddings of length 1, classes from logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minisgl.pooling.pooling_config import ClassActivation, PoolingConfig
from minisgl.sampling_params import InvalidRequest

Float32Array = NDArray[np.float32]

_SMALLEST = 1e-12  # smallest length that vectors are divided by


def check_dimensions(dimensions: int | None, pooling: PoolingConfig) -> None:
    """Raise InvalidRequest if embeddings cannot be cut to this many values."""
    if dimensions is None:
        return
    if pooling.dimensions and dimensions not in (*pooling.dimensions, pooling.size):
        known = ", ".join(map(str, pooling.dimensions))
        raise InvalidRequest("dimensions", f"dimensions must be one of {known} for this model, not {dimensions}")
    if not 1 <= dimensions <= pooling.size:
        raise InvalidRequest("dimensions", f"dimensions must be between 1 and {pooling.size}, not {dimensions}")


def embedding(
    vector: Float32Array, pooling: PoolingConfig, dimensions: int | None, normalize: bool | None
) -> Float32Array:
    """Return the embedding [dimensions] of a pooled state [size].

    Models trained for it keep most of what matters in the first values (Matryoshka representation learning, Kusupati
    et al., 2022): the rest is cut off, and the length made 1 again. `normalize` None: as the model says.
    """
    cut = vector[:dimensions]
    if not (pooling.normalize if normalize is None else normalize):
        return cut
    return cut / np.float32(max(float(np.linalg.norm(cut)), _SMALLEST))


def cosine(first: Float32Array, second: Float32Array) -> float:
    """Return the cosine of the angle between two vectors."""
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(first @ second) / max(lengths, _SMALLEST)


def activated(logits: Float32Array, activation: ClassActivation) -> Float32Array:
    """Return the classes' values for the client, from their logits [n]."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits)), dtype=np.float32)
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum(), dtype=np.float32)
