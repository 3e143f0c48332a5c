"""Applies the result of a step: its tokens go into the slot table and the output, and complete requests end."""

from __future__ import annotations

import logging

import numpy as np

from minisgl.core import NO_TOKEN, AnyArray, Batch, ErrorCause, IndexArray, Int32Array, StepResult
from minisgl.message.packed_ids import pack_ids
from minisgl.message.to_detokenizer import Pooled
from minisgl.scheduler.requests.lifecycle import RequestLifecycle
from minisgl.scheduler.requests.request import Request
from minisgl.scheduler.requests.table import SlotTable
from minisgl.scheduler.steps.token_scores import report_logprobs, report_prompt
from minisgl.structured_output.protocol import Grammars, MatcherStatus

logger = logging.getLogger(__name__)

# Statuses of a matcher that end its request with an error, and the cause that the client is told.
ERRORS: dict[MatcherStatus, ErrorCause | None] = {
    MatcherStatus.FAILED: None,
    MatcherStatus.UNUSABLE: "grammar_unusable",
    MatcherStatus.TOO_LARGE: "grammar_too_large",
    MatcherStatus.EXCLUDED: "no_allowed_token",
}


class StepResults:
    """Applies the results of completed steps, in the order of the steps."""

    def __init__(
        self, table: SlotTable, requests: RequestLifecycle, eos_token_ids: tuple[int, ...], grammars: Grammars
    ) -> None:
        self._table = table
        self._requests = requests
        self._eos = np.asarray(eos_token_ids, dtype=np.int32)
        self._grammars = grammars
        self._has_logged = False  # that a model's output is not finite

    def take(self, batch: Batch, result: StepResult[AnyArray]) -> None:
        """Report tokens or vectors of the rows that sample, and end the requests that are complete."""
        slots = batch.slots[batch.needs_sample].astype(np.intp)
        if result.vectors is not None:
            self._take_vectors(slots, result.vectors)
        else:
            self._take_tokens(batch, slots, result)

    def _take_vectors(self, slots: IndexArray, vectors: AnyArray) -> None:
        """Report the vectors [S, size] of whole prompts, whose requests end with them."""
        for slot, vector in zip(slots.tolist(), vectors, strict=True):
            if self._table.live[slot]:
                request = self._table.request(slot)
                if not np.isfinite(vector).all():
                    self._fail(request)
                    continue
                self._requests.output.pooled.append(Pooled(request.seq_id, vector.astype("<f4").tobytes()))
                self._table.known_len[slot] += 1  # the vector counts as the only token
                self._requests.end(request, "stop")

    def _take_tokens(self, batch: Batch, slots: IndexArray, result: StepResult[AnyArray]) -> None:
        table, tokens = self._table, result.tokens
        if batch.logprobs is not None:
            report_logprobs(self._requests.output, table, batch, batch.logprobs, result)
        live = table.live[slots]  # tokens of requests that ended while the step ran are dropped
        slots, tokens = slots[live], tokens[live]
        is_finite = tokens != NO_TOKEN
        failed, slots, tokens = slots[~is_finite], slots[is_finite], tokens[is_finite]
        table.tokens[slots, table.known_len[slots]] = tokens
        table.known_len[slots] += 1
        for slot in failed.tolist():  # now that the others have their tokens, which prove pages that they share
            self._fail(table.request(slot))
        self._requests.output.seq_ids = table.seq_id[slots].tolist()
        self._requests.output.tokens = pack_ids(tokens)

        stop = (tokens[:, None] == self._eos).any(axis=1) & table.stops_at_eos[slots]
        for row in np.flatnonzero(table.own_stop_ids[slots]).tolist():
            stop[row] |= int(tokens[row]) in self._table.request(int(slots[row])).sampling.stop_token_ids
        full = table.known_len[slots] == table.max_len[slots]
        ended = set(np.flatnonzero(stop | full).tolist())
        by_grammar = self._advance(slots, tokens) if batch.constrained else {}
        for row in sorted(ended | by_grammar.keys()):
            request = self._table.request(int(slots[row]))
            status = by_grammar.get(row)
            if status is not None and status in ERRORS:
                self._requests.end(request, "error", stop_token=int(tokens[row]), cause=ERRORS[status])
            elif stop[row]:
                self._requests.end(request, "stop", stop_token=int(tokens[row]))
            elif status is not None:
                self._requests.end(request, "stop")
            else:
                self._requests.end(request, "length")
        if not batch.needs_sample.all():
            self._end_unsampled(batch)

    def _advance(self, slots: IndexArray, tokens: Int32Array) -> dict[int, MatcherStatus]:
        """Advance the matchers by these tokens; return the status, by row, of those that cannot continue."""
        rows = np.flatnonzero(self._table.constrained(slots))
        matchers = [
            matcher for slot in slots[rows].tolist() if (matcher := self._table.request(slot).matcher) is not None
        ]
        statuses = self._grammars.advance(matchers, tokens[rows])
        found = zip(rows.tolist(), statuses, strict=True)
        return {row: status for row, status in found if status is not MatcherStatus.OPEN}

    def _fail(self, request: Request) -> None:
        """End a request for which the model computed NaN or infinite values."""
        self._requests.end(request, "error", cause="logits_not_finite")
        if not self._has_logged:
            self._has_logged = True
            logger.error(
                "the model computed NaN or infinite values for the request %s, which ends with an error; its weights "
                "may be damaged, or too large for the dtype. Further cases are not logged",
                request.request_id or request.seq_id,
            )

    def _end_unsampled(self, batch: Batch) -> None:
        """End the requests without output tokens (max_tokens = 0) whose last chunk was in this step."""
        table, slots = self._table, batch.slots.astype(np.intp)
        done = table.live[slots] & (table.known_len[slots] == table.max_len[slots])
        done &= batch.start_pos + batch.query_lens == table.max_len[slots] - 1
        for slot in slots[done].tolist():
            request = self._table.request(slot)
            if any(np.isnan(scores.chosen).any() for scores in request.prompt_scores):
                self._fail(request)
                continue
            if request.prompt_scores:
                report_prompt(self._requests.output, table, request)
            self._requests.end(request, "length")
