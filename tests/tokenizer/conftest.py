from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tokenizer.qwen import Unavailable, qwen_folder


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """A folder with the real Qwen vocabulary."""
    try:
        return qwen_folder()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def qwen(qwen_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(qwen_path / "tokenizer.json"))
