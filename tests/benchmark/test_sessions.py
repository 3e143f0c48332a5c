"""Sessions, and workloads by name: the same requests at every rate, prefixes as they are meant to be shared."""

from __future__ import annotations

import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from measuring.client import Target
from measuring.load import run_load, sessions_of
from measuring.online_workloads import LENGTHS, SESSIONS, Limits, Trace, make_workload
from measuring.sessions import AGENT, CONVERSATION, SessionShape, plan_session, session_load
from measuring.workload import TimedRequest, UniformLengths

SHAPE = SessionShape(shared=20, first=30, message=10, answer=8, turns=(3, 5), think=2.0)
LIMITS = Limits(vocab_size=1000, context=4096)


def load_of(rate: float = 1.0, count: int = 40, token_seed: int = 1, context: int = 4096) -> list[TimedRequest]:
    return session_load(SHAPE, rate, count, seed=0, token_seed=token_seed, vocab_size=1000, context=context)[0]


def test_every_prompt_begins_with_the_turn_before_it_and_all_with_the_shared_prefix():
    load = load_of()
    assert len(load) == 40
    for request in load:
        assert np.array_equal(request.prompt[:20], load[0].prompt[:20])
        if request.follows is not None:
            before = load[request.follows]
            assert len(request.prompt) > len(before.prompt) + before.max_tokens
            assert np.array_equal(request.prompt[: len(before.prompt)], before.prompt)
    first, second = (session[0][1] for session in sessions_of(load)[:2])
    assert not np.array_equal(first.prompt[20:25], second.prompt[20:25])


def test_sessions_have_their_turns_and_think_times():
    sessions = sessions_of(load_of(count=4000))
    assert all(3 <= len(session) <= 5 for session in sessions[:-1])
    begins = [session[0][1].at for session in sessions]
    assert begins == sorted(begins)
    assert 4000 / begins[-1] == pytest.approx(1.0, rel=0.1)  # requests a second
    thinks = [turn.at for session in sessions for _, turn in session[1:]]
    assert np.mean(thinks) == pytest.approx(2.0, rel=0.1)


def test_a_rate_changes_the_starts_alone_and_a_probe_the_tokens_alone():
    slow, fast, other = load_of(rate=1.0), load_of(rate=4.0), load_of(token_seed=2)
    for one, quick, fresh in zip(slow, fast, other, strict=True):
        assert np.array_equal(one.prompt, quick.prompt)
        assert (one.max_tokens, one.follows) == (quick.max_tokens, quick.follows)
        assert quick.at == pytest.approx(one.at / 4 if one.follows is None else one.at)
        assert (len(one.prompt), one.max_tokens, one.at) == (len(fresh.prompt), fresh.max_tokens, fresh.at)
        assert not np.array_equal(one.prompt[:20], fresh.prompt[:20])


def test_a_session_ends_where_the_context_does():
    turns, cut = plan_session(SHAPE, random.Random(0), context=4096)
    assert (len(turns) >= 3, cut) == (True, False)
    for context in (230, 240, 250):
        load = load_of(context=context, count=200)
        assert all(len(request.prompt) + request.max_tokens <= context for request in load)
    with pytest.raises(ValueError, match="context is 21"):
        plan_session(SHAPE, random.Random(0), context=21)


def test_a_turn_follows_the_last_of_its_session():
    prompt = np.arange(3, dtype=np.int32)
    load = [TimedRequest(5.0, prompt, 1), TimedRequest(0.0, prompt, 1), TimedRequest(1.0, prompt, 1, follows=0)]
    assert [[index for index, _ in session] for session in sessions_of(load)] == [[1], [0, 2]]
    for follows in (0, 3, 7):
        with pytest.raises(ValueError, match="request 3 follows"):
            sessions_of([*load, TimedRequest(1.0, prompt, 1, follows=follows)])


class OneToken(BaseHTTPRequestHandler):
    """Answers every request with one token."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_turn_leaves_when_its_user_has_thought_about_the_answer_before():
    prompt = np.arange(3, dtype=np.int32)
    load = [TimedRequest(0.0, prompt, 1), TimedRequest(0.05, prompt, 1, 0), TimedRequest(0.1, prompt, 1)]
    with ThreadingHTTPServer(("127.0.0.1", 0), OneToken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run = run_load(Target(f"http://127.0.0.1:{server.server_port}", "m"), load, processes=2)
        server.shutdown()
    first, second, other = run.records
    assert [record.error for record in run.records] == [None] * 3
    assert second.due >= first.times[-1] + 0.05
    assert second.sent is not None
    assert second.sent >= second.due - 0.002  # a timer of milliseconds
    assert other.due == 0.1


def test_a_failed_turn_ends_its_session():
    load = load_of(rate=1000.0, count=12)
    run = run_load(Target("http://127.0.0.1:1", "m"), load)
    assert [record.index for record in run.records] == list(range(12))
    for request, record in zip(load, run.records, strict=True):
        wanted = "no connection" if request.follows is None else "a turn before it failed"
        assert wanted in str(record.error)
    assert 0 < run.cpu_share <= 1.5


@pytest.mark.parametrize("name", [*LENGTHS, *SESSIONS])
def test_workloads_by_name(name: str):
    workload = make_workload(name, 12, scale=0.01, think=0.1)
    slow, cut = workload.load(1.0, 0, 1, LIMITS)
    fast, _ = workload.load(8.0, 0, 2, LIMITS)
    assert (len(slow), cut, workload.pace(1.0)) == (12, 0, None)
    for one, other in zip(slow, fast, strict=True):
        assert (len(one.prompt), one.max_tokens) == (len(other.prompt), other.max_tokens)
        if one.follows is None:
            assert one.at == pytest.approx(8 * other.at)


def test_inferencex_shapes():
    rng = random.Random(0)
    drawn = np.array([LENGTHS["8k1k"].draw(rng) for _ in range(2000)])
    assert drawn.max(axis=0).tolist() == [8192, 1024]
    assert (drawn.min(axis=0) >= [6553, 819]).all()
    assert UniformLengths(100, 10).scaled(0.1) == UniformLengths(10, 1)


def test_a_trace_is_searched_around_its_pace(tmp_path):
    file = tmp_path / "mooncake.jsonl"
    row = '{"timestamp": %d, "input_length": 600, "output_length": 4, "hash_ids": [1, %d]}\n'
    file.write_text("".join(row % (500 * number, number + 2) for number in range(9)))
    workload = make_workload(str(file), 9)
    assert isinstance(workload, Trace)
    assert workload.own_rate == pytest.approx(2.25)
    assert workload.rates == pytest.approx((0.5625, 1.6875))
    assert workload.pace(4.5) == pytest.approx(2.0)
    load, _ = workload.load(4.5, 0, 1, LIMITS)
    assert load[-1].at == pytest.approx(2.0)
    assert np.array_equal(load[0].prompt[:512], load[1].prompt[:512])
    with pytest.raises(ValueError, match="no rate follows"):
        make_workload(str(file), 1)
    with pytest.raises(ValueError, match="has 9 requests, 10 are asked for"):
        make_workload(str(file), 10)
    with pytest.raises(OSError):
        make_workload("no such file", 9)


def test_scaled_sessions_keep_their_turns():
    assert CONVERSATION.scaled(0.1, 0.5) == SessionShape(50, 30, 15, 30, (2, 10), 5.0)
    assert AGENT.mean_turns == 16
