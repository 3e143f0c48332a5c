"""Processing of logits, against plain Python on random logits: any parameters, in any company, in reused slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import NewRow
from minisgl.engine.sampling.logits_processing import AVOIDED, EXCLUDED, process_logits, unpack_bits
from minisgl.engine.sampling.sampler import TorchSampler
from minisgl.engine.state import SlotState
from minisgl.sampling_params import SamplingFlags, SamplingParams

VOCAB = 70  # not a multiple of 32
MAX_LEN = 24
SLOTS = 4
DRAWN = SamplingFlags.SAMPLED | SamplingFlags.FILTERED

ids = st.integers(0, VOCAB - 1)
few_ids = st.integers(0, 5)  # few different ids, so that penalties and bad words often apply
penalty = st.sampled_from([0.0, 0.0, -2.0, 0.3, 1.5])


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    mask: list[bool] | None


@st.composite
def rows(draw: st.DrawFn) -> Row:
    asks = draw(st.integers(0, 2)) > 0  # a third ask for nothing, often in a slot of one that did
    words = st.lists(few_ids, min_size=1, max_size=4).map(tuple)
    allowed = st.none() | st.lists(ids, min_size=1, max_size=VOCAB).map(tuple)
    sampling = SamplingParams(
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3])),
        logit_bias=tuple(draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=9)).items()),
        bad_words_ids=tuple(draw(st.lists(words, max_size=5))),
        allowed_token_ids=draw(allowed),
        min_tokens=draw(st.integers(0, 8)),
    )
    return Row(
        draw(st.lists(few_ids, min_size=1, max_size=8)),
        draw(st.lists(few_ids, max_size=8)),
        sampling if asks else SamplingParams(),
        tuple(draw(st.lists(ids, max_size=3))),
        draw(st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)),
    )


def expected(row: Row, logits: list[float]) -> list[float]:
    """Return one row's processed logits, by the definition of each parameter."""
    asked, tokens = row.sampling, row.prompt + row.output
    biases = dict(asked.logit_bias)
    changed = []
    for token, logit in enumerate(logits):
        x = logit + biases.get(token, 0.0)
        if token in tokens:
            x = x / asked.repetition_penalty if x > 0 else x * asked.repetition_penalty
        count = row.output.count(token)
        x -= asked.frequency_penalty * count + asked.presence_penalty * (count > 0)
        if len(row.output) < asked.min_tokens and token in row.stop_ids:
            x = AVOIDED
        for word in asked.bad_words_ids:
            begin = list(word[:-1])
            if word[-1] == token and row.output[len(row.output) - len(begin) :] == begin:
                x = AVOIDED
        if asked.allowed_token_ids is not None and token not in asked.allowed_token_ids:
            x = EXCLUDED
        if row.mask is not None and not row.mask[token]:
            x = EXCLUDED
        changed.append(x)
    return changed


def enter(state: SlotState, slot: int, row: Row) -> None:
    tokens = np.array(row.prompt + row.output, dtype=np.int32)
    no_pages = np.empty(0, dtype=np.int32)
    state._enter([NewRow(slot, tokens, no_pages, row.sampling, 0, len(row.prompt), row.stop_ids)])


