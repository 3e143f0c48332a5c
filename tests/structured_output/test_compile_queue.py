"""The order in which grammars are tried: a pure policy, so no time passes here but what the tests say."""

from __future__ import annotations

import json
import time

import pytest

from minisgl.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from minisgl.structured_output.compile_queue import (
    CHEAP,
    ENTRY_CHARS,
    MAX_CLIENT_CHARS,
    MAX_WAITING_CHARS,
    OLDEST_TURNS,
    CompileQueue,
    QueueFull,
    estimated_cost,
)

HARD = 10**9


def take_all(queue: CompileQueue[str], seconds: float = 0.0) -> list[str]:
    """The order in which one after the other is tried."""
    order = []
    while (item := queue.next()) is not None:
        order.append(item)
        queue.finish(item, seconds)
    return order


def test_a_client_compiles_one_grammar_and_delays_no_other_client() -> None:
    """40 hard ones of one client took all places, and every other waited for them."""
    queue: CompileQueue[str] = CompileQueue()
    for number in range(40):
        queue.add(f"hard {number}", "hostile", cost=HARD, chars=20)
    assert queue.next() == "hard 0"
    assert queue.next() is None, "the client's others wait for it"
    queue.add("honest", "honest", cost=100, chars=20)
    assert queue.next() == "honest"
    queue.finish("honest", 0.1)
    assert queue.next() is None
    for number in range(2):
        queue.add(f"cheap {number}", "hostile", cost=100, chars=20)
    assert queue.next() == "cheap 0", "who shares the client's address may not be hostile"
    assert queue.next() is None
    queue.finish("cheap 0", 0.1)
    assert queue.next() == "cheap 1"
    queue.finish("hard 0", 2.0)
    assert queue.next() == "hard 1"


def test_grammars_that_look_cheap_go_first() -> None:
    """Cheap grammars pass among those of one client too, who may have no key of its own."""
    queue: CompileQueue[str] = CompileQueue()
    for number in range(4):
        queue.add(f"hard {number}", "all", cost=HARD, chars=20)
    queue.add("large", "all", cost=CHEAP * 4, chars=20)
    queue.add("cheap", "all", cost=CHEAP, chars=20)
    queue.add("tiny", "all", cost=1, chars=20)
    assert take_all(queue) == ["cheap", "tiny", "large", "hard 0", "hard 1", "hard 2", "hard 3"]


def test_among_equals_the_client_that_used_less_time_goes_first() -> None:
    queue: CompileQueue[str] = CompileQueue()
    for number in range(3):
        queue.add(f"a{number}", "a", cost=1, chars=20)
    assert queue.next() == "a0"
    queue.finish("a0", 2.0)
    queue.add("b", "b", cost=1, chars=20)
    assert take_all(queue) == ["b", "a1", "a2"]
    queue.add("a3", "a", cost=1, chars=20)  # the client's cost was forgotten with its last entry
    queue.add("c", "c", cost=1, chars=20)
    assert take_all(queue) == ["a3", "c"]


def test_an_expensive_grammar_gets_its_turn_among_cheaper_ones() -> None:
    queue: CompileQueue[str] = CompileQueue()
    queue.add("hard", "a", cost=HARD, chars=20)
    for number in range(100):
        queue.add(f"cheap {number}", "b", cost=1, chars=20)
    assert take_all(queue).index("hard") == OLDEST_TURNS - 1


def test_turns_of_the_oldest_leave_turns_to_newer_grammars() -> None:
    """Forty that are old would otherwise go before all that come."""
    queue: CompileQueue[str] = CompileQueue()
    for number in range(40):
        queue.add(f"hard {number}", "a", cost=HARD, chars=20)
    for number in range(40):
        queue.add(f"cheap {number}", "b", cost=1, chars=20)
    order = take_all(queue)
    assert order.index("cheap 39") < 40 + 40 // (OLDEST_TURNS - 1) + 1


def test_a_shared_grammar_takes_the_turn_of_any_client_that_waits_for_it() -> None:
    queue: CompileQueue[str] = CompileQueue()
    queue.add("hard", "hostile", cost=1, chars=20)
    assert queue.next() == "hard"
    queue.add("common", "hostile", cost=1, chars=20)
    queue.add("common", "honest", cost=1, chars=20)
    assert len(queue) == 1
    assert queue.next() == "common"
    queue.add("other", "honest", cost=1, chars=20)
    assert queue.next() is None, "it was the second client's turn"


