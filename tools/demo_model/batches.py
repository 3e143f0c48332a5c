"""Training batches: documents drawn on the fly, packed one after another into rows of fixed length.

Worker processes generate and pack; the trainer tells them its progress through a shared number, from which
they take the longest context (short ones first: a model that has not yet learned to look back learns
nothing from looking far).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from demo_model.case import Case
from demo_model.render import Document, render_document
from demo_model.skills import SKILLS, completion
from demo_model.skills.setting import with_setting
from demo_model.source import Source

LONGEST_DOCUMENT = 3072
_SHORT, _LONG = 200, 2000  # longest context (characters) at the start and after the curriculum
_CURRICULUM = (0.04, 0.25)  # the part of the training during which it grows

_WEIGHTS = {
    "recall": 0.27,
    "copy": 0.12,
    "tools": 0.12,
    "json": 0.08,
    "product": 0.09,
    "arithmetic": 0.05,
    "counting": 0.07,
    "weekdays": 0.02,
    "spelling": 0.05,
    "thinking": 0.05,
    "unknown": 0.06,
    "completion": 0.02,
}


class Batch(NamedTuple):
    """Documents in one row. `starts` are the places where they begin, and (repeated) the row's length.

    Made of arrays, not of tensors: those would travel between processes by file descriptors, which takes
    longer than a training step.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]  # [row]
    learned: np.ndarray[Any, np.dtype[np.bool_]]  # [row], which tokens are to be predicted
    starts: np.ndarray[Any, np.dtype[np.int32]]  # [most_documents(row) + 1]

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        parts = [torch.from_numpy(part) for part in self]
        if device.type == "cuda":
            return [part.pin_memory().to(device, non_blocking=True) for part in parts]
        return parts


def longest_context(progress: float) -> int:
    """The longest context, given the part of the training that is done."""
    begin, end = _CURRICULUM
    share = min(max((progress - begin) / (end - begin), 0.0), 1.0)
    return round(float(_SHORT * (_LONG / _SHORT) ** share))


def training_case(source: Source) -> Case:
    """A case of any skill in any setting, from the training side."""
    if source.chance(0.01):
        return completion.story(source)
    skill = source.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    return with_setting(source, SKILLS[skill](source), turns=4)


def documents(rng: random.Random, context: Callable[[], int]) -> Iterator[Document]:
    """Training documents without end."""
    while True:
        document = render_document(training_case(Source(rng, context=context())))
        if len(document.ids) <= LONGEST_DOCUMENT:
            yield document


def pack(stream: Iterator[Document], row: int) -> Iterator[Batch]:
    """Rows of exactly `row` tokens; what the next document does not fill is padding."""
    document = next(stream)
    while True:
        tokens = np.zeros(row, dtype=np.int32)
        learned = np.zeros(row, dtype=np.bool_)
        starts = np.full(most_documents(row) + 1, row, dtype=np.int32)
        used = count = 0
        while used + len(document.ids) <= row and count < len(starts) - 2:
            size = len(document.ids)
            tokens[used : used + size] = document.ids
            learned[used : used + size] = document.learned
            starts[count] = used
            used, count = used + size, count + 1
            document = next(stream)
        starts[count] = used
        yield Batch(tokens, learned, starts)


def most_documents(row: int) -> int:
    """A bound on the documents of a row; it fixes the shape of `Batch.starts`."""
    return max(row // 96, 4)


class _Stream(IterableDataset[Batch]):
    def __init__(self, seed: str, row: int, progress: torch.Tensor) -> None:
        self._seed, self._row, self._progress = seed, row, progress

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = random.Random(f"{self._seed}/{worker.id if worker else 0}")
        return pack(documents(rng, lambda: longest_context(float(self._progress))), self._row)


def _as_is(batch: Any) -> Any:
    return batch


def batches(seed: str, row: int, progress: torch.Tensor, workers: int) -> Iterator[Batch]:
    """Batches without end. `progress` is a shared tensor of one number from 0 to 1, set by the trainer."""
    stream = _Stream(seed, row, progress)
    prefetch = 4 if workers else None
    return iter(DataLoader(stream, batch_size=None, num_workers=workers, prefetch_factor=prefetch, collate_fn=_as_is))
