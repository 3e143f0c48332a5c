"""Facts of a request's head that several middlewares or routes need: its route and its client's API."""

from __future__ import annotations

from starlette.types import Scope

ANTHROPIC_ROUTE = "/v1/messages"  # and all below it
MODELS_ROUTE = "/v1/models"  # and all below it: Anthropic's clients have the same route as OpenAI's
ANTHROPIC_HEADER = b"anthropic-version"


def route_path(scope: Scope) -> str:
    """Return the path without the `root_path` of a reverse proxy, as routes are declared."""
    path: str = scope["path"]
    root: str = scope["root_path"]
    return path.removeprefix(root) if path.startswith(root + "/") else path


def speaks_anthropic(scope: Scope) -> bool:
    """Return True if the client expects answers in Anthropic's form."""
    path = route_path(scope)
    if path == MODELS_ROUTE or path.startswith(f"{MODELS_ROUTE}/"):
        return any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])
    return path == ANTHROPIC_ROUTE or path.startswith(f"{ANTHROPIC_ROUTE}/")
