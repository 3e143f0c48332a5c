"""Loading by transformers without its progress bars and warnings, and with its errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisgl.error_text import in_one_line
from minisgl.models.config.model_config import WeightError


@contextmanager
def loading_by_transformers(folder: Path) -> Iterator[None]:
    """Silence transformers; raise WeightError if it cannot load the folder's model in this context."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise WeightError(f"transformers cannot load {folder}: {in_one_line(error)}") from error
