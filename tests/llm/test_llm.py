"""The offline interface, with the demo model: what programs written for Mini-SGLang use, and what it refuses."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.config import ConfigError, EngineConfig, ServerConfig
from minisgl.core import PendingStep, StepResult
from minisgl.llm import LLM, SamplingParams, rank_processes
from minisgl.llm.interrupts import Interrupts
from minisgl.llm.rank_processes import RankLost, RankProcesses
from minisgl.message.control import Start
from minisgl.models.hub import demo_folder
from minisgl.process.child import Child, start_worker
from minisgl.sampling_params import Grammar, InvalidRequest
from support import failing_rank
from support.server import PATIENCE, is_alive
from support.unclosed import PARAMS, run_unclosed

QUESTION = [{"role": "user", "content": "What is Minisgl?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_running_req=4, num_page_override=600, page_size=4) as llm:
        yield llm
        llm.check_idle()


def test_texts_ids_and_one_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    texts = llm.generate(["abc", "xyz"], params)
    ids = llm.generate([llm.tokenizer.encode(text).tolist() for text in ("abc", "xyz")], [params, params])
    assert [one["token_ids"] for one in texts] == [one["token_ids"] for one in ids]
    assert llm.generate("abc", params)[0]["text"] == texts[0]["text"]
    assert llm.generate([], params) == []


def test_chat_and_stop_strings(llm: LLM) -> None:
    whole = llm.chat(QUESTION, use_tqdm=True)[0]
    assert "inference server" in whole["text"]
    assert whole["finish_reason"] == "stop"
    cut = llm.chat([QUESTION, QUESTION], SamplingParams(stop=("server",)))
    assert [one["text"] for one in cut] == [whole["text"].partition("server")[0]] * 2
    assert cut[0]["cached_tokens"] > 0


def test_chat_gives_tools_and_variables_to_the_template(llm: LLM) -> None:
    weather = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    question = [{"role": "user", "content": [{"type": "text", "text": "Tell me the weather in Paris."}]}]
    tools = [{"type": "function", "function": weather}]
    (answer,) = llm.chat(question, SamplingParams(max_tokens=100), tools=tools)
    assert '"name": "get_weather"' in answer["text"]
    params = SamplingParams(max_tokens=8)
    thoughts = [
        llm.chat(question, params, enable_thinking=True)[0]["text"],
        llm.chat(question, params, chat_template_kwargs={"enable_thinking": True})[0]["text"],
    ]
    assert thoughts[0] == thoughts[1] != llm.chat(question, params)[0]["text"]


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        ("hi", "messages must be a list of messages"),
        ({"role": "user", "content": "hi"}, "messages must be a list of messages"),
        ([*QUESTION, "hi"], "messages must be a list of messages"),
        (None, "messages must be a list of messages"),
        ([], "at least one message"),
        ([{"role": "user"}], "messages.0.content is required"),
        ([{"role": "bot", "content": "hi"}], "messages.0.role must be one of"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts are supported, not 'image_url'"),
    ],
)
def test_chat_refuses_what_the_server_refuses(llm: LLM, messages: Any, refusal: str) -> None:
    with pytest.raises(InvalidRequest, match=refusal):
        llm.chat(messages)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [{"max_tokens": 1}], 5])
def test_sampling_params_of_another_type_are_named(llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, or a list"):
        llm.generate("abc", params)


def test_words_that_are_not_wanted(llm: LLM) -> None:
    plain, without = llm.chat([QUESTION] * 2, [SamplingParams(), SamplingParams(bad_words=("server", "infer"))])
    assert "inference server" in plain["text"]
    assert "server" not in without["text"]
    assert "infer" not in without["text"]


def test_logprobs_of_text_and_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=0)
    plain, scored, alone = llm.generate(
        ["Minisgl is"] * 3,
        [SamplingParams(max_tokens=20), params, SamplingParams(max_tokens=0, prompt_logprobs=0)],
    )
    assert "logprobs" not in plain
    assert scored["token_ids"] == plain["token_ids"]
    assert b"".join(one.chosen.text for one in scored["logprobs"]).decode() == scored["text"]
    assert all(one.chosen == one.top[0] for one in scored["logprobs"])  # greedy; the same bits
    assert b"".join(one.chosen.text for one in scored["prompt_logprobs"]) == b"inisgl is"
    assert alone["prompt_logprobs"] == scored["prompt_logprobs"]
    assert (alone["text"], alone["token_ids"], alone["finish_reason"]) == ("", [], "length")


def test_bad_requests_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="at least one token"):
        llm.generate([[]])
    with pytest.raises(InvalidRequest, match="token id 1000000 is outside the vocabulary: ids are 0 to"):
        llm.generate([[10**6]])
    with pytest.raises(InvalidRequest, match="top_p"):
        llm.generate(["a"], SamplingParams(top_p=0.0))
    with pytest.raises(ValueError, match="sampling parameters"):
        llm.generate(["a", "b"], [SamplingParams()])
    llm.check_idle()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_backend": "fa,fi,torch"}, "--attn"),
        ({"max_seq_len_override": 10**6}, "positions end at 4096"),
        ({"page_size": 0}, "--page-size"),
        ({"tp_size": 3}, "tensor parallelism"),
        ({"dtype": "half"}, "^dtype must be one of auto, float16, bfloat16, float32, not half"),
        ({"dtype": torch.float64}, "^dtype must be one of .*, not float64"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of auto, fp8_e4m3, not fp8"),
        ({"cache_type": "tree"}, "^cache_type must be one of radix, naive"),
        ({"batch_policy": "decode-first"}, "batch_policy must be one of"),
        ({"schedule_policy": "random"}, "schedule_policy must be one of"),
        ({"device": "gpu"}, "device must be one of"),
        ({"logprobs_mode": "logits"}, "logprobs_mode must be one of"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("demo", **options)  # type: ignore[arg-type]


def test_a_tokenizer_and_a_chat_template_of_their_own(llm: LLM, tmp_path: Path) -> None:
    """The tokenizer is the demo's with another template; a file's template goes before that."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, tokenizer)
    (tokenizer / "chat_template.jinja").write_text("words: {{ messages[0].content }}")
    file = tmp_path / "template.jinja"
    file.write_text("file: {{ messages[0].content }}")
    one = SamplingParams(max_tokens=1)
    options = {"dtype": "float32", "max_running_req": 2, "num_page_override": 100, "tokenizer": str(tokenizer)}
    for template, prompt in ((None, "words: abc"), (file, "file: abc")):
        with LLM("demo", chat_template=None if template is None else str(template), **options) as other:
            found = other.tokenizer.encode_chat([{"role": "user", "content": "abc"}], None, {})
            assert found.tolist() == llm.tokenizer.encode(prompt, add_special_tokens=False).tolist()
            assert other.chat([{"role": "user", "content": "abc"}], one)[0]["token_ids"]
    with pytest.raises(ConfigError, match="--chat-template /no/such: there is no such file"):
        LLM("demo", chat_template="/no/such")


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_after_ctrl_c_the_next_call_works(llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Nearly all of a call's time the host waits for a step's tokens, so that is where it comes."""

    def interrupted(pending: PendingStep) -> StepResult:
        nonlocal steps
        steps -= 1
        if steps == -1:
            raise KeyboardInterrupt
        return pending()

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain = llm.generate(["abc"] * 6, params)
    sample = llm.loop._engine.sample
    monkeypatch.setattr(llm.loop._engine, "sample", lambda batch: partial(interrupted, sample(batch)))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "xyz"] * 3, params)
    monkeypatch.undo()
    llm.check_idle()
    assert [one["token_ids"] for one in llm.generate(["abc"] * 6, params)] == [one["token_ids"] for one in plain]


@pytest.mark.parametrize("where", ["_engine.sample", "scheduler._table.extend_pages", "scheduler._results.take"])
def test_ctrl_c_within_a_step_waits_for_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain = llm.generate(["abc"] * 6, params)
    owner, _, name = where.rpartition(".")
    function = getattr(attrgetter(owner)(llm.loop), name)

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return function(*arguments)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(attrgetter(owner)(llm.loop), name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "xyz"] * 3, params)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    llm.check_idle()
    assert [one["token_ids"] for one in llm.generate(["abc"] * 6, params)] == [one["token_ids"] for one in plain]


def test_a_second_ctrl_c_within_a_step_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(_: object) -> PendingStep:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step goes on")

    with LLM("demo", num_page_override=50) as other:
        monkeypatch.setattr(other.loop._engine, "forward", hangs)
        with pytest.raises(KeyboardInterrupt):
            other.generate("abc")


@pytest.mark.parametrize("is_restored_between", [False, True])
def test_two_ctrl_c_at_the_end_of_a_call_leave_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, is_restored_between: bool
) -> None:
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)

    def restore(number: int, handler: signal.Handlers) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        if is_restored_between:
            signal.signal(number, handler)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interrupts.delayed():
        monkeypatch.setattr(signal, "signal", restore)
    assert signal.getsignal(signal.SIGINT) is before
    with interrupts.delayed():
        interrupts.check()


@pytest.mark.parametrize("where", ["_engine.sample", "scheduler._table.extend_pages"])
def test_a_plan_that_was_lost_is_said(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Or one in the middle of which a row has not got its pages yet."""

    def fails(*_: object) -> PendingStep:
        raise MemoryError

    with LLM("demo", num_page_override=50) as other:
        owner, _, name = where.rpartition(".")
        monkeypatch.setattr(attrgetter(owner)(other.loop), name, fails)
        with pytest.raises(MemoryError):
            other.generate("abc")
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="interrupted in the middle of a step: close this LLM"):
            other.generate("abc")


