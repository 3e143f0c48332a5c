"""The table of docs/models.md names every family that is served, its tests and its shapes for GPUs, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from gpu.test_gpu_families import SHAPES
from minisgl.models.families.llama import MULTIMODAL
from minisgl.models.load_config import FAMILIES
from models.tiny import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WITH_TOWERS = {
    *MULTIMODAL,
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}  # whose text is tested


def rows() -> list[tuple[set[str], set[str], set[str]]]:
    """Architectures, kinds and shapes of each family, from the page's first table."""
    first_part = PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    lines = [line for line in first_part.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert all(len(row) == 5 for row in cells)
    return [tuple(set(re.findall(r"[\w.-]+", cell)) for cell in row[1:4]) for row in cells]  # type: ignore[misc]


def test_every_architecture_has_its_row() -> None:
    named = [architecture for architectures, _, _ in rows() for architecture in architectures]
    assert sorted(named) == sorted(FAMILIES)


def test_every_kind_and_shape_stands_in_the_row_of_its_family() -> None:
    kinds = [kind for _, kinds, _ in rows() for kind in kinds]
    shapes = [shape for _, _, shapes in rows() for shape in shapes]
    assert sorted(kinds) == sorted(KINDS)
    assert sorted(shapes) == sorted(SHAPES)
    for architectures, kinds_here, shapes_here in rows():
        assert {f"{KINDS[kind][0]}ForCausalLM" for kind in kinds_here} == architectures - WITH_TOWERS
        assert {SHAPES[shape]["architectures"][0] for shape in shapes_here} <= architectures
