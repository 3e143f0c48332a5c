"""The demo model that comes with the package."""

from __future__ import annotations

from pathlib import Path

import minisgl


def demo_folder() -> Path:
    return Path(minisgl.__file__).parent / "demo"
