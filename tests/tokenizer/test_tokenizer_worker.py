"""The two workers as processes with real sockets, and how a request is admitted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq
from tokenizers import AddedToken

import minisgl
from minisgl.config import EngineConfig, ServerConfig
from minisgl.limits import Limits
from minisgl.message import control, to_detokenizer, to_tokenizer
from minisgl.message.control import ControlPipe, ToSupervisor
from minisgl.message.packed_ids import pack_ids, unpack_ids
from minisgl.message.shared import Abort, FlushCache, Flushed, ProcessCounts, StatsReport, StatsRequest, TextOptions
from minisgl.message.socket import Addresses, Inbox, Outbox
from minisgl.message.to_api import (
    Accepted,
    Decoded,
    Described,
    Echo,
    Encoded,
    OutputDelta,
    OutputDeltas,
    Refused,
    ToApi,
    Unanswered,
)
from minisgl.message.to_detokenizer import End, Open, StepOutput
from minisgl.message.to_scheduler import Add, Stopped, ToScheduler
from minisgl.message.to_tokenizer import ChatPrompt, Generate, IdsPrompt, TextPrompt
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.structured_output.validator import GrammarValidator
from minisgl.tokenizer import admission
from minisgl.tokenizer.admission import resolve_bad_words
from minisgl.tokenizer.chat_template import ChatTemplates
from minisgl.tokenizer.text import TextTokenizer
from minisgl.tokenizer.tokenizer_worker import Head, PendingAdmissions, reply_to
from tokenizer import small

LIMITS = Limits(max_seq_len=32, vocab_size=330)
GRAMMARS = GrammarValidator({}, time_limit=10.0)
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{% if messages[0].bad %}"
TEMPLATE += "{{ raise_exception('no') if messages[0].bad == 'refuse' else 1 / 0 }}{% endif %}"
USER = {"role": "user", "content": "ab"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small.llama().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(msgspec.json.encode(config).decode())
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(model)


def request(prompt: Any, seq_ids: tuple[int, ...] = (1,), **sampling: Any) -> Generate:
    seeds = [1000 + seq_id for seq_id in seq_ids]
    return Generate(
        SamplingParams(**sampling),
        TextOptions(stop=("x",)),
        seq_ids=list(seq_ids),
        seeds=seeds,
        prompt=prompt,
        request_id="an-id",
    )


# --- admission ---


def admit(asked: Generate, *others: Any) -> tuple[Accepted | Refused, list[Add]]:
    """Return the answer to a request in the end, and what the scheduler gets."""
    settled = admission.admit(asked, *others).settled()
    return settled.answer, settled.adds


class Sent(list[Any]):
    """Outbox that keeps what is sent."""

    send = list.append


def test_thousands_of_prompts_that_wait_for_one_grammar_delay_no_other(tokenizer: TextTokenizer) -> None:
    """Each message of any client visited every admission that waited: 3 s for the 8192 prompts of one request."""
    grammars = GrammarValidator({})
    api, scheduler = Sent(), Sent()
    pending = PendingAdmissions(api, scheduler)
    begin = time.process_time()
    for seq_id in range(8192):
        prompt = request(TextPrompt("a"), (seq_id,), max_tokens=4, grammar=Grammar("regex", "[ab]"))
        pending.add(admission.admit(prompt, tokenizer, LIMITS, grammars))
        pending.release()
        assert pending.num_sequences == seq_id + 1
    pending.drop(range(4000, 8192))
    assert time.process_time() - begin < 2
    assert (pending.num_sequences, api, scheduler) == (4000, [], [])
    while pending.num_sequences:
        grammars.poll(1.0)
        pending.release()
    assert [answer.seq_ids[0] for answer in api] == [add.seq_id for add in scheduler] == list(range(4000))
    grammars.close()


def test_choices_share_the_prompt(tokenizer: TextTokenizer) -> None:
    accepted, adds = admit(
        request(TextPrompt("ab"), (4, 5), temperature=0.5, max_tokens=None), tokenizer, LIMITS, GRAMMARS
    )
    ids = tokenizer.encode("ab")
    assert accepted == Accepted([4, 5], pack_ids(ids))
    assert [(add.seq_id, add.seed) for add in adds] == [(4, 1004), (5, 1005)]
    for add in adds:
        assert unpack_ids(add.prompt_ids).tolist() == ids.tolist()
        assert add.sampling == SamplingParams(temperature=0.5, max_tokens=32 - len(ids))
        assert add.text == TextOptions(stop=("x",))


def test_a_request_may_take_fewer_tokens_than_it_asks_for(tokenizer: TextTokenizer) -> None:
    asked = msgspec.structs.replace(request(TextPrompt("ab"), max_tokens=1000), fewer_tokens=True)
    _, (add,) = admit(asked, tokenizer, LIMITS, GRAMMARS)
    assert add.sampling.max_tokens == LIMITS.max_seq_len - len(tokenizer.encode("ab"))


def test_bad_words_become_ids_with_and_without_a_space(tokenizer: TextTokenizer) -> None:
    _, (add,) = admit(request(TextPrompt("ab"), bad_words=("ab", " ab"), max_tokens=3), tokenizer, LIMITS, GRAMMARS)
    spellings = [tokenizer.encode(text, add_special_tokens=False) for text in ("ab", " ab")]
    assert add.sampling.bad_words_ids == tuple(tuple(ids.tolist()) for ids in spellings)
    refused, adds = admit(request(TextPrompt("ab"), bad_words=("c" * 17,), max_tokens=3), tokenizer, LIMITS, GRAMMARS)
    assert isinstance(refused, Refused)
    assert (refused.field, adds) == ("bad_words", [])
    assert "1 to 16" in refused.message


def test_bad_words_are_added_to_those_given_as_ids(tokenizer: TextTokenizer) -> None:
    word = tuple(tokenizer.encode("ab", add_special_tokens=False).tolist())
    params = SamplingParams(bad_words=("ab",), bad_words_ids=[[3, 4], word])  # type: ignore[arg-type, list-item]
    first, second, *others = resolve_bad_words(params, tokenizer, 1000).bad_words_ids
    assert (first, second) == ((3, 4), word)
    assert len(others) == 1


def test_bad_words_that_the_model_cannot_say(tokenizer: TextTokenizer) -> None:
    """A tokenizer may have more ids than the model."""
    params = SamplingParams(bad_words=("ab",))
    (ids, spaced) = resolve_bad_words(params, tokenizer, 1000).bad_words_ids
    assert resolve_bad_words(params, tokenizer, max(ids)).bad_words_ids == tuple(
        one for one in (ids, spaced) if max(one) < max(ids)
    )


def test_grammars_are_checked(tokenizer: TextTokenizer) -> None:
    schema = Grammar("json_schema", '{"type": "array", "uniqueItems": true}')
    refused, adds = admit(request(TextPrompt("ab"), grammar=schema, max_tokens=3), tokenizer, LIMITS, GRAMMARS)
    assert isinstance(refused, Refused)
    assert refused.field == "response_format"
    assert "uniqueItems" in refused.message
    assert adds == []
    regex = Grammar("regex", "[ab]+")
    _, (add,) = admit(request(TextPrompt("ab"), grammar=regex, max_tokens=3), tokenizer, LIMITS, GRAMMARS)
    assert add.sampling.grammar == regex


def test_ids_are_used_as_they_are(tokenizer: TextTokenizer) -> None:
    accepted, adds = admit(request(IdsPrompt(pack_ids([0, 329])), max_tokens=3), tokenizer, LIMITS, GRAMMARS)
    assert accepted == Accepted([1], pack_ids([0, 329]))
    assert adds[0].sampling.max_tokens == 3


def test_a_chat_goes_through_the_template(tokenizer: TextTokenizer) -> None:
    accepted, _ = admit(request(ChatPrompt([USER]), max_tokens=3), tokenizer, LIMITS, GRAMMARS)
    assert isinstance(accepted, Accepted)
    assert unpack_ids(accepted.prompt_ids).tolist().count(1) == 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "field", "says"),
    [
        (TextPrompt("a" * 40), {"max_tokens": None}, "prompt", "32"),
        (TextPrompt("a" * 20), {"max_tokens": 30}, "max_tokens", "32"),
        (TextPrompt("世" * 40), {}, "prompt", "32"),
        (IdsPrompt(b""), {}, "prompt", "at least one token"),
        (IdsPrompt(pack_ids([1, 330, 999])), {}, "prompt", "330"),
        (IdsPrompt(pack_ids([1, -1])), {}, "prompt", "-1"),
        (ChatPrompt([{"role": "user", "content": "b" * 50}]), {}, "messages", "32"),
        (ChatPrompt([]), {}, "messages", "at least one message"),
        (ChatPrompt([{**USER, "bad": "0"}]), {}, "messages", "the model's chat template fails on these messages"),
        (ChatPrompt([{**USER, "bad": "refuse"}]), {}, "messages", "refuses these messages: no"),
    ],
)
def test_too_long_prompt_is_refused(
    tokenizer: TextTokenizer, prompt: Any, sampling: dict[str, Any], field: str, says: str
) -> None:
    """Every prompt that cannot run is refused with an answer, never silently."""
    refused, adds = admit(request(prompt, (1, 2), **sampling), tokenizer, LIMITS, GRAMMARS)
    assert isinstance(refused, Refused)
    assert refused.seq_ids == [1, 2]
    assert (refused.status, refused.field) == (400, field)
    assert says in refused.message
    assert "Error" not in refused.message, "a client does not know our Python"
    assert adds == []


def test_an_error_of_ours_is_one_requests_500_and_its_text_is_in_the_log_alone(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the client got a 400 with the words of the exception."""
    for broken in (request(IdsPrompt(b"abc"), (1, 2)), request(TextPrompt("a"), (1, 2), bad_words=(5,), max_tokens=3)):
        caplog.clear()
        assert admit(broken, tokenizer, LIMITS, GRAMMARS) == (Refused([1, 2], status=500), [])
        assert "Traceback" in caplog.text
        assert caplog.records[0].request_id == "an-id"  # type: ignore[attr-defined]
        assert "request an-id" in caplog.text
    template = Grammar("template", "%grammar a [1, 2, 3]")
    caplog.clear()
    assert admit(request(TextPrompt("a"), grammar=template, max_tokens=3), tokenizer, LIMITS, GRAMMARS)[0] == Refused(
        [1], status=500
    )
    assert "TypeError" in caplog.text
    unanswered = reply_to(to_tokenizer.Encode(7, TextPrompt(5)), tokenizer, LIMITS)  # type: ignore[arg-type]
    assert unanswered == Unanswered(7, status=500)