def test_max_tokens_beyond_the_context_is_clipped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Programs for Mini-SGLang rely on the default of 1024, also with a shorter context."""
    with LLM("demo", max_seq_len_override=48, max_running_req=2) as short:
        prompts = [[1], [1] * 40, [1] * 47]
        answers = short.generate(prompts, SamplingParams(ignore_eos=True))
        fits = short.generate([[1] * 40], SamplingParams(ignore_eos=True, max_tokens=8))
        with pytest.raises(InvalidRequest, match="the prompt has 48 tokens, but this model's maximum context"):
            short.generate([[1] * 48])
        (scored,) = short.generate([[1] * 48], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert [len(answer["token_ids"]) for answer in answers] == [47, 8, 1]
    assert [answer["finish_reason"] for answer in answers] == ["length"] * 3
    assert [record.getMessage() for record in caplog.records if "max_tokens" in record.getMessage()] == [
        "max_tokens is clipped for 3 of 3 prompts: "
        "this model's maximum context length is 48 tokens, the answer included"
    ]
    assert len(fits[0]["token_ids"]) == 8
    assert len(scored["prompt_logprobs"]) == 47


def test_lists_stand_for_tuples(llm: LLM) -> None:
    lists = SamplingParams(stop=["server"], stop_token_ids=[5], min_tokens=2, logit_bias=[(7, 1.0)], bad_words=["fast"])  # type: ignore[arg-type]
    tuples = SamplingParams(
        stop=("server",), stop_token_ids=(5,), min_tokens=2, logit_bias=((7, 1.0),), bad_words=("fast",)
    )
    others = SamplingParams(
        stop={"server"},  # type: ignore[arg-type]
        stop_token_ids=np.array([5]),  # type: ignore[arg-type]
        min_tokens=np.int64(2),  # type: ignore[arg-type]
        logit_bias={7: np.float32(1)},  # type: ignore[arg-type]
        bad_words=["fast"],  # type: ignore[arg-type]
        allowed_token_ids=None,
    )
    expected = llm.chat(QUESTION, tuples)[0]["text"]
    assert [llm.chat(QUESTION, params)[0]["text"] for params in (lists, others)] == [expected, expected]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"65": 5.0}),
        ("logit_bias", [(65, "x")]),
        ("stop_token_ids", ["65"]),
        ("temperature", "1"),
        ("max_tokens", 3.5),
        ("seed", "x"),
        ("grammar", "x"),
        ("grammar", Grammar("json", "{}")),  # type: ignore[arg-type]
    ],
)
def test_parameters_of_a_wrong_type(llm: LLM, name: str, value: Any) -> None:
    """They are refused before anything runs, by name, and the next call is served."""
    with pytest.raises(InvalidRequest, match=name) as caught:
        llm.generate("abc", SamplingParams(**{name: value}))
    assert caught.value.field == name
    llm.check_idle()
    assert llm.generate("abc", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    "prompt",
    [np.array([[1, 2]]), np.array([2**32 + 5]), [1.5], [2**70], [2**40], [b"abc"], 3, b"abc", [-1], [[1], [2, 3]]],
)
def test_prompts_that_are_none(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt must be a text or a list|outside the vocabulary"):
        llm.generate([[1], prompt])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="prompt must be a text or a list"):
        llm.generate({"prompt": "abc"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="stop must be a list"):
        llm.generate("abc", SamplingParams(stop="server"))  # type: ignore[arg-type]
    assert llm.generate("abc", SamplingParams(stop=None, max_tokens=1))  # type: ignore[arg-type]
    llm.check_idle()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_closing_twice_is_closing_once(tp_size: int) -> None:
    with LLM("demo", max_running_req=2, tp_size=tp_size) as llm:
        llm.close()


def test_closing_frees_the_logits_of_a_step_that_was_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several GPUs these may be memory that ranks share; freed later, it would wait for the device's kernels."""

    def lose_a_rank(*_: object) -> None:
        raise RankLost("scheduler-1: it died")

    with LLM("demo", max_running_req=2) as llm:
        monkeypatch.setattr(llm.loop.scheduler, "fill", lose_a_rank)
        with pytest.raises(RankLost):
            llm.generate("abc", SamplingParams(max_tokens=2, grammar=Grammar("regex", "a+")))
        assert llm._engine._output is not None
        logits = weakref.ref(llm._engine._output().logits)
        assert logits() is not None
    assert logits() is None


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_rank_that_dies_ends_the_call_that_needs_it(tp_size: int) -> None:
    """The error names the rank that died, also once it has been silent for longer than a rank that hangs."""
    with LLM("demo", max_running_req=2, tp_size=tp_size, hang_timeout=2.0) as llm:
        last = llm._ranks._children[-1]
        threading.Timer(0.3, last.process.kill).start()
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        for seconds in (0.0, 3.5):
            sleep(seconds)
            with pytest.raises(RuntimeError, match=f"scheduler-{tp_size - 1}: it died"):
                llm.generate(["abc"] * 50, params)
        llm._ranks.end_if_lost()  # as `close` does first
        assert all(child.process.poll() is not None for child in llm._ranks._children)


