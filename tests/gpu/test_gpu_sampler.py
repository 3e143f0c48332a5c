"""The sampling kernels against the torch sampler: the same tokens for the same logits, seeds and positions."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import NO_TOKEN, NewRow
from minisgl.engine.sampling.logits_processing import process_logits
from minisgl.engine.sampling.sampler import Sampler, TorchSampler, filter_threshold, uniform
from minisgl.engine.state import SlotState
from minisgl.sampling_params import SamplingFlags, SamplingParams

if TYPE_CHECKING:
    from minisgl.engine.sampling.cuda_sampler import CudaSampler

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PLAIN = SamplingFlags.SAMPLED
FILTERED = SamplingFlags.SAMPLED | SamplingFlags.FILTERED


@pytest.fixture(scope="module")
def sampler() -> CudaSampler:
    from minisgl.engine.sampling.cuda_sampler import CudaSampler

    return CudaSampler(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_state(rows: int, *, greedy: int = 0) -> SlotState:
    """Random seeds, lengths and temperatures for `rows` slots; the first `greedy` of them are greedy."""
    device = torch.device("cuda", 0)
    state = SlotState(num_slots=rows, max_seq_len=64, page_size=16, scratch_page=0, device=device)
    generator = torch.Generator(device).manual_seed(1)
    state.lengths[:rows] = torch.randint(1, 60, (rows,), device=device, generator=generator, dtype=torch.int32)
    state.seed[:rows] = torch.randint(-(2**62), 2**62, (rows,), device=device, generator=generator)
    state.temperature[:rows] = torch.rand(rows, device=device, generator=generator) * 2
    state.temperature[:greedy] = 0.0
    return state


def spread_filters(state: SlotState, vocab: int) -> None:
    """Every mixture of filters over the slots."""
    rows = len(state.lengths)
    index = torch.arange(rows, device="cuda")
    limits = [0, 1, 2, 20, 50, 200, 511, 512, 513, 1000, vocab // 2, vocab, 2**31 - 1]
    top_k = torch.tensor(limits, dtype=torch.int32, device="cuda")
    top_p = torch.tensor([1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999], device="cuda")
    min_p = torch.tensor([0.0, 0.0, 1e-4, 0.1, 1.0], device="cuda")
    state.top_k[:] = top_k[index % 13]
    state.top_p[:] = top_p[index % 7]
    state.min_p[:] = min_p[index % 5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [151936, 1000, 4096, 32001, 7])
def test_kernels_choose_as_torch(sampler: Sampler, dtype: torch.dtype, vocab: int) -> None:
    rows = 512
    logits = (torch.randn(rows, vocab, device="cuda") * 4).to(dtype)
    slots = torch.randperm(rows, device="cuda")
    states = make_state(rows, greedy=rows // 4), make_state(rows, greedy=rows // 4)
    ours = sampler.sample(logits, slots, states[0], PLAIN)
    reference = TorchSampler().sample(logits, slots, states[1], PLAIN)
    greedy = states[0].temperature[slots] == 0
    assert torch.equal(ours[greedy], reference[greedy])
    # A draw within rounding of a boundary of the cumulative sum may choose the token on the other side.
    assert (ours != reference).float().mean() < 0.02
    assert torch.equal(states[0].lengths, states[1].lengths)
    assert torch.equal(states[0].tokens[slots, states[0].lengths[slots].long() - 1].long(), ours)


def probabilities(logits: Tensor, state: SlotState, slots: Tensor) -> Tensor:
    return torch.softmax(logits.double() / state.temperature[slots].double().unsqueeze(1), dim=1)


def kept_by(logits: Tensor, state: SlotState, slots: Tensor, slack: float) -> Tensor:
    """Return the tokens that the filters keep by float64, with thresholds moved by a relative `slack`."""
    probs = probabilities(logits, state, slots)
    threshold = filter_threshold(
        probs, state.top_k[slots], state.top_p[slots].double() * (1 + slack), state.min_p[slots].double() * (1 - slack)
    )
    return probs >= threshold * (1 - abs(slack))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab", [151936, 32001, 100])
def test_filters(sampler: Sampler, dtype: torch.dtype, spread: float, vocab: int) -> None:
    """Mixed filters, from logits with thousands of ties to peaked ones."""
    rows = 140 if vocab > 100000 else 700
    logits = (torch.randn(rows, vocab, device="cuda") * spread).to(dtype)
    slots = torch.randperm(rows, device="cuda")
    state = make_state(rows)
    spread_filters(state, vocab)
    state.temperature[:] = state.temperature.clamp(min=0.1)
    draws = uniform(state.seed[slots], state.lengths[slots].long()).double()
    ours = sampler.sample(logits, slots, state, FILTERED)
    missed = 0.0
    for some, part, draw, token in zip(*(x.split(70) for x in (logits, slots, draws, ours.unsqueeze(1))), strict=True):
        assert kept_by(some, state, part, 1e-4).gather(1, token).all()
        probs = torch.where(kept_by(some, state, part, 0.0), probabilities(some, state, part), 0.0)
        cdf = probs.cumsum(dim=1) / probs.sum(dim=1, keepdim=True)
        upto = cdf.gather(1, token).squeeze(1)
        before = upto - probs.gather(1, token).squeeze(1) / probs.sum(dim=1)
        missed += float(((draw < before - 2e-5) | (draw > upto + 2e-5)).sum())
    assert missed <= 0.02 * rows  # rounding may move a filter's cut across thousands of equal logits


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_kept_tokens_appear(sampler: Sampler, dtype: torch.dtype) -> None:
    """Many draws from one small distribution under each filter reach every token that is kept, and no other."""
    rows, vocab = 20000, 40
    values = torch.linspace(0, 3, vocab, device="cuda")[torch.randperm(vocab, device="cuda")].to(dtype)
    values[:3] = values.max()  # a tie at the top
    logits = values.repeat(rows, 1)
    slots = torch.arange(rows, device="cuda")
    for top_k, top_p, min_p in [
        (2, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.4, 0.0),
        (0, 1.0, 0.3),
        (20, 0.5, 0.1),
        (30, 0.9, 0.0),
    ]:
        state = make_state(rows)
        state.temperature[:] = 0.9
        state.top_k[:], state.top_p[:], state.min_p[:] = top_k, top_p, min_p
        sampled = sampler.sample(logits, slots, state, FILTERED)
        kept = kept_by(logits[:1], state, slots[:1], 0.0)[0]
        assert torch.equal(torch.bincount(sampled, minlength=vocab) > 0, kept), (top_k, top_p, min_p)


def kept_tokens(sampler: Sampler, row: list[float], top_p: float, min_p: float) -> list[int]:
    """The tokens that 20,000 draws at temperature 1 reach."""
    rows = 20_000
    state = make_state(rows)
    state.temperature[:] = 1.0
    state.top_p[:], state.min_p[:] = top_p, min_p
    logits = torch.tensor(row, device="cuda").repeat(rows, 1)
    sampled = sampler.sample(logits, torch.arange(rows, device="cuda"), state, FILTERED)
    found: list[int] = torch.unique(sampled).tolist()
    return found


@pytest.mark.parametrize("copies", [1, 256])  # few tokens are compared with each other, many go through histograms
@pytest.mark.parametrize("nearest", [1, 2, 3])
def test_top_p_stops_at_the_token_that_reaches_it(sampler: Sampler, copies: int, nearest: int) -> None:
    """Four logits are so close that each weighs 1; still, `nearest` of them are distinguished as the largest."""
    row = [0.0] * nearest * copies + [-(2.0**-27)] * (4 - nearest) * copies
    assert kept_tokens(sampler, row, nearest / 4, 0.0) == list(range(nearest * copies))
    assert kept_tokens(sampler, row, nearest / 4 + 1e-5, 0.0) == list(range(4 * copies))


@pytest.mark.parametrize("copies", [1, 300])
def test_min_p_keeps_what_has_exactly_that_share(sampler: Sampler, copies: int) -> None:
    half = np.log(np.float32(0.5))  # the logit of half the largest's probability, and the next one below it
    row = [float(level) for level in (0.0, half, np.nextafter(half, np.float32(-9))) for _ in range(copies)]
    assert kept_tokens(sampler, row, 1.0, 0.5) == list(range(2 * copies))


@pytest.mark.parametrize("filtered", [False, True])
def test_frequencies_follow_the_distribution(sampler: Sampler, filtered: bool) -> None:
    rows = 20000
    state = make_state(rows)
    state.temperature[:] = 1.0
    logits = torch.randn(1, 50, device="cuda").repeat(rows, 1)
    expected = torch.softmax(logits[0], dim=0)
    if filtered:
        state.top_k[:] = 10
        expected = torch.where(expected >= expected.topk(10).values[-1], expected, 0)
        expected /= expected.sum()
    flags = FILTERED if filtered else PLAIN
    sampled = sampler.sample(logits, torch.arange(rows, device="cuda"), state, flags)
    assert (torch.bincount(sampled, minlength=50) / rows - expected).abs().max() < 0.015


def test_company_changes_nothing(sampler: Sampler) -> None:
    """A row's token is bitwise the same alone and among others, and again on the next try."""
    rows, vocab = 96, 50000
    logits = torch.randn(rows, vocab, device="cuda") * 2
    slots = torch.arange(rows, device="cuda")

    def run(part: slice) -> Tensor:
        state = make_state(rows)
        spread_filters(state, vocab)
        return sampler.sample(logits[part], slots[part], state, FILTERED)

    together = run(slice(None))
    assert torch.equal(together, run(slice(None)))
    assert torch.equal(together, torch.cat([run(slice(row, row + 1)) for row in range(rows)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_numbers_get_no_token(sampler: Sampler, dtype: torch.dtype) -> None:
    """One NaN or infinity at any place is found, greedy or not; the slots get a token of the vocabulary all the same.

    The other rows get the tokens that they get without such company.
    """
    vocab = 3000
    places = [0, 1, 7, 8, 255, 256, 511, 512, 1300, vocab - 1]
    damaged = 2 * len(places) + 3
    rows = damaged + 20
    clean = (torch.randn(rows, vocab, device="cuda") * 4).to(dtype)
    logits, slots = clean.clone(), torch.arange(rows, device="cuda")
    for row, place in enumerate(places):
        logits[row, place], logits[len(places) + row, place] = float("-nan"), torch.inf
    logits[damaged - 3], logits[damaged - 2], logits[damaged - 1] = torch.nan, torch.inf, -torch.inf
    for greedy in (0, rows // 2, rows):
        states = make_state(rows, greedy=greedy), make_state(rows, greedy=greedy)
        for state in states:
            spread_filters(state, vocab)
        ours, reference = (
            sampler.sample(x, slots, state, FILTERED) for x, state in zip((logits, clean), states, strict=True)
        )
        assert ours[:damaged].tolist() == [NO_TOKEN] * damaged
        assert torch.equal(ours[damaged:], reference[damaged:])
        written = states[0].tokens[slots, states[0].lengths[slots].long() - 1]
        assert ((written >= 0) & (written < vocab)).all()
        assert torch.equal(
            TorchSampler().sample(logits, slots, make_state(rows, greedy=greedy), FILTERED) == NO_TOKEN,
            ours == NO_TOKEN,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_forbidden_nan_does_no_harm(sampler: Sampler, dtype: torch.dtype) -> None:
    """Constant rows, and rows whose NaN and infinities the grammar forbids, get a token that is allowed."""
    rows, vocab = 64, 3000
    logits = torch.zeros(rows, vocab, device="cuda", dtype=dtype)
    logits[: rows // 2, 5::32] = torch.nan
    logits[: rows // 2, 6::32] = torch.inf
    mask = torch.full((rows, (vocab + 31) // 32), ~(3 << 5), device="cuda", dtype=torch.int32)
    for flags in (FILTERED, FILTERED | SamplingFlags.PROCESSED):
        state = make_state(rows, greedy=16)
        spread_filters(state, vocab)
        sampled = sampler.sample(logits, torch.arange(rows, device="cuda"), state, flags, mask)
        assert ((sampled >= 0) & (sampled < vocab)).all()
        assert not torch.isin(sampled % 32, torch.tensor([5, 6], device="cuda")).any()


def random_mask(rows: int, vocab: int) -> Tensor:
    """Bitmasks that allow half of the ids, and in the last row one id alone."""
    mask = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32), device="cuda").int()
    mask[-1] = 0
    mask[-1, 3] = 1 << 5
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5000, 4999, 151936])
def test_masked_ids_are_never_chosen(sampler: Sampler, dtype: torch.dtype, vocab: int) -> None:
    rows = 64
    logits = torch.randn(rows, vocab, device="cuda").to(dtype)
    mask = random_mask(rows, vocab)
    slots = torch.arange(rows, device="cuda")
    for filtered in (False, True):
        states = make_state(rows, greedy=16), make_state(rows, greedy=16)
        if filtered:
            for state in states:
                state.top_k[:] = 30
                state.top_p[:] = 0.9
        flags = FILTERED if filtered else PLAIN
        ours = sampler.sample(logits, slots, states[0], flags, mask)
        reference = TorchSampler().sample(logits, slots, states[1], flags, mask)
        words = mask.gather(1, ours.unsqueeze(1) // 32).squeeze(1)
        assert ((words >> (ours % 32).int()) & 1).all()
        assert ours[-1] == 3 * 32 + 5
        assert (ours != reference).float().mean() < 0.05


def asking_state(rows: int, vocab: int) -> SlotState:
    """Return slots with known tokens; every third has no parameters, the others a random mixture."""
    rng = random.Random(0)
    device = torch.device("cuda", 0)
    state = SlotState(num_slots=rows, max_seq_len=600, page_size=16, scratch_page=0, device=device)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(vocab), count))

    for slot in range(rows):
        known = np.array([rng.choice([rng.randrange(vocab), rng.randrange(50)]) for _ in range(rng.randrange(2, 599))])
        sampling = SamplingParams(temperature=1.0)
        if slot % 3:
            end = int(known[-1])
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                top_k=rng.choice([-1, 20]),
                presence_penalty=rng.choice([0.0, 0.7]),
                frequency_penalty=rng.choice([0.0, -0.3]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                min_tokens=rng.choice([0, 400]),
                logit_bias=tuple((token, rng.uniform(-5, 5)) for token in ids(rng.randrange(20))),
                allowed_token_ids=rng.choice([None, ids(40)]),
                bad_words=("x",),
                bad_words_ids=((end, 7), ids(1), (ids(1)[0], end, 9), (int(known[-2]), end, 11)),
            )
        row = NewRow(
            slot=slot,
            token_ids=known.astype(np.int32),
            pages=np.zeros(0, dtype=np.int32),
            sampling=sampling,
            seed=slot,
            prompt_len=rng.randrange(1, len(known) + 1),
            stop_ids=ids(3),
        )
        state.tokens[slot, : len(known)] = torch.from_numpy(row.token_ids).cuda()
        state.lengths[slot] = len(known)
        state.temperature[slot] = sampling.temperature
        state.top_k[slot] = max(sampling.top_k, 0)
        state.seed[slot] = row.seed
        state.processing.enter(row)
    return state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5000, 12289])
def test_logits_are_processed_as_in_torch(dtype: torch.dtype, vocab: int) -> None:
    from minisgl.engine.sampling.cuda_sampler import CudaSampler

    rows = 60
    state = asking_state(rows, vocab)
    slots = torch.randperm(rows, device="cuda")
    logits = (torch.randn(rows, vocab, device="cuda") * 3).to(dtype)
    sampler = CudaSampler(torch.device("cuda", 0))
    for mask in (None, random_mask(rows, vocab)):
        assert torch.equal(sampler.process(logits, slots, state, mask), process_logits(logits, slots, state, mask))


def test_processed_rows_are_sampled_as_in_torch(sampler: Sampler) -> None:
    rows, vocab = 60, 5000
    states = asking_state(rows, vocab), asking_state(rows, vocab)
    slots = torch.randperm(rows, device="cuda")
    logits = torch.randn(rows, vocab, device="cuda").to(torch.bfloat16)
    flags = FILTERED | SamplingFlags.PROCESSED
    ours = sampler.sample(logits, slots, states[0], flags)
    assert (ours != TorchSampler().sample(logits, slots, states[1], flags)).float().mean() < 0.05
    assert torch.equal(states[0].lengths, states[1].lengths)


def test_rows_do_not_notice_processed_company(sampler: Sampler) -> None:
    """Rows without parameters get the same tokens in a step that processes the logits of other rows."""
    rows, vocab = 200, 20000
    logits = (torch.randn(rows, vocab, device="cuda") * 3).to(torch.bfloat16)
    slots = torch.arange(rows, device="cuda")
    states = make_state(rows, greedy=20), make_state(rows, greedy=20)
    for state in states:
        spread_filters(state, vocab)
    plain = sampler.sample(logits, slots, states[0], FILTERED)
    processed = sampler.sample(logits, slots, states[1], FILTERED | SamplingFlags.PROCESSED)
    assert (plain != processed).float().mean() < 0.01  # sums are taken in another order


def test_rows_of_a_wider_matrix(sampler: Sampler) -> None:
    wide = torch.randn(33, 5000, device="cuda").to(torch.bfloat16)
    logits = wide[:, 3:4004]  # neither the rows nor their starts are aligned
    states = make_state(33), make_state(33)
    slots = torch.arange(33, device="cuda")
    ours = sampler.sample(logits, slots, states[0], PLAIN)
    assert torch.equal(ours, sampler.sample(logits.contiguous(), slots, states[1], PLAIN))


def test_scratch_slot_never_grows(sampler: Sampler) -> None:
    state = make_state(4)
    slots = torch.tensor([0, 4, 4, 4], device="cuda")
    logits = torch.randn(4, 1000, device="cuda")
    sampler.sample(logits, slots, state, SamplingFlags(0))
    assert state.lengths[state.scratch_slot] == 1


class Divided:
    """The ranks of a group in one: `all_gather` returns what was collected from all of them."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.parts: dict[int, Tensor] = {}

    def all_gather(self, x: Tensor) -> Tensor:
        self.parts[self.rank] = x
        return torch.cat([self.parts.get(rank, x) for rank in range(self.size)], dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocab", "ranks"), [(151936, 2), (151936, 8), (8192, 4), (1000, 4), (4096, 8)])
def test_sharded_logits_give_the_tokens_of_whole_ones(
    sampler: CudaSampler, dtype: torch.dtype, vocab: int, ranks: int
) -> None:
    """Filtered, sampled and greedy rows. Where groups of 512 end at the same ids the tokens are the same; elsewhere a
    draw within rounding of a boundary may fall on its other side.
    """
    rows = 256
    logits = (torch.randn(rows, vocab, device="cuda") * 4).to(dtype)
    slots = torch.randperm(rows, device="cuda")
    one, other = make_state(rows, greedy=rows // 4), make_state(rows, greedy=rows // 4)
    for state in (one, other):
        spread_filters(state, vocab)
    ids = -(-vocab // ranks)
    padded = torch.nn.functional.pad(logits, (0, ranks * ids - vocab), value=99.0)  # never chosen
    shares = [part.contiguous() for part in padded.split(ids, dim=1)]
    addresses = torch.tensor([share.data_ptr() for share in shares], device="cuda")
    group = Divided(ranks)
    before = one.tokens.clone(), one.lengths.clone()
    for group.rank in (*range(ranks), 0, ranks - 1):  # the last two have all partials
        one.tokens.copy_(before[0])
        one.lengths.copy_(before[1])
        got = sampler.sample_sharded(shares[group.rank], slots, one, group, addresses, vocab)  # type: ignore[arg-type]
        if group.rank == 0:
            first = got
    assert torch.equal(first, got)
    want = sampler.sample(logits, slots, other, FILTERED)
    greedy = other.temperature[slots] == 0
    assert torch.equal(got[greedy], want[greedy])
    different = (got != want).float().mean()
    assert different == 0 if ids % 512 == 0 else different < 0.02
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.tokens[slots, one.lengths[slots].long() - 1], got)
