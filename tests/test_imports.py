"""Imports between the package's folders point one way (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import minisgl

PACKAGE = Path(minisgl.__file__).parent
# An interface that the folder above owns and the one below implements.
EXCEPTIONS = {("grammar", "minisgl.scheduler.constraints")}


def imported(node: ast.AST) -> Iterator[str]:
    """The package's modules that this imports when it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("minisgl."):
            yield child.module or ""
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name.startswith("minisgl."))
        yield from imported(child)


def test_imports_point_one_way() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imported(ast.parse(path.read_text())):
            if (folder, module) not in EXCEPTIONS and module.split(".")[1] != folder:
                edges[folder].add(module.split(".")[1])
    order = list(TopologicalSorter(edges).static_order())  # CycleError names the folders
    assert order.index("kernel") < order.index("engine") < order.index("scheduler") < order.index("__main__")