def pack(masks: list[list[bool] | None]) -> torch.Tensor:
    """Return the bitmask [rows, words] as a grammar library fills it."""
    table = np.zeros((len(masks), -(-VOCAB // 32)), dtype=np.uint32)
    for words, mask in zip(table, masks, strict=True):
        for token in range(VOCAB):
            if mask is None or mask[token]:
                words[token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(table.view(np.int32))


@settings(max_examples=150, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=12), st.integers(0, 2**32 - 1), st.data())
def test_logits_are_changed_as_asked(traffic: list[Row], seed: int, data: st.DataObject) -> None:
    """Rows enter and leave slots; in each step some of them sample together."""
    state = SlotState(num_slots=SLOTS, max_seq_len=MAX_LEN, page_size=4, scratch_page=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    running: dict[int, Row] = {}
    for index, row in enumerate(traffic):
        slot = index % SLOTS
        enter(state, slot, row)
        running[slot] = row
        chosen = data.draw(st.permutations(sorted(running)))[: data.draw(st.integers(1, len(running)))]
        logits = torch.randn((len(chosen), VOCAB), generator=generator) * 3
        before = logits.clone()
        with_mask = any(running[slot].mask is not None for slot in chosen)
        mask = pack([running[slot].mask for slot in chosen]) if with_mask else None
        changed = process_logits(logits, torch.tensor(chosen), state, mask)
        assert torch.equal(logits, before), "log-probabilities are of the logits as they came"
        wanted = [expected(running[slot], one) for slot, one in zip(chosen, before.tolist(), strict=True)]
        torch.testing.assert_close(changed, torch.tensor(wanted), rtol=1e-5, atol=1e-4)


def make_state(
    *sampling: SamplingParams, prompt: list[int], output: list[int], stop_ids: tuple[int, ...] = ()
) -> SlotState:
    state = SlotState(num_slots=8, max_seq_len=MAX_LEN, page_size=4, scratch_page=0, device=torch.device("cpu"))
    for slot, one in enumerate(sampling):
        enter(state, slot, Row(prompt, output, one, stop_ids, None))
    return state


def test_bit_i_of_word_w_is_id_32_w_plus_i() -> None:
    """The order in which grammar libraries fill their masks."""
    for token in range(VOCAB):
        words = [0] * -(-VOCAB // 32)
        words[token // 32] = 1 << token % 32 if token % 32 < 31 else -(2**31)
        bits = unpack_bits(torch.tensor([words], dtype=torch.int32), VOCAB)
        assert bits.nonzero().tolist() == [[0, token]]
    assert unpack_bits(torch.tensor([[6], [-1]], dtype=torch.int32), 40).nonzero().tolist() == [
        [0, 1],
        [0, 2],
        *([1, token] for token in range(32)),
    ]


def test_rows_that_ask_for_nothing_get_what_they_get_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB)
    plain, asking = SamplingParams(temperature=0.8, top_k=9), SamplingParams(temperature=0.8, frequency_penalty=2.0)
    state = make_state(plain, asking, plain, asking, plain, plain, prompt=[1, 2], output=[3, 3])
    together = TorchSampler().sample(logits, torch.arange(6), state, DRAWN | SamplingFlags.PROCESSED)
    state = make_state(plain, asking, plain, asking, plain, plain, prompt=[1, 2], output=[3, 3])
    for slot in (0, 2, 4, 5):
        alone = TorchSampler().sample(logits[[slot]], torch.tensor([slot]), state, DRAWN)
        assert alone[0] == together[slot]


@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_of_which_nothing_is_left_still_chooses_within_the_hard_limits(greedy: bool) -> None:
    """min_tokens forbids the only id that is allowed: the allowed ids win."""
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0, allowed_token_ids=(40, 41), min_tokens=5)
    state = make_state(sampling, prompt=[1], output=[], stop_ids=(40, 41))
    chosen = TorchSampler().sample(
        torch.randn(1, VOCAB),
        torch.tensor([0]),
        state,
        SamplingFlags.PROCESSED if greedy else SamplingFlags.SAMPLED | SamplingFlags.PROCESSED,
    )
    assert int(chosen[0]) in (40, 41)


def test_a_mask_alone_and_beside_other_wishes() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, VOCAB)
    best = logits.argmax(dim=1).tolist()
    masks: list[list[bool] | None] = [[token != best[0] for token in range(VOCAB)], None]
    for processed in (False, True):
        state = make_state(SamplingParams(), SamplingParams(), prompt=[1], output=[])
        flags = SamplingFlags.PROCESSED if processed else SamplingFlags(0)
        chosen = TorchSampler().sample(logits, torch.tensor([0, 1]), state, flags, pack(masks))
        assert chosen.tolist() == [int(logits[0].topk(2).indices[1]), best[1]]