def test_a_client_whose_grammars_fill_the_queue_is_refused(tokenizer: TextTokenizer) -> None:
    grammars = GrammarValidator({}, time_limit=10.0)
    refused = None
    for number in range(64):
        grammar = Grammar("choice", '["' + "x" * 250_000 + f'{number}"]')
        asked = msgspec.structs.replace(request(TextPrompt("a"), grammar=grammar, max_tokens=3), client="many")
        refused = admission.admit(asked, tokenizer, LIMITS, grammars).answer
        if isinstance(refused, Refused):
            break
    assert isinstance(refused, Refused)
    assert (refused.status, number) == (503, 34), "8 Mi characters wait, and one is under way"
    assert "too many grammars wait" in refused.message
    other = request(TextPrompt("a"), grammar=Grammar("regex", "a+"), max_tokens=3)
    assert isinstance(admit(msgspec.structs.replace(other, client="another"), tokenizer, LIMITS, grammars)[0], Accepted)


def ids_of(message: Any) -> list[int]:
    accepted, adds = message
    assert isinstance(accepted, Accepted), accepted
    assert [add.prompt_ids for add in adds] == [accepted.prompt_ids] * len(adds)
    return unpack_ids(accepted.prompt_ids).tolist()  # type: ignore[no-any-return]


