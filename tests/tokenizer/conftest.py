from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tokenizer.qwen import Unavailable, qwen_folder


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """A folder with the real Qwen vocabulary. In CI it must be there; elsewhere its tests are skipped, and say why."""
    try:
        return qwen_folder()
    except Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def qwen(qwen_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(qwen_path / "tokenizer.json"))
