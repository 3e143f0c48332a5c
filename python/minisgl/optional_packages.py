"""Imports of optional packages, and messages for those that fail."""

from __future__ import annotations

import importlib
import importlib.util

from minisgl.error_text import summary


def import_error(module: str, package: str) -> str | None:
    """Say in one line why a module of a package of the extra `cuda` cannot be imported, or return None."""
    if not _is_installed(module):
        return f"the package {package} is not installed (pip install 'minisgl[cuda]')"
    try:
        importlib.import_module(module)
    except Exception as error:  # a package built for another torch or driver may raise anything
        return f"the package {package} does not load: {summary(error)}"
    return None


def _is_installed(module: str) -> bool:
    """Return True if the module's distribution is there.

    Several distributions share a namespace such as `cuda`, which has no file.
    """
    top, _, rest = module.partition(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is not None or not rest:
        return spec is not None
    return importlib.util.find_spec(f"{top}.{rest.split('.')[0]}") is not None


def can_be_found(module: str) -> bool:
    """Return True if a module is installed; the packages around it are imported to find it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing too
        return False