def test_removed_grammars_are_not_tried() -> None:
    queue: CompileQueue[str] = CompileQueue()
    queue.add("a", "one", cost=1, chars=MAX_CLIENT_CHARS - ENTRY_CHARS)
    queue.add("b", "two", cost=1, chars=1)
    queue.remove("a")
    assert queue.next() == "b"
    queue.remove("b")  # it is being compiled
    queue.finish("b", 1.0)
    assert (len(queue), queue.next()) == (0, None)
    queue.add("a", "one", cost=1, chars=MAX_CLIENT_CHARS - ENTRY_CHARS)


def test_waiting_grammars_are_limited_in_total_and_per_client() -> None:
    queue: CompileQueue[str] = CompileQueue()
    each = MAX_GRAMMAR_CHARS - ENTRY_CHARS
    of_client, in_all = MAX_CLIENT_CHARS // MAX_GRAMMAR_CHARS, MAX_WAITING_CHARS // MAX_GRAMMAR_CHARS
    for number in range(of_client):
        queue.add(f"0 {number}", "0", cost=1, chars=each)
    with pytest.raises(QueueFull):
        queue.add("one more", "0", cost=1, chars=1)
    for number in range(of_client, in_all):
        client = str(number // of_client)
        queue.add(f"{client} {number}", client, cost=1, chars=each)
    with pytest.raises(QueueFull):
        queue.add("one more", "another", cost=1, chars=1)
    assert len(take_all(queue)) == in_all
    queue.add("one more", "0", cost=1, chars=each)
    empty: CompileQueue[int] = CompileQueue()
    for number in range(MAX_CLIENT_CHARS // ENTRY_CHARS):
        empty.add(number, "a", cost=1, chars=0)
    with pytest.raises(QueueFull):
        empty.add(-1, "a", cost=1, chars=0)


def test_clients_without_grammars_are_forgotten() -> None:
    queue: CompileQueue[int] = CompileQueue()
    for number in range(1000):
        queue.add(number, f"client {number}", cost=1, chars=20)
        queue.add(number, f"other {number}", cost=1, chars=20)
        if number % 2:
            queue.remove(number)
        else:
            assert queue.next() == number
            queue.finish(number, 1.0)
    assert not queue._seconds
    assert not queue._chars


@pytest.mark.parametrize(
    ("grammar", "is_cheap"),
    [
        (Grammar("json_object"), True),
        (Grammar("choice", json.dumps(["yes", "no"])), True),
        (Grammar("regex", "[a-z]{2,8}-[0-9]{1,4}"), True),
        (Grammar("regex", "((a{1000}){1000}){1000}"), False),
        (Grammar("regex", "((((a{99}){99}){99}){99})"), False),
        (Grammar("ebnf", 'root ::= "a"{100} x\nx ::= "b"{100,200}'), False),
        (Grammar("json_schema", '{"type": "string", "pattern": "^[A-Z]{3}$", "maxLength": 100}'), True),
        (Grammar("json_schema", '{"type": "string", "pattern": "^(\\"{200}){200}$"}'), False),
        (Grammar("json_schema", '{"type": "array", "minItems": 100000}'), False),
        (Grammar("regex", "a" * (CHEAP + 1)), False),
    ],
)
def test_counted_repetitions_make_a_short_grammar_expensive(grammar: Grammar, is_cheap: bool) -> None:
    assert (estimated_cost(grammar) <= CHEAP) is is_cheap


def test_a_schemas_text_of_strings_without_an_end_is_estimated_in_linear_time() -> None:
    """A client may send a schema as text, whose cost is estimated before anything has parsed it."""
    begin = time.process_time()
    for text in ('\\"' * (MAX_GRAMMAR_CHARS // 2), '"' + '\\"' * (MAX_GRAMMAR_CHARS // 2 - 1)):
        assert estimated_cost(Grammar("json_schema", text)) <= MAX_GRAMMAR_CHARS
    assert time.process_time() - begin < 1