def test_a_rank_that_is_stopped_ends_the_call_that_needs_it() -> None:
    """A collective alone would wait for 300 seconds, and so beyond this test's limit."""
    with LLM("demo", max_running_req=2, tp_size=2, hang_timeout=3.0) as llm:
        llm.generate("abc", SamplingParams(max_tokens=2))
        (child,) = llm._ranks._children
        threading.Timer(0.3, child.process.send_signal, [signal.SIGSTOP]).start()
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="scheduler-1 hangs: it has not answered for"):
                llm.generate(["abc"] * 50, params)
    assert child.process.poll() == -signal.SIGKILL


def test_a_rank_that_dies_before_it_joins_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous alone would wait for 300 seconds, and so beyond this test's limit."""
    started: list[subprocess.Popen[bytes]] = []

    def start_and_kill(*args: Any) -> Child:
        child = start_worker(*args)
        child.process.kill()
        started.append(child.process)
        return child

    monkeypatch.setattr(rank_processes, "start_worker", start_and_kill)
    with pytest.raises(ConfigError, match="scheduler-1: it died"):
        LLM("demo", max_running_req=2, tp_size=2)
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_a_rank_that_fails_is_heard_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sockets close first, and its process may end seconds later: the error is not that of the collective."""

    def start_failing(name: str, _: str, start: Start, env: Mapping[str, str]) -> Child:
        paths = Path(rank_processes.__file__).parents[2], Path(failing_rank.__file__).parents[1]
        return start_worker(
            name, f"{failing_rank.__name__}:run", start, {**env, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        )

    monkeypatch.setattr(rank_processes, "start_worker", start_failing)
    ranks = RankProcesses(ServerConfig(engine=EngineConfig(model_path="", tp_size=2)))
    (child,) = ranks._children
    assert select.select([child.pipe._socket], [], [], PATIENCE)[0]
    with pytest.raises(RankLost, match=r"^scheduler-1: the scales are no numbers$"), ranks.guard():
        raise RuntimeError("rank 1 is gone")
    assert child.process.poll() is None
    ranks.close()


def test_one_that_is_freed_without_close_ends_its_ranks() -> None:
    """At once, not when the garbage collector finds a cycle. The sockets' context alone would wait for ever."""
    llm = LLM("demo", max_running_req=2, tp_size=2)
    llm.generate("abc", SamplingParams(max_tokens=2))
    (child,) = llm._ranks._children
    gc.disable()
    try:
        del llm
        assert child.process.poll() == -signal.SIGKILL
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["exits_in_a_call", "cannot_start_it"])
def test_a_program_that_closes_none_ends(way: str) -> None:
    answers = run_unclosed(2, way)
    assert [len(answer) for answer in answers] == [PARAMS.max_tokens]


