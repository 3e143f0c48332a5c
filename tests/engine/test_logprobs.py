"""Log-probabilities in pieces of any size: torch's own, with ranks, and the same bits wherever a token stands."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from minisgl.core import Logprobs
from minisgl.engine.sampling import sampler
from minisgl.engine.sampling.sampler import compute_logprobs
from minisgl.message.logprobs import POSITIONS_A_SLICE, PackedLogprobs, unpack_logprobs
from minisgl.scheduler.steps.token_scores import pack_logprobs

VOCAB = 301


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_rows", [1, 7, 100])
def test_pieces_make_the_whole(dtype: torch.dtype, piece_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_SCORED_ELEMENTS", piece_rows * VOCAB + 5)
    torch.manual_seed(0)
    logits = (torch.randn(40, VOCAB) * 4).to(dtype)  # in bfloat16 with many ties
    tokens = torch.randint(VOCAB, (40,))
    logits[::4, ::50] = logits[::4].max(dim=1, keepdim=True).values
    tokens[::2] = logits[::2].argmax(dim=1)
    tokens[::8] = 250  # the last of the most likely
    widest = 0

    def rows(piece: slice) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, len(logits[piece]))
        return logits[piece]

    found = compute_logprobs(rows, tokens, VOCAB, top=5)
    assert widest == min(piece_rows, 40)
    expected = torch.log_softmax(logits.float(), dim=1)
    assert torch.equal(found.chosen, expected.gather(1, tokens[:, None]).squeeze(1))
    assert torch.equal(found.top, expected.topk(5).values)
    assert torch.equal(found.top, expected.gather(1, found.top_ids.long()))
    assert torch.equal(found.chosen[::2], found.top[::2, 0])  # bit for bit
    assert torch.equal(found.top_ids[::2, 0].long(), tokens[::2])  # although others may be as likely
    assert all(len(set(row)) == 5 for row in found.top_ids.tolist())
    for row, token, rank in zip(expected, tokens.tolist(), found.ranks.tolist(), strict=True):
        assert rank == sum(value > row[token] for value in row.tolist()) + 1


def test_logprobs_of_no_rows_and_of_more_alternatives_than_tokens() -> None:
    none = compute_logprobs(lambda _: torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 3, top=2)
    assert [len(none.chosen), len(none.ranks), len(none.top_ids), len(none.top)] == [0] * 4
    found = compute_logprobs(lambda _: torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), 3, top=20)
    assert found.top_ids.tolist() == [[1, 2, 0]]
    assert found.ranks.tolist() == [3]


class NoText:
    """Tokens without text."""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def is_special(self, token: int) -> bool:
        return False


def test_no_position_has_the_alternatives_of_another() -> None:
    """A request may ask for more alternatives than the vocabulary has, and for fewer than its neighbours of a step."""
    scores = Logprobs(
        np.zeros(4, np.float32),
        np.ones(4, np.int32),
        np.array([[0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2, 1]], np.int32),
        np.zeros((4, 3), np.float32),
    )
    rows = pack_logprobs([7, 8, 9], [1, 2, 1], [20, 1, 0], np.array([0, 1, 2, 0], np.int32), [scores])
    found = unpack_logprobs(rows, NoText())
    ids = {seq_id: [[token.token for token in one.top] for one in positions] for seq_id, positions in found.items()}
    assert ids == {7: [[0, 1, 2]], 8: [[1], [2]], 9: [[]]}
    assert [[one.chosen.token for one in positions] for positions in found.values()] == [[0], [1, 2], [0]]


@pytest.mark.parametrize("top", [0, 3])
def test_packed_log_probabilities_are_those_of_all_positions(top: int) -> None:
    class Letters:
        def token_bytes(self, token: int) -> bytes:
            return b"%c" % (97 + token)

        def is_special(self, token: int) -> bool:
            return token < 2

    rng = np.random.default_rng(0)
    count = 2 * POSITIONS_A_SLICE + 7
    tokens = rng.integers(0, 9, count, dtype=np.int32)
    top_ids = rng.integers(5, 26, (count, 3), dtype=np.int32)
    scores = Logprobs(
        -rng.random(count, np.float32), np.arange(count, dtype=np.int32), top_ids, -rng.random((count, 3), np.float32)
    )
    rows = pack_logprobs([7], [count], [top], tokens, [scores])
    sent = msgspec.msgpack.encode(PackedLogprobs.pack(rows, Letters()))
    packed = msgspec.msgpack.decode(sent, type=PackedLogprobs)
    assert len(packed) == count
    assert list(packed) == unpack_logprobs(rows, Letters())[7]
    assert {position.chosen.token for position in packed if position.special} == {0, 1}