def test_truncated_prompts_keep_their_end_and_bos(tokenizer: TextTokenizer) -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 3
    whole = tokenizer.encode(text).tolist()
    for keep in (1, 2, 5, 25):
        truncated = msgspec.structs.replace(request(TextPrompt(text), max_tokens=2), truncate=keep)
        expected = [whole[0], *whole[len(whole) - keep + 1 :]] if keep > 1 else whole[-1:]
        assert ids_of(admit(truncated, tokenizer, LIMITS, GRAMMARS)) == expected
    short = msgspec.structs.replace(request(TextPrompt("abc"), max_tokens=2), truncate=20)
    assert ids_of(admit(short, tokenizer, LIMITS, GRAMMARS)) == tokenizer.encode("abc").tolist()
    fit = msgspec.structs.replace(request(TextPrompt(text), max_tokens=10), truncate=-1)
    assert ids_of(admit(fit, tokenizer, LIMITS, GRAMMARS)) == [whole[0], *whole[-21:]]
    ids = msgspec.structs.replace(request(IdsPrompt(pack_ids(list(range(60)))), max_tokens=2), truncate=4)
    assert ids_of(admit(ids, tokenizer, LIMITS, GRAMMARS)) == [56, 57, 58, 59]
    chat = msgspec.structs.replace(request(ChatPrompt([{"role": "user", "content": text}]), max_tokens=2), truncate=4)
    assert ids_of(admit(chat, tokenizer, LIMITS, GRAMMARS)) == whole[-4:]


