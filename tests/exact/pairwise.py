"""A small selection of settings in which every two values of different columns meet (all-pairs testing)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy and deterministic: each row is the one that covers the most pairs still missing."""
    names = list(columns)
    missing = {((a, x), (b, y)) for a, b in combinations(names, 2) for x, y in product(columns[a], columns[b])}
    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=str)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(
                    columns[name], key=lambda value, name=name: _covered(missing, row | {name: value}, names)
                )
        row = {name: row[name] for name in names}
        missing -= set(combinations(row.items(), 2))
        rows.append(row)
    return rows


def _covered(missing: set[Any], row: dict[str, Any], names: list[str]) -> int:
    ordered = [(name, row[name]) for name in names if name in row]
    return sum(pair in missing for pair in combinations(ordered, 2))
