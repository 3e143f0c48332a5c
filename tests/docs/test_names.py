"""Files, links and names that the documentation mentions exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from minisgl.cli import make_parser

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "minisgl"
DOCS = ROOT / "docs"
# docs/log.md is left out: it keeps the names of its time.
PAGES = sorted(
    {*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"} - {DOCS / "log.md"}
)
FOREIGN_NAMES = {  # have names of other systems
    *("api.md", "deployment.md", "from-sglang.md", "from-vllm.md", "glossary.md", "structured_output.md"),
}
FOREIGN_FLAGS = {  # of Docker, pip, nvidia-smi, Schemathesis, routers and vLLM
    *("--ipc", "--shm-size", "--stop-timeout", "--time", "--ulimit", "--index-url", "--target", "--query-gpu"),
    *("--checks", "--phases", "--kv-event-source", "--kv-event-replay-source", "--api-server-count"),
    "--max-num-scheduled-tokens",
}
FOLDERS = "python", "csrc", "tests", "benchmark", "tools", "docs", "scripts", "deploy", ".ci"

LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w/.-])[\w-]+(?:/[\w.-]+)*\.(?:py|cu|cuh|md|png)\b(?!\.)")
FOLDER = re.compile(r"[\w-]+(?:/[\w-]+)*/")
TEST = re.compile(r"\btest_\w+")
MODULE = re.compile(r"\bminisgl(?:\.\w+)+")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@cache
def files() -> frozenset[str]:
    """List all files, and all folders with a trailing slash, as paths from the root."""
    found = {path.name for path in ROOT.iterdir()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts:
                found.add(f"{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}")
        found.add(f"{folder}/")
    return frozenset(found)


def exists(path: str) -> bool:
    """True for any path that ends so: pages say `kvcache/radix.py` for a module of the package."""
    return any(file == path or file.endswith(f"/{path}") for file in files())


@cache
def sources() -> dict[Path, str]:
    kinds = "*.py", "*.cu", "*.cuh"
    found = [path for folder in FOLDERS for kind in kinds for path in (ROOT / folder).rglob(kind)]
    return {path: path.read_text(encoding="utf-8") for path in found if path.parent != Path(__file__).parent}


@cache
def words() -> frozenset[str]:
    return frozenset(word for text in sources().values() for word in re.findall(r"\w+", text))


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """Addresses of a page's headings, as the forge makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            yield f"{target}#{anchor}"


def missing_files(page: Path) -> Iterator[str]:
    text = re.sub(r"https?://\S+", "", page.read_text(encoding="utf-8"))
    mentioned = set(FILE.findall(text))
    mentioned |= {code for code in CODE.findall(prose(text)) if FOLDER.fullmatch(code)}
    yield from sorted(path for path in mentioned - {"FILE.png"} if not exists(path))
    yield from sorted(name for name in TEST.findall(text) if name not in words() and not exists(f"{name}.py"))


def missing_modules(page: Path) -> Iterator[str]:
    for dotted in sorted(set(MODULE.findall(page.read_text(encoding="utf-8")))):
        folder, *names = PACKAGE, *dotted.split(".")[1:]
        while names and (folder / names[0]).is_dir():
            folder /= names.pop(0)
        module = folder / "__init__.py"
        if names and (folder / f"{names[0]}.py").exists():
            module = folder / f"{names.pop(0)}.py"
        if any(re.search(rf"\b{name}\b", sources()[module]) is None for name in names):
            yield dotted


def unknown_names(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    own = {word for block in FENCE.findall(text) for word in re.findall(r"\w+", block)}  # names that an example defines
    for code in sorted(set(CODE.findall(prose(text)))):
        call = code.partition("(")[0]
        if not NAME.fullmatch(call) or call.startswith("minisgl.") or FILE.fullmatch(code):
            continue
        owner, _, attribute = call.partition(".")
        if not (words() | own).issuperset(call.split(".")):
            yield code
        elif attribute and owner[0].isupper():
            homes = [source for source in sources().values() if re.search(rf"^class {owner}\b", source, re.MULTILINE)]
            if owner not in own and not any(re.search(rf"\b{attribute.split('.')[0]}\b", source) for source in homes):
                yield code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_mentioned_names_and_files_exist(page: Path) -> None:
    found = {"links": [*broken_links(page)], "files": [*missing_files(page)], "modules": [*missing_modules(page)]}
    assert found == {"links": [], "files": [], "modules": []}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in FOREIGN_NAMES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_names_are_those_of_the_source(page: Path) -> None:
    assert [*unknown_names(page)] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.name.startswith("from-")],  # their flags are compared with the parser
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_flags_are_the_servers_or_a_scripts(page: Path) -> None:
    options = {option for action in make_parser()._actions for option in action.option_strings}
    options |= {flag for text in sources().values() for flag in re.findall(r'"(--[a-z][\w-]*)"', text)}
    named = {flag for code in CODE.findall(prose(page.read_text(encoding="utf-8"))) for flag in FLAG.findall(code)}
    assert named - options - FOREIGN_FLAGS == set()


@pytest.mark.parametrize("page", sorted(DOCS.glob("[1-7]-*.md")), ids=lambda page: page.stem)
def test_what_a_page_walks_through_is_where_its_table_says(page: Path) -> None:
    """Each name in the last column is defined in a file, or in a folder, of the column before."""
    table = page.read_text(encoding="utf-8").partition("| what | where | read |\n")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines()[1:] if line.startswith("|")]
    assert len(rows) > 4
    for _, where, read in rows:
        places = tuple(f"/{place}" for place in CODE.findall(where))
        files = [path for path in sources() if str(path).endswith(places) or f"{path.parent}/".endswith(places)]
        for name in CODE.findall(read):
            for part in name.split("."):
                assert any(defines(path, part) for path in files), f"{name} is not in {where.strip()}"


def defines(path: Path, name: str) -> bool:
    """True if a source file defines a function or class, or of CUDA uses it."""
    definition = rf"^ *(?:async )?(?:def|class) {name}\b" if path.suffix == ".py" else rf"\b{name}\b"
    return re.search(definition, sources()[path], re.MULTILINE) is not None


def test_the_table_of_folders_is_whole_and_right_about_torch() -> None:
    rows = re.findall(
        r"^\| (`.*`) \| .* \| (.*) \|$", (DOCS / "8-reference.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    torch = {name.rstrip("/"): imports for names, imports in rows for name in CODE.findall(names)}
    modules = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert torch.keys() >= modules - {"__init__.py", "__main__.py"}
    for name, says in torch.items():
        files = [PACKAGE / name, *(PACKAGE / name).rglob("*.py")]
        texts = [sources()[file] for file in files if file in sources()]
        imports = any(re.search(r"^(?:import torch|from torch)\b", text, re.MULTILINE) for text in texts)
        assert {"yes": imports, "no": not imports}.get(says, True), name
