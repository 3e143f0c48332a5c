"""The demo model's tokenizer: any text survives, and training used the very same one."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo_model.evaluate import DEMO_FOLDER
from demo_model.make_tokenizer import make_tokenizer
from demo_model.render import CONTROL_TOKENS, TEXT_TOKENS, TOKEN_IDS, VOCAB_SIZE, decode, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
SPECIAL = st.sampled_from(list(TOKEN_IDS))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
@example("<|im_start|>a</think>")
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(TEXT | SPECIAL, max_size=6))
def test_training_encodes_the_same(tokenizer, pieces):
    text = "".join(pieces)
    ids = encode(text).tolist()
    assert ids == tokenizer.encode(text).ids
    assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_token_is_a_byte(tokenizer):
    assert tokenizer.encode("né🙂").ids == list("né🙂".encode())
    assert max(TOKEN_IDS.values()) < VOCAB_SIZE


def test_only_control_tokens_are_hidden(tokenizer):
    assert tokenizer.decode([TOKEN_IDS[token] for token in CONTROL_TOKENS]) == ""
    assert tokenizer.decode([TOKEN_IDS[token] for token in TEXT_TOKENS]) == "".join(TEXT_TOKENS)


def test_the_shipped_file_is_what_the_program_makes(tokenizer):
    assert tokenizer.to_str() == make_tokenizer().to_str()
