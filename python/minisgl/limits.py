"""Limits of one request. Apart from `core`, so that a command line is read without NumPy."""

from __future__ import annotations

import msgspec

MAX_CHOICES = 64
MAX_STOP_STRINGS = 32
MAX_LOGPROBS = 20
MAX_OPENAI_TEMPERATURE = 2


class Limits(msgspec.Struct, frozen=True):
    """Limits of one running engine, made by the scheduler when it is ready, known to all processes.

    The API server's have what its operator allows one request.
    """

    max_seq_len: int  # tokens, prompt and output together
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    max_choices: int = MAX_CHOICES  # choices of a prompt
    max_stop_strings: int = MAX_STOP_STRINGS
    max_logprobs: int = MAX_LOGPROBS  # alternatives to a token
    max_new_tokens: int | None = None  # cap on every answer, whatever its request says; None: the context

    @property
    def max_token_id(self) -> int:
        """The largest id of the vocabulary."""
        return self.vocab_size - 1

    @property
    def context_limit(self) -> str:
        """End of a refusal for length, in OpenAI's words, because clients look for them."""
        return f"this model's maximum context length is {self.max_seq_len} tokens, the answer included"


UNLIMITED = Limits(max_seq_len=2**31 - 1, vocab_size=2**31 - 1)  # where no engine is known
