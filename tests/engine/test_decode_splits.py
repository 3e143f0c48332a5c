"""Splits of fused decodes: the assumptions of the kernel."""

from __future__ import annotations

import pytest

from minisgl.attention.decode_splits import decode_splits


@pytest.mark.parametrize("num_sms", [78, 108, 114, 132, 148])
@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("slow_memory", [False, True])
def test_any_number_of_rows_is_divided(num_sms: int, spills: bool, fp8: bool, head_dim: int, slow_memory: bool) -> None:
    for units in range(1, 1 << 13):
        splits = decode_splits(units, num_sms, head_dim, spills=spills, fp8=fp8, slow_memory=slow_memory)
        assert splits.cluster in (1, 2, 4, 8), units
        assert splits.warps >= 2, "the new key and value have a warp each"
        threads = splits.warps * 32 * splits.blocks_of_sm
        assert threads <= (1024 + 512 if head_dim <= 128 else 256), "no registers are left for more"
        assert splits.spare_clusters > 0, "split rows need spare clusters"
        assert splits.num_kv_splits >= 1
        assert 1 <= splits.min_tiles <= splits.max_tiles


@pytest.mark.parametrize("num_sms", [108, 132])
@pytest.mark.parametrize("slow_memory", [False, True])
@pytest.mark.parametrize(("spills", "fp8"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_a_row_never_gets_more_warps_when_rows_are_added(
    num_sms: int, head_dim: int, spills: bool, fp8: bool, slow_memory: bool
) -> None:
    """The longest row bounds a step: with fewer warps than in a larger step, the smaller step would take longer."""
    splits = [
        decode_splits(units, num_sms, head_dim, spills=spills, fp8=fp8, slow_memory=slow_memory)
        for units in range(1, 4096)
    ]
    warps = [one.cluster * one.warps for one in splits]
    assert warps == sorted(warps, reverse=True)
    assert (splits[0].cluster, splits[-1].cluster) == (8, 1)


@pytest.mark.parametrize("num_sms", [108, 132])
@pytest.mark.parametrize("slow_memory", [False, True])
def test_steps_that_fill_the_gpu_begin_with_long_splits(num_sms: int, slow_memory: bool) -> None:
    """Rows of more than 4,096 tokens are cut, and as many spare clusters begin as run at a time."""
    for units in range(num_sms + 1, 4096):
        splits = decode_splits(units, num_sms, 128, spills=False, fp8=False, slow_memory=slow_memory)
        assert (splits.min_tiles, splits.max_tiles, splits.spares_first) == (128, 128, True), units
        assert splits.spare_clusters == num_sms * splits.blocks_of_sm // splits.cluster, units


@pytest.mark.parametrize("num_sms", [108, 132])
@pytest.mark.parametrize("slow_memory", [False, True])
def test_clusters_of_few_rows_run_at_a_time(num_sms: int, slow_memory: bool) -> None:
    """The kernel takes the number of spare clusters for the number of clusters that share a step's tiles."""
    shared = 0  # numbers of units whose clusters share long rows
    for units in range(1, 4096):
        splits = decode_splits(units, num_sms, 128, spills=False, fp8=False, slow_memory=slow_memory)
        if splits.fair:
            assert units <= num_sms * splits.blocks_of_sm // splits.cluster == splits.spare_clusters, units
            shared += 1
    assert shared


def test_an_h100_begins_no_more_clusters_than_it_holds() -> None:
    """It holds 30 clusters of eight large blocks, or 62 of four; clusters beyond these start up to 1.3 us late."""
    held = {8: 30, 4: 62}
    for units in range(1, 50):
        splits = decode_splits(units, 132, 128, spills=False, fp8=False, slow_memory=True)
        assert units + splits.spare_clusters <= held[splits.cluster], units
