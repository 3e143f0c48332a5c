"""How the rows of a fused decode are divided among blocks of csrc/decode_attention.cu, and for which models it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.attention.base import AttentionShape

_MAX_GROUP = 8  # query heads of a KV head: rows of a tensor-core instruction


def fused_decode_missing(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Why attention cannot be fused for this model and GPU, or None."""
    if capability < (9, 0):
        return "it needs thread block clusters (compute capability 9.0)"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return "it is for bfloat16 and float16"
    if shape.head_dim not in (64, 128, 256):
        return f"it is for heads of 64, 128 or 256 dimensions, not {shape.head_dim}"
    if shape.num_heads % shape.num_kv_heads or shape.group > _MAX_GROUP:
        return f"it is for up to {_MAX_GROUP} query heads a KV head, not {shape.group}"
    if shape.page_size & (shape.page_size - 1):
        return f"it is for pages of a power of two, not {shape.page_size}"
    return None


@dataclass(frozen=True, slots=True)
class Division:
    """How a step of so many rows is divided among blocks: the kernel's launch, and how it cuts long rows."""

    cluster: int  # blocks that share a KV head of a row
    warps: int  # of a block
    blocks_of_sm: int
    helpers: int  # clusters besides the rows' own, which take what is cut off
    shares: int = 1  # a row of more than twice `least` is cut into so many chunks, or as `least` and `most` demand
    least: int = 256  # tiles of a chunk
    most: int = 256

    @property
    def compiled_for(self) -> tuple[int, int, int]:
        """What of this the kernel's code depends on."""
        return self.cluster, self.warps, self.blocks_of_sm


def divide(units: int, num_sms: int, head_dim: int, *, spills: bool, fp8: bool, slow_memory: bool = False) -> Division:
    """The division of `units` rows times KV heads that was fastest on 132 multiprocessors of an H200, or of an H100
    (`slow_memory`), whose many rows want the same, but whose few rows want fewer and smaller clusters (docs/log.md).

    Few rows share the multiprocessors by clusters. Otherwise rows of up to 8,192 tokens stay whole, for equal rows
    are best left alone; and there are enough helpers to keep the memory busy with what the others leave. `spills`: the
    kernel does not fit into 128 registers. `fp8`: K and V have 8 bits, of which a block has half the bytes under way.
    """
    if head_dim > 128:  # of which a thread takes 255 registers: a multiprocessor holds eight warps
        cluster = next((c for c in (8, 4, 2) if c * units <= 2 * num_sms), 1)
        return Division(cluster, 4, 2, helpers=max(2 * num_sms // cluster - units, 64))
    at_once = num_sms // 5  # clusters of eight large blocks: some groups of multiprocessors have room for three
    if 16 * units <= num_sms:
        return Division(8, 6, 2, helpers=at_once - units, shares=at_once // units, least=80, most=1 << 20)
    if slow_memory and 8 * units <= 3 * num_sms:
        # Clusters that the device cannot hold beside the others would begin when these have ended.
        if 8 * units <= num_sms:
            return Division(8, 6, 2, helpers=2 * num_sms // 9 - units, least=512, most=512)
        return Division(4, 6, 2, helpers=15 * num_sms // 32 - units, least=512, most=512)
    if units <= at_once:
        return Division(8, 6, 2, helpers=16, least=512, most=512)
    if 4 * units <= num_sms:
        return Division(8, 4, 3, helpers=32)
    if 2 * units <= num_sms:
        return Division(4, 4, 3, helpers=128)
    if units <= num_sms:
        return Division(2, 6, 2, helpers=64, most=512)
    if fp8:
        if 2 * units <= 5 * num_sms:
            return Division(2, 4, 4, helpers=128)
        return Division(1, 2, 8, helpers=256) if units > 10 * num_sms else Division(1, 4, 4, helpers=256)
    if 2 * units <= 3 * num_sms:
        return Division(2, 4, 3, helpers=128)
    if spills:
        return Division(1, 4, 3, helpers=256)
    if slow_memory and 2 * num_sms < units <= 3 * num_sms:
        return Division(2, 4, 3, helpers=128)  # 6% slower for equal rows, 8% faster for others
    if units <= 2 * num_sms or 3 * num_sms < units <= 4 * num_sms:  # all at once, or in two waves
        return Division(1, 8, 2, helpers=256)
    if units > 10 * num_sms:  # so many waves that the last counts for little
        return Division(1, 4, 4, helpers=256)
    # So many that the last of the waves in which they work leaves the fewest places empty.
    blocks = min((3, 4), key=lambda blocks: -(-units // (blocks * num_sms)) * blocks)
    return Division(1, 4, blocks, helpers=256)
