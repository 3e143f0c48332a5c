"""NumPy arrays on the wire: shape and bytes. The dtype is that of the field's annotation on either side.

What arrives is read-only: it lies in the bytes that were received.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.core import BoolArray, Int32Array

_DTYPES: dict[object, np.dtype[np.generic]] = {Int32Array: np.dtype(np.int32), BoolArray: np.dtype(np.bool_)}


def encode_array(array: object) -> tuple[tuple[int, ...], bytes]:
    """What msgspec asks of an encoder's hook."""
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"{type(array).__name__} does not go on the wire")
    return array.shape, array.tobytes()


def decode_array(kind: type, sent: Any) -> NDArray[np.generic]:
    """What msgspec asks of a decoder's hook, for a field of this kind."""
    shape, data = sent
    return np.frombuffer(data, dtype=_DTYPES[kind]).reshape(shape)