def test_calls_from_several_threads_are_served_one_after_another(llm: LLM) -> None:
    prompts = [f"number {index}" for index in range(6)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = [answer["token_ids"] for answer in llm.generate(prompts, params)]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda _: llm.generate(prompts, params), range(6)))
    assert [[answer["token_ids"] for answer in answers] for answers in together] == [alone] * 6
    llm.check_idle()


def test_a_forked_process_is_told_to_make_its_own(llm: LLM) -> None:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def ask() -> None:
        try:
            with llm:
                sender.send(llm.generate("one", SamplingParams(max_tokens=2)))
        except RuntimeError as error:
            llm.close()
            sender.send(str(error))

    child = fork.Process(target=ask, daemon=True)
    child.start()
    assert receiver.poll(PATIENCE), "it waits for what its parent alone has"
    assert "by another process" in receiver.recv()
    child.join(PATIENCE)
    assert llm.generate("one", SamplingParams(max_tokens=2))


def test_a_closed_one_says_so_and_leaves_no_process() -> None:
    llm = LLM("demo", max_running_req=2)
    schema = Grammar("json_schema", '{"type": "integer"}')
    llm.generate("one", SamplingParams(max_tokens=2, grammar=schema))
    trials = llm._validator._process
    assert trials is not None
    assert is_alive(trials.pid)
    llm.close()
    assert not is_alive(trials.pid)
    for params in (SamplingParams(max_tokens=2), SamplingParams(grammar=schema)):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate("one", params)
    with pytest.raises(RuntimeError, match="this LLM is closed"), llm:
        pass
