"""Scheduler of rank 0 -> schedulers of the other tensor-parallel ranks: the plan of each step, in order.

The grammar bitmask of a plan that is `constrained` comes right behind it, when rank 0 has made it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import Batch, Int32Array


class Bitmask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tokens that the sampling rows of the plan before may choose."""

    words: Int32Array  # [rows, ceil(vocab_size / 32)]


ToRank: TypeAlias = Batch | Bitmask
