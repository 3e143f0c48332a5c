"""The sampling kernels against the torch sampler: the same tokens for the same logits, seeds and positions."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine.sampler import SampleKind, TorchSampler
from minisgl.engine.state import SlotState

pytestmark = pytest.mark.gpu


def make_state(rows: int) -> SlotState:
    device = torch.device("cuda", 0)
    state = SlotState(num_slots=rows, max_seq_len=64, page_size=16, scratch_page=0, device=device)
    generator = torch.Generator(device).manual_seed(1)
    state.lengths[:rows] = torch.randint(1, 60, (rows,), device=device, generator=generator, dtype=torch.int32)
    state.seed[:rows] = torch.randint(-(2**62), 2**62, (rows,), device=device, generator=generator)
    state.temperature[:rows] = torch.rand(rows, device=device, generator=generator) * 2
    state.temperature[: rows // 4] = 0.0
    return state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [151936, 1000, 4096, 32001])
def test_kernels_choose_as_torch(dtype: torch.dtype, vocab: int) -> None:
    from minisgl.engine.cuda_sampler import CudaSampler

    rows = 512
    sampler = CudaSampler(torch.device("cuda", 0))
    logits = (torch.randn(rows, vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 4).to(dtype)
    slots = torch.randperm(rows, device="cuda")
    states = make_state(rows), make_state(rows)
    kind = SampleKind(greedy=False, filtered=False)
    ours = sampler.sample(logits, slots, states[0], kind)
    reference = TorchSampler().sample(logits, slots, states[1], kind)
    greedy = states[0].temperature[slots] == 0
    assert torch.equal(ours[greedy], reference[greedy])
    # A draw within rounding of a boundary of the cumulative sum may fall on its other side.
    assert (ours != reference).float().mean() < 0.02
    assert torch.equal(states[0].lengths, states[1].lengths)
    assert torch.equal(states[0].tokens[slots, states[0].lengths[slots].long() - 1].long(), ours)


def test_scratch_slot_never_grows() -> None:
    from minisgl.engine.cuda_sampler import CudaSampler

    state = make_state(4)
    slots = torch.tensor([0, 4, 4, 4], device="cuda")
    logits = torch.randn(4, 1000, device="cuda")
    CudaSampler(torch.device("cuda", 0)).sample(logits, slots, state, SampleKind(greedy=True, filtered=False))
    assert state.lengths[state.scratch_slot] == 1


def test_frequencies_follow_the_distribution() -> None:
    from minisgl.engine.cuda_sampler import CudaSampler

    rows = 20000
    state = make_state(rows)
    state.temperature[:] = 1.0
    logits = torch.randn(1, 50, device="cuda").repeat(rows, 1)
    sampled = CudaSampler(torch.device("cuda", 0)).sample(
        logits, torch.arange(rows, device="cuda"), state, SampleKind(greedy=False, filtered=False)
    )
    expected = torch.softmax(logits[0], dim=0)
    assert (torch.bincount(sampled, minlength=50) / rows - expected).abs().max() < 0.015
