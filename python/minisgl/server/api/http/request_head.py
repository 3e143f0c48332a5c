"""Readings of a request's head that every layer needs: its route, and the API whose words its client reads."""

from __future__ import annotations

from starlette.types import Scope

ANTHROPIC_ROUTE = "/v1/messages"  # and all below it


def route_path(scope: Scope) -> str:
    """Return the path as the routes know it."""
    path: str = scope["path"]
    root: str = scope["root_path"]
    return path.removeprefix(root) if path.startswith(root + "/") else path


def speaks_anthropic(scope: Scope) -> bool:
    """True if the client reads errors in Anthropic's shape."""
    path = route_path(scope)
    return path == ANTHROPIC_ROUTE or path.startswith(f"{ANTHROPIC_ROUTE}/")
