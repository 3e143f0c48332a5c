"""Hung ranks are told from idle, slow and starting ones by their answers and the time between checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minisgl.message.control import Progress
from minisgl.process.hang_watch import PING_SECONDS, Hang, HangWatch, RankWatch

LIMIT = 10.0
Answers = Callable[[int, float], Progress | None]  # (rank, time) -> progress; None means no answer


def watch(answers: Answers, *, seconds: float = 100.0, num_ranks: int = 2) -> Hang | None:
    """Return the first rank that hangs."""
    one, at = HangWatch(num_ranks, LIMIT), 0.0
    pinged: set[int] = set()
    while at < seconds:
        for rank in sorted(pinged):
            if (progress := answers(rank, at)) is not None:
                one.answer(rank, progress)
                pinged.remove(rank)
        to_ping, hang = one.look(PING_SECONDS)
        pinged.update(to_ping)
        if hang is not None:
            assert LIMIT <= at <= LIMIT + 8
            return hang
        at += PING_SECONDS
    return None


def stepping(rank: int, at: float) -> Progress:
    """Ten steps a second: rank 0 reads them two steps later, the others do not count what they have read."""
    step = int(10 * at) + 5
    return Progress(step, step - 2) if rank == 0 else Progress(step)


def test_ranks_that_go_on_or_are_idle_do_not_hang() -> None:
    assert watch(stepping) is None
    assert watch(lambda rank, _: Progress(7, 7) if rank == 0 else Progress(7)) is None
    assert watch(lambda rank, at: stepping(rank, at - rank)) is None, "answers of one rank may be older than another's"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_does_not_answer_hangs(stopped: int) -> None:
    def answers(rank: int, at: float) -> Progress | None:
        return None if rank == stopped and at > 5 else stepping(rank, min(at, 5))

    hang = watch(answers)
    assert hang is not None
    assert hang.rank == stopped
    assert hang.text.startswith("it has not answered for")


def test_an_idle_rank_that_does_not_answer_hangs() -> None:
    hang = watch(lambda rank, at: None if rank == 1 and at > 5 else Progress(7, 7))
    assert hang is not None
    assert hang.rank == 1


def test_a_rank_that_answers_and_begins_no_step_hangs() -> None:
    def answers(rank: int, at: float) -> Progress:
        return Progress(9, 7, at) if rank == 0 else Progress(8, 0, at)  # rank 1 never starts step 9

    hang = watch(answers)
    assert hang is not None
    assert (hang.rank, hang.text) == (1, "it has not begun step 8 for 10 s")


def test_the_rank_that_is_late_is_named_when_all_hang() -> None:
    """The others wait for it in a collective, for longer than it has been late."""

    def silent(rank: int, at: float) -> Progress | None:
        return None if rank == 1 and at > LIMIT - 4 else Progress(9, 7)

    def behind(rank: int, at: float) -> Progress:
        return Progress(10, 7) if rank == 0 and at > LIMIT - 4 else Progress(9, 7)

    for answers, text in ((silent, "it has not answered"), (behind, "it has not begun step 9")):
        hang = watch(answers)
        assert hang is not None
        assert (hang.rank, hang.text.partition(" for ")[0]) == (1, text)


def test_a_collective_that_never_ends_is_noticed() -> None:
    hang = watch(lambda rank, _: Progress(9, 7, 3.0 + rank))
    assert hang is not None
    assert hang.text == "step 7 has not ended for 10 s, and no rank computes"


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_step_on_a_cpu_is_no_hang(slow: int) -> None:
    """Other ranks wait for the slow one in a collective, for minutes."""
    assert watch(lambda rank, at: Progress(9, 7, at if rank == slow else 3.0)) is None


def test_an_answer_a_little_late_is_no_hang() -> None:
    assert watch(lambda rank, at: None if int(at) % 8 else stepping(rank, at)) is None


def test_time_between_two_late_checks_does_not_count() -> None:
    """While the machine sleeps, neither the watch nor the ranks run."""
    one = HangWatch(2, LIMIT)
    one.look(PING_SECONDS)
    assert one.look(3600.0)[1] is None


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_lone_rank_is_watched_too(num_ranks: int) -> None:
    assert watch(stepping, num_ranks=num_ranks) is None
    assert watch(lambda _, __: None, num_ranks=num_ranks) is not None


def test_a_limit_of_0_is_no_watch() -> None:
    """Under `--hang-timeout 0` a debugger may halt a rank for hours."""
    one = RankWatch({}, 1, 0.0)
    assert one.pause is None
    assert one.look() is None
    assert RankWatch({}, 1, LIMIT).pause is not None
