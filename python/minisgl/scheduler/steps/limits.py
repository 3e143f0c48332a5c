"""Bounds on the next steps after the device had too little memory for one. Pure."""

from __future__ import annotations

from minisgl.core import Batch

STEPS_TO_RECOVER = 64  # completed steps after which lowered bounds are first doubled
SMALL_STEP = 64  # tokens; the bound on prefills is not lowered below this


class StepLimits:
    """Bounds on the prefill tokens of a step and on the number of running requests.

    A failed step halves what made it large: the tokens of its prefills or, if these are few, the number of its
    requests. If a step fails after the bounds have risen, the next rise takes twice as many steps, so that requests
    that lost their work can finish.
    """

    def __init__(self, max_prefill_tokens: int, max_running: int) -> None:
        self._configured = max_prefill_tokens, max_running
        self.prefill_tokens = max_prefill_tokens
        self.running = max_running
        self._completed = 0  # steps since the bounds were changed
        self._backoff = STEPS_TO_RECOVER
        self._has_risen = False

    def lower(self, batch: Batch) -> None:
        """Lower a bound so that the next steps are smaller than this one, which failed."""
        prefill_tokens = int(batch.query_lens[batch.query_lens > 1].sum())
        if prefill_tokens > SMALL_STEP:
            self.prefill_tokens = max(prefill_tokens // 2, SMALL_STEP)
        else:
            self.running = max(len(batch.slots) // 2, 1)
        self._completed = 0
        if self._has_risen:
            self._backoff, self._has_risen = 2 * self._backoff, False

    def completed(self) -> None:
        """Count a completed step, and raise lowered bounds after enough of them."""
        self._completed += 1
        if self._completed < self._backoff:
            return
        self._completed = 0
        if (self.prefill_tokens, self.running) == self._configured:
            self._backoff, self._has_risen = STEPS_TO_RECOVER, False
            return
        most_tokens, most_running = self._configured
        self.prefill_tokens = min(2 * self.prefill_tokens, most_tokens)
        self.running = min(2 * self.running, most_running)
        self._has_risen = True


def is_small(batch: Batch) -> bool:
    """Return True if a step has one request and few tokens, so that it cannot be made smaller."""
    return len(batch.slots) == 1 and batch.num_tokens <= SMALL_STEP
