"""The torch sampler: the right tokens survive the filters, with the right frequencies, whatever the company."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from exact.oracle import reference_uniform
from minisgl.core import NO_TOKEN
from minisgl.engine.sampling.sampler import TorchSampler, filter_threshold, uniform
from minisgl.engine.state import SlotState
from minisgl.sampling_params import SamplingFlags

VOCAB = 300
DRAWN = SamplingFlags.SAMPLED | SamplingFlags.FILTERED


def make_state(rows: int, **params: float) -> SlotState:
    state = SlotState(num_slots=rows, max_seq_len=32, page_size=4, scratch_page=0, device=torch.device("cpu"))
    state.temperature[:] = params.get("temperature", 1.0)
    state.top_k[:] = int(params.get("top_k", 0))
    state.top_p[:] = params.get("top_p", 1.0)
    state.min_p[:] = params.get("min_p", 0.0)
    state.seed[:] = torch.arange(rows + 1)
    return state


def sample(logits: torch.Tensor, state: SlotState, *, greedy: bool = False, filtered: bool = True) -> torch.Tensor:
    flags = SamplingFlags.SAMPLED | (SamplingFlags.FILTERED if filtered else SamplingFlags(0))
    return TorchSampler().sample(logits, torch.arange(len(logits)), state, SamplingFlags(0) if greedy else flags)


def test_uniform_is_the_documented_generator() -> None:
    rng = random.Random(0)
    seeds = [rng.randrange(-(2**63), 2**63) for _ in range(200)]
    positions = [rng.randrange(0, 200_000) for _ in range(200)]
    drawn = uniform(torch.tensor(seeds), torch.tensor(positions))
    expected = [reference_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert drawn.tolist() == expected
    assert drawn.min() > 0
    assert drawn.max() < 1
    many = uniform(torch.full((100_000,), 3), torch.arange(100_000))
    assert torch.histc(many, 20, 0, 1).sub(5000).abs().max() < 300
    assert torch.corrcoef(torch.stack([many[:-1], many[1:]]))[0, 1].abs() < 0.02


@pytest.mark.parametrize("top_k", [0, 1, 7, VOCAB + 5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, VOCAB) * 3
    warped = TemperatureLogitsWarper(0.7)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(min(top_k, VOCAB))(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    if min_p > 0:
        warped = MinPLogitsWarper(min_p)(None, warped)
    probs = torch.softmax(logits / 0.7, dim=1)
    rows = len(logits)
    threshold = filter_threshold(
        probs, torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)
    )
    assert torch.equal(probs >= threshold, warped > -torch.inf)


EXACT = [0.5, 0.25, 0.125, 0.0625, 0.0625]  # every sum of these is exact


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.875, 3), (0.9375, 5), (0.5000001, 2)])
def test_top_p_stops_at_the_token_that_reaches_it(top_p: float, kept: int) -> None:
    """The last two are equal, and so kept together."""
    off = torch.zeros(1)
    threshold = filter_threshold(torch.tensor([EXACT]), off, torch.tensor([top_p]), off)
    assert (torch.tensor(EXACT) >= threshold[0]).tolist() == [True] * kept + [False] * (5 - kept)


@pytest.mark.parametrize(("min_p", "kept"), [(1.0, 1), (0.5, 2), (0.25, 3), (0.125, 5), (0.5000001, 1)])
def test_min_p_keeps_what_has_exactly_that_share(min_p: float, kept: int) -> None:
    threshold = filter_threshold(torch.tensor([EXACT]), torch.zeros(1), torch.ones(1), torch.tensor([min_p]))
    assert (torch.tensor(EXACT) >= threshold[0]).tolist() == [True] * kept + [False] * (5 - kept)


def test_frequencies_follow_the_filtered_distribution() -> None:
    rows = 40_000
    torch.manual_seed(1)
    row = torch.randn(1, 40)
    sampled = sample(row.repeat(rows, 1), make_state(rows, temperature=0.8, top_k=10))
    best = torch.topk(row[0], 10).indices
    expected = torch.zeros(40)
    expected[best] = torch.softmax(row[0, best] / 0.8, dim=0)
    found = torch.bincount(sampled, minlength=40) / rows
    assert (found - expected).abs().max() < 0.01
    assert found[expected == 0].sum() == 0


def test_a_row_does_not_depend_on_its_company() -> None:
    torch.manual_seed(2)
    logits = torch.randn(64, VOCAB)
    together = sample(logits, make_state(64, top_p=0.8))
    for index in range(0, 64, 7):
        state = make_state(64, top_p=0.8)
        alone = TorchSampler().sample(
            logits[[index]], torch.tensor([index]), state, SamplingFlags.SAMPLED | SamplingFlags.FILTERED
        )
        assert alone[0] == together[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_first_of_equal_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 5_000).to(dtype)  # in 16 bits some share their largest value
    logits[:20, [70, 4_999, 3]] = 9.0
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, make_state(40), greedy=True).tolist() == expected
    assert sample(logits, make_state(40, temperature=0.0)).tolist() == expected


def test_temperature_zero_is_greedy_in_any_company() -> None:
    torch.manual_seed(3)
    logits = torch.randn(10, VOCAB)
    state = make_state(10)
    state.temperature[::2] = 0.0
    assert torch.equal(sample(logits, state)[::2], logits.argmax(dim=1)[::2])


def test_every_choice_has_a_probability_above_zero() -> None:
    """Draws next to 1 are included, where the product with the total may round up to it."""
    logits = torch.full((5000, 8), -torch.inf)
    logits[:, 2:4] = 0.0
    state = make_state(5000)
    assert set(sample(logits, state, filtered=False).tolist()) == {2, 3}


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_without_numbers_get_no_token(filtered: bool) -> None:
    """Their slots get some token, because one outside the vocabulary would end the next step."""
    logits = torch.randn(9, VOCAB)
    logits[0], logits[1], logits[2], logits[3, 7], logits[4, 7] = torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf
    logits[5, :] = -torch.inf
    logits[5, 8] = -3.0
    logits[6, 299] = torch.nan
    mask = torch.full((9, (VOCAB + 31) // 32), -1, dtype=torch.int32)
    mask[6, -1] = 0  # the grammar forbids the token whose logit is NaN
    for greedy in (False, True):
        state = make_state(9, top_p=0.9 if filtered else 1.0)
        expected = sample(logits[7:], make_state(9, top_p=0.9 if filtered else 1.0), greedy=greedy, filtered=filtered)
        state.seed[7:9] = torch.arange(2)
        flags = SamplingFlags.SAMPLED | (SamplingFlags.FILTERED if filtered else SamplingFlags(0))
        flags = SamplingFlags(0) if greedy else flags
        tokens = TorchSampler().sample(logits, torch.arange(9), state, flags, mask)
        assert tokens.dtype == torch.int32
        assert tokens[:5].tolist() == [NO_TOKEN] * 5
        assert tokens[5] == 8
        assert 0 <= int(tokens[6]) < 288
        assert torch.equal(tokens[7:], expected)
        assert 0 <= int(state.tokens.min()) <= int(state.tokens.max()) < VOCAB


def test_the_sampled_token_is_appended_to_the_slot() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 9.0
    state = make_state(3)
    state.lengths[:] = torch.tensor([4, 7, 1, 1])
    TorchSampler().sample(logits, torch.tensor([1, 0, 3]), state, SamplingFlags(0))
    assert state.lengths.tolist() == [5, 8, 1, 1]  # the last is the scratch slot
    assert state.tokens[1, 7] == state.tokens[0, 4] == 5
