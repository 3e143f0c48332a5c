"""Split-KV of fused decodes: division of rows among blocks of csrc/decode_attention.cu, by the size of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

VALUE_DIM = 256  # most dimensions of V that a cluster of csrc/decode_attention.cu has; larger heads take two clusters


class DecodeKernel(NamedTuple):
    """Parameters of `DecodeSplits` that are macros of the kernel."""

    cluster: int
    warps: int
    blocks_of_sm: int
    spares_first: bool
    fair: bool


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """Launch parameters of a fused decode: clusters of blocks, and the rule that cuts long rows into splits."""

    cluster: int  # blocks that divide one KV head of a row
    warps: int  # warps per block
    blocks_of_sm: int  # for which a multiprocessor's registers must suffice
    spare_clusters: int  # clusters beyond one for each row and KV head; they take the further splits of long rows
    num_kv_splits: int = 1  # for a row of more than 2 * min_tiles; more or fewer if the bounds below demand it
    min_tiles: int = 256  # tiles per split
    max_tiles: int = 256  # tiles per split
    spares_first: bool = False  # spare clusters begin before those of the rows
    fair: bool = False  # a row's cluster takes as many splits as make up its part of the step's tiles, not only one

    @property
    def kernel(self) -> DecodeKernel:
        """Return the parameters that the kernel is compiled with."""
        return DecodeKernel(self.cluster, self.warps, self.blocks_of_sm, self.spares_first, self.fair)


def _few_rows(warps: int, num_sms: int) -> DecodeSplits:
    """Return the parameters of steps whose rows all run at a time: rows of more than 2,048 tokens are cut.

    When the short rows have ended, spare clusters take the places of their clusters, and share the long rows, which
    would bound the step. Equal rows end together, so each keeps its part of the step's tiles (`fair`). There are as
    many spare clusters as run at a time: two blocks on a multiprocessor, and two in a cluster.
    """
    return DecodeSplits(2, warps, 2, spare_clusters=num_sms, min_tiles=64, max_tiles=128, fair=True)


def _many_rows(cluster: int, warps: int, blocks_of_sm: int, num_sms: int) -> DecodeSplits:
    """Return the parameters of steps whose rows fill the GPU: rows of more than 4,096 tokens are cut.

    Spare clusters begin first. So the splits of long rows, which take longest, are not computed last, when most of the
    GPU is idle, and the short rows fill the gaps in the end. There are as many spare clusters as run at a time: with
    fewer, equal long rows take longer, and clusters beyond these would delay the rows although they have no split.
    """
    at_once = num_sms * blocks_of_sm // cluster
    return DecodeSplits(cluster, warps, blocks_of_sm, at_once, min_tiles=128, max_tiles=128, spares_first=True)


def decode_splits(
    units: int, num_sms: int, head_dim: int, *, spills: bool, fp8: bool, slow_memory: bool
) -> DecodeSplits:
    """Return the fastest launch parameters for `units`: rows times KV heads, times two for heads of 512 dimensions.

    The parameters were measured on the 132 multiprocessors of an H200, and of an H100 (`slow_memory`), where few rows
    are faster with fewer and smaller clusters (docs/log.md). Not measured: heads of 512 dimensions, and on an H100 or
    with heads of 64 spare clusters that begin first and few rows that are cut from 2,048 tokens on.

    Few rows are divided among all multiprocessors by clusters. Longer rows are cut, and spare clusters take the further
    splits. From a quarter as many units as multiprocessors on, rows of up to 2,048 tokens stay whole. With more units
    than multiprocessors rows of up to 4,096 do, because equal rows keep the GPU busy by themselves; with K and V in 8
    bits, or with larger heads, rows of up to 8,192.

    `spills`: the kernel does not fit into 128 registers. `fp8`: K and V have 8 bits, so a block has only half the bytes
    in flight.
    """
    if head_dim > 128:  # a thread takes 255 registers, so a multiprocessor holds eight warps
        cluster = next((c for c in (8, 4, 2) if c * units <= 2 * num_sms), 1)
        warps = 3 if head_dim > VALUE_DIM and cluster > 1 else 4  # fit 48 KiB of shared memory
        return DecodeSplits(cluster, warps, 2, spare_clusters=max(2 * num_sms // cluster - units, 64))
    at_once = num_sms // 5  # clusters of eight large blocks that run at a time: a GPC holds at most three
    if 16 * units <= num_sms:
        return DecodeSplits(
            8, 6, 2, spare_clusters=at_once - units, num_kv_splits=at_once // units, min_tiles=80, max_tiles=1 << 20
        )
    if slow_memory and 8 * units <= 3 * num_sms:
        # Clusters beyond those that run at a time would begin only when others have ended.
        if 8 * units <= num_sms:
            return DecodeSplits(8, 6, 2, spare_clusters=2 * num_sms // 9 - units, min_tiles=512, max_tiles=512)
        return DecodeSplits(4, 6, 2, spare_clusters=15 * num_sms // 32 - units, min_tiles=512, max_tiles=512)
    if units <= at_once:
        return DecodeSplits(8, 6, 2, spare_clusters=16, min_tiles=512, max_tiles=512)
    if 4 * units <= num_sms:
        return DecodeSplits(8, 4, 3, spare_clusters=32)
    if units <= num_sms and not fp8:
        return _few_rows(6 if spills else 8, num_sms)
    if 2 * units <= num_sms:
        return DecodeSplits(4, 4, 3, spare_clusters=128)
    if units <= num_sms:
        return DecodeSplits(2, 6, 2, spare_clusters=64, max_tiles=512)
    if fp8:
        if 2 * units <= 5 * num_sms:
            return DecodeSplits(2, 4, 4, spare_clusters=128)
        warps, blocks_of_sm = (2, 8) if units > 10 * num_sms else (4, 4)
        return DecodeSplits(1, warps, blocks_of_sm, spare_clusters=256)
    if 2 * units <= 3 * num_sms:
        return _many_rows(2, 4, 3, num_sms)
    if spills:
        return _many_rows(1, 4, 3, num_sms)
    if (slow_memory or head_dim == 128) and 2 * num_sms < units <= 3 * num_sms:
        # The longest row bounds the step, so it gets eight warps, as in smaller and larger steps. Slower for equal
        # rows, but faster for all others.
        return _many_rows(2, 4, 3, num_sms)
    if head_dim == 64 and 3 * num_sms < units <= 4 * num_sms:  # half the bytes in flight, so all blocks in one wave
        return _many_rows(1, 4, 4, num_sms)
    # One wave; with heads of 128 also two and three, because eight warps finish a long row sooner.
    if units <= (6 if head_dim == 128 else 2) * num_sms:
        return _many_rows(1, 8, 2, num_sms)
    if units > 10 * num_sms:  # so many waves that a partial last one matters little
        return _many_rows(1, 4, 4, num_sms)
    # The number of blocks on a multiprocessor that leaves the least of the last wave idle.
    blocks = min((3, 4), key=lambda blocks: -(-units // (blocks * num_sms)) * blocks)
    return _many_rows(1, 4, blocks, num_sms)
