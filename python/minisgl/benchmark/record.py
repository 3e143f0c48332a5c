"""What a load generator learns of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds after the start of the load."""

    index: int  # in the load
    due: float  # when it had to be sent
    prompt_tokens: int
    max_tokens: int
    sent: float | None = None
    times: array[float] = field(default_factory=lambda: array("d"))  # when each event with text came
    sizes: array[int] = field(default_factory=lambda: array("i"))  # characters in each of them
    completion_tokens: int = 0  # as the server counts, or else the events
    cached_tokens: int = 0
    error: str | None = None

    @property
    def begin(self) -> float:
        """What latencies count from: the time it was due, or sent if a coarse timer sent it a moment early."""
        return self.due if self.sent is None else min(self.due, self.sent)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begin

    @property
    def end_to_end(self) -> float:
        return self.times[-1] - self.begin

    @property
    def time_per_token(self) -> float | None:
        """Mean time between tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)
