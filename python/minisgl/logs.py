"""How every process logs: to stderr, a line an event."""

from __future__ import annotations

import logging


def set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for chatty in ("httpx", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