def test_a_text_that_cannot_fit_is_refused_without_encoding_it(tokenizer: TextTokenizer) -> None:
    """32 MB took twenty seconds, in which no other prompt moved."""
    start = time.process_time()
    for text in (" hello" * 5_000_000, "é" * 10_000_000, " " * 30_000_000):
        refused, _ = admit(request(TextPrompt(text)), tokenizer, LIMITS, GRAMMARS)
        assert isinstance(refused, Refused)
        assert (refused.field, refused.code) == ("prompt", "context_length_exceeded")
        assert "32" in refused.message
    kept = msgspec.structs.replace(request(TextPrompt("a" * 30_000_000), max_tokens=1), truncate=8)
    assert len(ids_of(admit(kept, tokenizer, LIMITS, GRAMMARS))) == 8
    assert time.process_time() - start < 2


def test_a_long_text_of_few_tokens_is_taken() -> None:
    vocabulary = small.llama()
    vocabulary.add_tokens([AddedToken("#" * 40, normalized=False)])
    wide = TextTokenizer(vocabulary, ChatTemplates({}, {}))
    ids = ids_of(admit(request(TextPrompt("#" * 400), max_tokens=1), wide, LIMITS, GRAMMARS))
    assert ids[1:] == [vocabulary.token_to_id("#" * 40)] * 10, "400 characters are more than 8 times 32"


def test_echo_is_the_prompts_text(tokenizer: TextTokenizer) -> None:
    def echo(prompt: Any, **fields: Any) -> Any:
        asked = msgspec.structs.replace(request(prompt, max_tokens=2), echo=True, **fields)
        return admit(asked, tokenizer, LIMITS, GRAMMARS)[0].echo  # type: ignore[union-attr]

    assert echo(TextPrompt(" ab  c")) == Echo(" ab  c", b"<s>")
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert echo(IdsPrompt(pack_ids(ids))) == Echo("hello", b"hello")
    assert echo(TextPrompt("ab" * 50), truncate=3).text == "abab"
    assert admit(request(TextPrompt("a"), max_tokens=2), tokenizer, LIMITS, GRAMMARS)[0] == Accepted(
        [1], pack_ids(tokenizer.encode("a"))
    )


# --- processes ---


class Server:
    """Surroundings of a worker: its supervisor's end of the pipe, and the inboxes that it sends to."""

    def __init__(self, run_dir: str, model: Path) -> None:
        self.addresses = Addresses(run_dir)
        self.context = zmq.Context()
        self.context.setsockopt(zmq.RCVTIMEO, 120_000)
        self.context.setsockopt(zmq.LINGER, 0)
        self.api: Inbox[ToApi] = Inbox(self.context, self.addresses.api, ToApi)  # type: ignore[arg-type]
        self.scheduler: Inbox[ToScheduler] = Inbox(self.context, self.addresses.scheduler, ToScheduler)  # type: ignore[arg-type]
        self.run_dir = run_dir
        self.model = model

    @contextmanager
    def worker(self, entry: str, index: int = 0) -> Iterator[list[str]]:
        """Run the worker as `process` until it is ready; gives the phases of its start."""
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": str(Path(minisgl.__file__).parents[1])}
        command = [sys.executable, "-m", "minisgl.process.worker", entry, str(theirs.fileno())]
        self.process = process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        pipe: ControlPipe[ToSupervisor] = ControlPipe(ours, ToSupervisor)  # type: ignore[arg-type]
        config = ServerConfig(engine=EngineConfig(model_path=str(self.model)), model_names=("tiny",))
        pipe.send(control.Start(config, self.run_dir, os.getpid(), index))
        phases = []
        try:
            while not isinstance(message := pipe.receive(), control.Ready):
                assert isinstance(message, control.Phase), message
                phases.append(message.text)
            pipe.send(control.Serve(LIMITS))
            yield phases
            assert process.poll() is None
        finally:
            pipe.close()
            process.wait(120)


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    run_dir = tempfile.mkdtemp()
    server = Server(run_dir, model)
    yield server
    server.context.destroy()
    shutil.rmtree(run_dir)


