"""Query parameters of routes that list something page by page."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl.sampling_params import InvalidRequest


def page_limit(query: Mapping[str, str], most: int) -> int:
    """Return the most entries that a page of a list may have; InvalidRequest if the query's `limit` is none."""
    text = query.get("limit", "20")
    if not (text.isascii() and text.isdecimal() and len(text) < 5 and 1 <= int(text) <= most):
        raise InvalidRequest("limit", f"limit must be between 1 and {most}, not {text:.20}")
    return int(text)
