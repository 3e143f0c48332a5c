"""Pieces that messages of several hops share."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from minisgl.core import Int32Array

PackedIds: TypeAlias = bytes  # little-endian int32


def pack_ids(ids: Int32Array | list[int]) -> PackedIds:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: PackedIds) -> Int32Array:
    return np.frombuffer(packed, dtype="<i4")


class TextOptions(msgspec.Struct, frozen=True):
    """How the output ids of a sequence become text, and which texts end it."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True


class ProcessCounts(msgspec.Struct, frozen=True):
    """What one process holds right now, for /server_info: names to numbers."""

    process: str
    counts: dict[str, int]
