"""Steps on the CPU use one thread while other processes want the cores."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from minisgl.engine.cpu_threads import (
    CALM,
    CROWDED,
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    PATIENCE,
    WINDOW,
    StepThreads,
    ThreadPolicy,
    waited_ns,
)
from minisgl.engine.queue import CpuQueue


def stretch(policy: ThreadPolicy, seconds: float, share: float) -> None:
    """Record so many seconds of steps, in windows of a quarter second."""
    for _ in range(round(4 * seconds)):
        policy.record(0.25, 0.25 * share)


def seconds_single(policy: ThreadPolicy) -> float:
    """Seconds of steps with free cores until all threads are used again."""
    for windows in itertools.count(1):
        stretch(policy, 0.25, 0.0)
        if not policy.single:
            return windows / 4
    raise AssertionError


def test_policy_enters_when_the_thread_waits_for_a_core() -> None:
    policy = ThreadPolicy()
    stretch(policy, 60, CROWDED)
    assert not policy.single
    stretch(policy, PATIENCE, CROWDED + 0.01)
    assert policy.single


def test_policy_passes_over_a_burst() -> None:
    """A schema that is compiled beside the steps takes a core for some tenths of a second."""
    policy = ThreadPolicy()
    for _ in range(20):
        stretch(policy, PATIENCE - 0.25, 0.9)
        stretch(policy, 0.25, 0.0)
        assert not policy.single


def test_policy_stays_while_one_thread_waits_too() -> None:
    policy = ThreadPolicy()
    stretch(policy, PATIENCE, 0.9)
    for _ in range(20):
        stretch(policy, 0.25, 0.9)
        stretch(policy, FIRST_BACKOFF - 0.25, 0.0)
        assert policy.single
    stretch(policy, 60, CALM)
    assert policy.single


def test_policy_leaves_after_a_while_of_free_cores() -> None:
    policy = ThreadPolicy()
    stretch(policy, PATIENCE, 0.9)
    assert seconds_single(policy) == FIRST_BACKOFF


def test_policy_backs_off_where_only_all_threads_wait() -> None:
    """Two threads beside one busy process: each return to both is soon regretted."""
    policy, waits = ThreadPolicy(), list[float]()
    stretch(policy, PATIENCE, 0.5)
    for _ in range(8):
        waits.append(seconds_single(policy))
        stretch(policy, 0.25, 0.5)
    assert waits[:4] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF, 8 * FIRST_BACKOFF]
    assert waits[-1] == LONGEST_BACKOFF
    assert policy.single
    stretch(policy, 2 * LONGEST_BACKOFF, 0.0)  # the other process is gone
    stretch(policy, PATIENCE, 0.5)
    assert seconds_single(policy) == FIRST_BACKOFF


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run_windows(threads: StepThreads, count: int) -> list[int]:
    """Run steps that each fill a window; return the number of threads in each."""
    seen = []
    for _ in range(count):
        with threads:
            seen.append(torch.get_num_threads())
            threads._begin -= WINDOW  # the step took so long
        assert torch.get_num_threads() == 2
    return seen


@pytest.mark.usefixtures("two_threads")
def test_threads_are_limited_in_steps_alone_and_come_back() -> None:
    waited = itertools.count(step=int(0.9e9 * WINDOW))  # one of several threads waits 90% of each window
    crowded = StepThreads(lambda: {1: 0, 2: next(waited)})
    assert run_windows(crowded, 4) == [2, 2, 1, 1]
    crowded._read_waited = lambda: {1: 0, 3: 0}
    windows = run_windows(crowded, 2 * round(FIRST_BACKOFF / WINDOW))
    assert windows == sorted(windows)
    assert windows[0] == 1
    assert windows[-1] == 2


@pytest.mark.usefixtures("two_threads")
def test_threads_are_restored_after_a_failed_step() -> None:
    threads = StepThreads()
    threads.policy.single = True
    with pytest.raises(RuntimeError, match="step"), threads:
        raise RuntimeError("step")
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_all_threads_where_the_system_tells_nothing() -> None:
    assert run_windows(StepThreads(dict), 3) == [2, 2, 2]


@pytest.mark.usefixtures("two_threads")
def test_waiting_between_steps_does_not_count() -> None:
    waited = itertools.count(step=10**12)
    threads = StepThreads(lambda: {1: next(waited)})
    for _ in range(3):
        with threads:
            threads._begin -= WINDOW / 2
        threads._end -= 2 * WINDOW  # the engine was idle between the steps
    assert not threads.policy.single


def test_only_threads_that_steps_start_are_watched() -> None:
    """Masks of grammars are computed in threads of their own, which wait for cores that steps have."""
    stop = threading.Event()
    others = [threading.Thread(target=stop.wait) for _ in range(3)]
    queue = CpuQueue()
    try:
        queue.call(lambda: None)  # waits until the queue's thread runs and has its name
        for thread in others:
            thread.start()
        watched = queue.call(waited_ns)
        if not watched:
            pytest.skip("this system does not tell how long a thread waits")
        assert queue.call(threading.get_native_id) in watched
        assert not watched.keys() & {thread.native_id for thread in [*others, threading.main_thread()]}
    finally:
        stop.set()
        queue.close()


@pytest.mark.usefixtures("two_threads")
def test_openmps_threads_are_watched() -> None:
    queue = CpuQueue()
    try:
        queue.call(lambda: torch.set_num_threads(2))  # a thread has a number of its own
        if not queue.call(waited_ns):
            pytest.skip("this system does not tell how long a thread waits")
        queue.call(lambda: torch.ones(1 << 22).mul_(2.0))
        assert len(queue.call(waited_ns)) == 2
    finally:
        queue.close()


def test_waiting_times_of_threads_never_fall() -> None:
    first = waited_ns()
    if not first:
        pytest.skip("this system does not tell how long a thread waits")
    second = waited_ns()
    assert threading.get_native_id() in first
    assert all(0 <= first[thread] <= second[thread] for thread in first.keys() & second)
