"""How addresses are written in URLs."""

from __future__ import annotations


def origin(scheme: str, host: str, port: int) -> str:
    """`scheme://host:port`, with an IPv6 address in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