def test_tokenizer_process(server: Server) -> None:
    with server.worker("minisgl.tokenizer.tokenizer_worker:run", index=2) as phases:
        assert phases == ["load tokenizer"]
        inbox: Outbox[to_tokenizer.ToTokenizer] = Outbox(server.context, server.addresses.tokenizer(2))
        inbox.send(request(TextPrompt("ab"), (1, 2), max_tokens=4))
        assert isinstance(server.api.receive(), Accepted)
        inbox.send(Abort([1]))
        inbox.send(request(ChatPrompt([{**USER, "bad": 1}]), (3,)))
        inbox.send(request(ChatPrompt([USER]), (4,), max_tokens=4))
        answers = [server.api.receive() for _ in range(2)]
        assert [type(answer) for answer in answers] == [Refused, Accepted]
        inbox.send(StatsRequest(77))
        got = [server.scheduler.receive() for _ in range(5)]
        assert [type(message) for message in got] == [Add, Add, Abort, Add, StatsRequest]
        assert got[2] == Abort([1])
        assert got[4] == StatsRequest(77, [ProcessCounts("tokenizer-2", {"waiting": 0, "sequences": 0})])


def test_every_message_has_a_part_by_which_it_waits() -> None:
    def tags(union: object) -> set[str]:
        return {member.__struct_config__.tag for member in get_args(union)}

    assert tags(Head) == tags(to_tokenizer.ToTokenizer)


def test_the_check_of_a_grammar_delays_no_other_request(server: Server) -> None:
    def hard(seq_id: int, repeats: int) -> Generate:
        grammar = Grammar("regex", f"(a{{1000}}){{{repeats}}}")
        asked = request(TextPrompt("ab"), (seq_id,), max_tokens=4, grammar=grammar)
        return msgspec.structs.replace(asked, client="hostile")

    with server.worker("minisgl.tokenizer.tokenizer_worker:run"):
        inbox: Outbox[to_tokenizer.ToTokenizer] = Outbox(server.context, server.addresses.tokenizer(0))
        start = time.perf_counter()
        server.process.send_signal(signal.SIGSTOP)  # so that it finds all messages at once
        inbox.send(hard(1, 1000))
        inbox.send(hard(2, 1001))
        inbox.send(request(TextPrompt("ab"), (3,), max_tokens=4))
        inbox.send(StatsRequest(4))
        inbox.send(Abort([2]))
        inbox.send(request(TextPrompt("ab"), (5,), max_tokens=4, grammar=Grammar("regex", "a+")))
        server.process.send_signal(signal.SIGCONT)
        # Before the first, whose verdict takes two seconds.
        assert [server.api.receive().seq_ids for _ in range(2)] == [[3], [5]]  # type: ignore[union-attr]
        got = [server.scheduler.receive() for _ in range(4)]
        assert {type(message) for message in got[:3]} == {Add, StatsRequest, Abort}
        assert isinstance(got[3], Add)
        (stats,) = (message for message in got if isinstance(message, StatsRequest))
        assert sum(stats.counts[0].counts.values()) in (2, 3), "the third may still wait for its turn"
        refused = server.api.receive()
        assert isinstance(refused, Refused)
        assert refused.seq_ids == [1]
        assert "longer than 2 s" in refused.message
        assert time.perf_counter() - start > 1.9
        inbox.send(StatsRequest(6))  # nothing has come for the aborted one, and nothing is left of it
        assert server.scheduler.receive() == StatsRequest(
            6, [ProcessCounts("tokenizer-0", {"waiting": 0, "sequences": 0})]
        )


