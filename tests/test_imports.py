"""Imports between the package's folders point one way (docs/8-reference.md)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import minisgl

PACKAGE = Path(minisgl.__file__).parent


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
            if module.split(".")[1] != folder:
                edges[folder].add(module.split(".")[1])
    order = list(TopologicalSorter(edges).static_order())  # CycleError names the folders
    assert order.index("kernel") < order.index("engine") < order.index("scheduler") < order.index("__main__")


def test_neither_the_api_process_nor_the_detokenizer_imports_torch_or_a_grammar_compiler() -> None:
    code = "import sys, minisgl.{}; print(*({{'torch', 'llguidance', 'tokenizers'}} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    heavy = {}
    for module in ("server.api.api_process", "tokenizer.detokenizer_worker", "structured_output.trial_process"):
        command = [sys.executable, "-c", code.format(module)]
        heavy[module] = set(subprocess.check_output(command, env=environment, text=True).split())
    assert heavy["server.api.api_process"] == set()
    assert heavy["tokenizer.detokenizer_worker"] <= {"tokenizers"}
    assert "llguidance" in heavy["structured_output.trial_process"]  # proves that the test would see such an import


def test_the_packages_of_the_extra_shell_are_imported_on_a_terminal_alone() -> None:
    importers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and re.search(r"\b(prompt_toolkit|rich|markdown_it)\b", ast.unparse(node))
    }
    assert importers == {"shell/terminal.py"}
