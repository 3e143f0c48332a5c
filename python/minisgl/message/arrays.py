"""NumPy arrays on the wire: dtype, shape and bytes.

The dtype travels with the array. A field's annotation cannot stand for it: what NumPy's aliases are at run time changes
from version to version. What arrives is read-only: it lies in the bytes that were received.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def encode_array(array: object) -> tuple[str, tuple[int, ...], bytes]:
    """Return what goes on the wire for an array: msgspec's encoder calls this for a type that it does not know."""
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"{type(array).__name__} does not go on the wire")
    return array.dtype.str, array.shape, array.tobytes()


def decode_array(_annotation: type, sent: Any) -> NDArray[Any]:
    """Return the array that `encode_array` sent: msgspec's decoder calls this with the field's annotation."""
    dtype, shape, data = sent
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
