"""Clients take turns, by the time that they have used."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from minisgl.tokenizer.turns import MAX_IDLE, Turns


def handle(turns: Turns[int], seconds: dict[str, float], count: int) -> list[tuple[str, int]]:
    """Handle so many items, each of which takes its client's seconds."""
    handled = []
    for _ in range(count):
        client, item = turns.next()
        handled.append((client, item))
        turns.charge(client, seconds[client])
    return handled


def test_one_who_comes_waits_for_one_item_of_another_client() -> None:
    turns: Turns[int] = Turns()
    for key in range(1000):
        turns.add(key, "hostile", key)
    assert handle(turns, {"hostile": 2.0}, 5) == [("hostile", key) for key in range(5)]
    for key in (2000, 2001, 2002):
        turns.add(key, "honest", key)
    seconds = {"hostile": 2.0, "honest": 0.001}
    order = handle(turns, seconds, 4)
    assert [item for client, item in order if client == "honest"] == [2000, 2001, 2002]
    assert order.count(("hostile", 5)) == 1


def test_time_is_shared_evenly_and_idleness_earns_nothing() -> None:
    turns: Turns[int] = Turns()
    keys = iter(range(10**6))
    for _ in range(300):
        turns.add(next(keys), "a", 0)
    handle(turns, {"a": 1.0}, 200)
    for _ in range(100):
        turns.add(next(keys), "b", 0)
    order = [client for client, _ in handle(turns, {"a": 1.0, "b": 1.0}, 100)]
    assert Counter(order) == {"a": 50, "b": 50}


def test_one_prompt_after_the_other_takes_no_more_than_many_at_once() -> None:
    """A client that sends its next prompt when the last one is done must not start anew each time."""
    turns: Turns[int] = Turns()
    keys = iter(range(10**6))
    turns.add(next(keys), "slow", 0)
    handle(turns, {"slow": 2.0}, 1)
    for _ in range(1000):
        turns.add(next(keys), "fast", 0)
    turns.add(next(keys), "slow", 0)
    handled = []
    while turns:
        client, _ = turns.next()
        turns.charge(client, {"slow": 2.0, "fast": 0.001}[client])
        handled.append(client)
        if client == "slow" and handled.count("fast") < 1000:
            turns.add(next(keys), "slow", 0)
    assert handled.count("fast") == 1000
    assert handled.count("slow") == 2


def test_clients_that_have_left_are_forgotten_once_the_others_have_used_as_much() -> None:
    turns: Turns[int] = Turns()
    keys = iter(range(10**6))
    for _ in range(300):
        turns.add(next(keys), "steady", 0)
    for guest in range(200):
        turns.add(next(keys), f"guest {guest}", 0)
        for _ in range(2):
            client, _ = turns.next()
            turns.charge(client, 1.0 if client == "steady" else 3.0)
        assert len(turns._order) < 10


def test_new_clients_without_end_leave_nothing_behind() -> None:
    """Somebody always waits, and each turn's client is new. Those who came before were all remembered."""
    turns: Turns[int] = Turns()
    turns.add(0, "heavy", 0)
    turns.add(1, "heavy", 1)
    handle(turns, {"heavy": 2.0}, 1)
    most = 0
    for guest in range(2, 3 * MAX_IDLE):
        turns.add(guest, f"guest {guest}", guest)
        assert handle(turns, {f"guest {guest}": 1.0}, 1) == [(f"guest {guest}", guest)]
        most = max(most, len(turns._order))
    assert most == MAX_IDLE + 1, "the limit was reached"
    assert turns._known == {client for _, _, client in turns._order}
    turns.add(0, "guest", 0)
    assert handle(turns, {"guest": 1.5, "heavy": 2.0}, 2) == [("guest", 0), ("heavy", 1)], "heavy is not forgotten"
    assert not turns._order


def test_removed_items_are_not_handled_and_nothing_is_left() -> None:
    turns: Turns[int] = Turns()
    for key in range(10):
        turns.add(key, "ab"[key % 2], key)
    turns.remove([0, 3, 3, 99, 9])
    assert len(turns) == 7
    handled = {item for _, item in handle(turns, {"a": 1.0, "b": 0.5}, 7)}
    assert handled == {1, 2, 4, 5, 6, 7, 8}
    assert len(turns) == 0
    assert not turns._order
    assert not turns._known


def test_a_turn_does_not_visit_all_who_wait() -> None:
    lookups = 0

    class Client(str):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal lookups
            lookups += 1
            return super().__hash__()

    turns: Turns[int] = Turns()
    clients = [Client(number) for number in range(5000)]
    for key in range(10_000):
        turns.add(key, clients[key % 5000], key)
    lookups = 0
    for _ in range(100):
        turns.charge(turns.next()[0], 1.0)
    assert lookups < 100 * 20


def test_clients_that_have_used_the_same_are_handled_in_the_order_in_which_they_came() -> None:
    turns: Turns[int] = Turns()
    for key, client in enumerate("zyabx"):
        turns.add(key, client, key)
    assert [client for client, _ in handle(turns, dict.fromkeys("zyabx", 1.0), 5)] == list("zyabx")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), max_size=60), st.sets(st.integers(0, 60)))
def test_each_clients_items_keep_their_order(items: list[tuple[str, float]], removed: set[int]) -> None:
    turns: Turns[int] = Turns()
    for key, (client, _) in enumerate(items):
        turns.add(key, client, key)
    turns.remove(removed)
    handled = []
    while turns:
        client, key = turns.next()
        assert items[key][0] == client
        handled.append(key)
        turns.charge(client, items[key][1])
    assert sorted(handled) == [key for key in range(len(items)) if key not in removed]
    for client in "abc":
        own = [key for key in handled if items[key][0] == client]
        assert own == sorted(own)
