from __future__ import annotations

import pytest

from structured_output.drawing import Drawer, trained_tokenizer


@pytest.fixture(scope="session")
def drawer() -> Drawer:
    return Drawer(trained_tokenizer())
