"""Reading a stream of server-sent events as a plain client does."""

from __future__ import annotations

import json
from typing import Any


def parse_events(text: str) -> list[Any]:
    """The data of all events; the stream must end with [DONE], and each event with a blank line."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    assert "data: [DONE]" not in events
    return [json.loads(event.removeprefix("data: ")) for event in events]
