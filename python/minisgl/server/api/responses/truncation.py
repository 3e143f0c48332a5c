"""Makes a conversation fit the context by leaving out its oldest turns, for `truncation: auto`.

A turn begins with a message of the user: what is left of a conversation never begins with the output of a call that is
gone. The system messages at its head stay.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from minisgl.message.to_tokenizer import ChatPrompt
from minisgl.server.api.bodies.conversation import Message
from minisgl.server.api.requests.open_request import Job

Count = Callable[[ChatPrompt], Awaitable[int | None]]  # of a prompt's tokens; None: more than can be counted


async def fitted(job: Job, count: Count, max_seq_len: int) -> tuple[Job, int]:
    """Return the job of a conversation with as many of its last turns as fit, and the number of messages left out.

    If not even the last turn fits, the job stays as it is, to be refused as any that is too long.
    """
    (prompt,) = job.prompts
    assert isinstance(prompt, ChatPrompt)
    wanted = 1 if job.sampling.max_tokens is None else job.sampling.max_tokens

    starts = _turns(prompt.messages)

    def without(turns: int) -> ChatPrompt:
        kept = prompt.messages if not turns else [*prompt.messages[: starts[0]], *prompt.messages[starts[turns] :]]
        return msgspec.structs.replace(prompt, messages=kept)

    async def fits(turns: int) -> bool:
        tokens = await count(without(turns))
        return tokens is not None and tokens + wanted <= max_seq_len

    if await fits(0):
        return job, 0
    fewest, end = 1, len(starts)  # as few turns are left out as can be; at `end` none would be left
    while fewest < end:
        middle = (fewest + end) // 2
        if await fits(middle):
            end = middle
        else:
            fewest = middle + 1
    if fewest >= len(starts):
        return job, 0
    return replace(job, prompts=[without(fewest)]), starts[fewest] - starts[0]


def _turns(messages: Sequence[Message]) -> list[int]:
    """Return where each turn begins: the first behind the head, the others at messages of the user."""
    roles = [message["role"] for message in messages]
    head = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    return [head, *(index for index in range(head + 1, len(roles)) if roles[index] == "user")]
