"""Token ids on the wire: little-endian int32 in one string of bytes, so that no token costs an object."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from minisgl.core import Int32Array

PackedIds: TypeAlias = bytes  # little-endian int32
ID_BYTES = 4


def pack_ids(ids: Int32Array | list[int]) -> PackedIds:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: PackedIds) -> Int32Array:
    return np.frombuffer(packed, dtype="<i4")


def num_ids(packed: PackedIds) -> int:
    return len(packed) // ID_BYTES