def test_questions_to_the_tokenizer(server: Server) -> None:
    ids = small.llama().encode("hello ab").ids
    with server.worker("minisgl.tokenizer.tokenizer_worker:run"):
        inbox: Outbox[to_tokenizer.ToTokenizer] = Outbox(server.context, server.addresses.tokenizer(0))
        inbox.send(to_tokenizer.Encode(1, TextPrompt("hello ab"), strings=True))
        inbox.send(to_tokenizer.Encode(2, TextPrompt("hello ab", add_special_tokens=False)))
        inbox.send(to_tokenizer.Encode(3, ChatPrompt([{**USER, "bad": True}])))
        inbox.send(to_tokenizer.Decode(4, pack_ids(ids)))
        inbox.send(to_tokenizer.Decode(5, pack_ids([330])))
        inbox.send(to_tokenizer.Describe(6))
        inbox.send(FlushCache(7))
        inbox.send(to_tokenizer.Encode(8, TextPrompt("ab" * 100)))
        inbox.send(to_tokenizer.Encode(9, TextPrompt("a" * 1_000_001)))
        encoded, plain, refused, decoded, outside, described = (server.api.receive() for _ in range(6))
        assert encoded == Encoded(1, pack_ids(ids), '["<s>","▁hello","▁","ab"]'.encode())
        assert plain == Encoded(2, pack_ids(ids[1:]))
        assert isinstance(refused, Unanswered)
        assert (refused.query_id, refused.field) == (3, "messages")
        assert decoded == Decoded(4, "<s> hello ab")
        assert isinstance(outside, Unanswered)
        assert "330" in outside.message
        assert described == Described(6, {"bos_token": "<s>", "chat_template": TEMPLATE})
        assert server.scheduler.receive() == FlushCache(7)
        longer, too_long = server.api.receive(), server.api.receive()
        assert isinstance(longer, Encoded)
        assert len(longer.ids) > 4 * LIMITS.max_seq_len, "a text may be longer than the context"
        assert isinstance(too_long, Unanswered)
        assert "1000000" in too_long.message
    with server.worker("minisgl.tokenizer.detokenizer_worker:run"):
        detokenizer: Outbox[to_detokenizer.ToDetokenizer] = Outbox(server.context, server.addresses.detokenizer)
        detokenizer.send(Flushed(7, 12))
        assert server.api.receive() == Flushed(7, 12)


def test_detokenizer_process(server: Server) -> None:
    with server.worker("minisgl.tokenizer.detokenizer_worker:run") as phases:
        assert phases == ["load detokenizer"]
        inbox: Outbox[to_detokenizer.ToDetokenizer] = Outbox(server.context, server.addresses.detokenizer)
        a, b, ab = (small.llama().token_to_id(token) for token in ("a", "b", "ab"))
        opened = [Open(1, TextOptions(stop=("bb",))), Open(2, TextOptions(), 5)]
        inbox.send(StepOutput(opened, [1, 2], pack_ids([ab, a]), []))
        inbox.send(StepOutput([], [9], pack_ids([a]), []))  # nothing to say of an unknown sequence
        inbox.send(StepOutput([], [1, 2], pack_ids([b, 2]), [End(2, "stop", stop_token=2)]))
        inbox.send(StatsReport(7, [ProcessCounts("scheduler", {"running": 1})]))
        inbox.send(StepOutput([], [1], pack_ids([a]), [End(1, "stop")]))
        inbox.send(StatsReport(8, []))
        assert server.api.receive() == OutputDeltas(
            [OutputDelta(1, pack_ids([ab]), "a"), OutputDelta(2, pack_ids([a]), "a")]
        )
        assert server.api.receive() == OutputDeltas(
            [OutputDelta(1, pack_ids([b]), "", "stop", 0, "bb"), OutputDelta(2, pack_ids([2]), "", "stop", 5, 2)]
        )
        report = server.api.receive()
        counts = {"sequences": 1, "dropped_tokens": 1}
        assert report == StatsReport(
            7, [ProcessCounts("scheduler", {"running": 1}), ProcessCounts("detokenizer", counts)]
        )
        assert server.api.receive() == StatsReport(8, [ProcessCounts("detokenizer", counts | {"sequences": 0})])
        assert server.scheduler.receive() == Stopped(1)


@pytest.mark.parametrize(
    "entry", ["minisgl.tokenizer.tokenizer_worker:run", "minisgl.tokenizer.detokenizer_worker:run"]
)
def test_a_folder_without_tokenizer_fails_in_one_line(server: Server, entry: str, tmp_path: Path) -> None:
    server.model = tmp_path
    with pytest.raises(AssertionError, match="has no tokenizer"), server.worker(entry):
        pass
