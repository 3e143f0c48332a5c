"""A scheduler process without a model: its engine gives tokens at once, or after a fixed time a step.

Everything else is real: SchedulerServer, Scheduler, pages, cache. Tokens are single letters, so that a stream's
characters count its tokens. Set by the environment: MINISGL_STEP_MS, milliseconds a step takes (default 0).
"""

from __future__ import annotations

import os
import string
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import zmq
from tokenizers import Tokenizer

from measuring.pipeline_server import STEP_MS
from minisgl.config import ConfigError
from minisgl.core import AnyArray, Batch, Int32Array, PendingStep, StepResult, pages_for
from minisgl.kvcache.window import WindowGroup
from minisgl.limits import Limits
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_detokenizer import ToDetokenizer
from minisgl.message.to_scheduler import ToScheduler
from minisgl.models.load_config import load_model_config
from minisgl.process.worker import Worker
from minisgl.scheduler.assembly import make_loop
from minisgl.scheduler.process import SchedulerServer
from minisgl.step_cost import StepCost

LETTERS = 4096  # how many are drawn before they repeat


def _result_at(tokens: Int32Array, done_at: float) -> StepResult[AnyArray]:
    """Wait until `done_at`, then return the tokens; without a model there are no log-probabilities."""
    delay = done_at - time.monotonic()
    if delay > 0:
        time.sleep(delay)
    return StepResult(tokens)


class InstantEngine:
    """Executes any plan by waiting. Steps run one behind the other, as on a device."""

    def __init__(
        self, *, letters: Int32Array, step_seconds: float, page_size: int, num_slots: int, limits: Limits
    ) -> None:
        self.page_size = page_size
        self.num_slots = num_slots
        self.num_snapshots = 0
        self.window: WindowGroup | None = None
        self.num_pages = num_slots * pages_for(limits.max_seq_len, page_size)
        self.limits = limits
        self.step_cost: StepCost | None = None  # its steps are equally long
        self._step_seconds = step_seconds
        self._letters = np.random.default_rng(0).choice(letters, LETTERS).astype(np.int32)
        self._free_at = 0.0  # when the last step launched is done

    @property
    def bitmask(self) -> NoReturn:
        raise NotImplementedError("the instant engine serves no grammars")

    def forward(self, batch: Batch) -> None:
        """Do nothing: there is no model."""

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> PendingStep:  # noqa: ARG002
        rows = np.flatnonzero(batch.needs_sample)
        self._free_at = max(self._free_at, time.monotonic()) + self._step_seconds
        return partial(_result_at, self._letters[(batch.step * 7 + rows) % LETTERS], self._free_at)


def letter_ids(folder: Path) -> Int32Array:
    """Return the ids of single letters, which every byte-level vocabulary has."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(letter) for letter in string.ascii_letters]
    found = [token for token in ids if token is not None]
    if not found:
        raise ConfigError("the instant engine needs a tokenizer that has single letters as tokens")
    return np.asarray(found, dtype=np.int32)


def run(worker: Worker) -> None:
    """Run the process, as `minisgl.scheduler.process` does."""
    config = worker.config
    folder = Path(config.engine.model_path)
    model = load_model_config(folder)
    context_len = min(config.engine.max_seq_len or model.max_position_embeddings, model.max_position_embeddings)
    instant = InstantEngine(
        letters=letter_ids(config.tokenizer_folder),
        step_seconds=float(os.environ.get(STEP_MS, "0")) / 1e3,
        page_size=config.engine.page_size,
        num_slots=config.engine.max_running_requests,
        limits=Limits(max_seq_len=context_len, vocab_size=model.vocab_size),
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToScheduler] = Inbox(context, worker.addresses.scheduler, ToScheduler)
    detokenizer: Outbox[ToDetokenizer] = Outbox(context, worker.addresses.detokenizer)
    process = SchedulerServer(make_loop(config.scheduler, instant, model), inbox, detokenizer)
    worker.ready(instant.limits)
    process.run_forever()
