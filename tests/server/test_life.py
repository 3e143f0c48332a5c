"""Start, failures, death and end of the server: always with a clear line, and never leaving a process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import zmq
from safetensors.torch import load_file, save_file

from minisgl.server.supervisor import REPEAT_SECONDS
from models.quantized import save_quantized
from models.tiny import VOCAB, make_model
from support.server import PATIENCE, Server, is_alive, wait_until, worker_pids, worker_processes
from support.tiny_tokenizer import save_byte_tokenizer

SCHEDULER = "minisgl.scheduler.process"
WORKERS = [
    SCHEDULER,
    "minisgl.tokenizer.tokenizer_worker",
    "minisgl.tokenizer.detokenizer_worker",
    "minisgl.server.api.api_process",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("qwen3", max_position_embeddings=32768).save_pretrained(path)
    save_byte_tokenizer(path, VOCAB)
    return path


@pytest.fixture(scope="module")
def idle(folder: Path) -> Iterator[Server]:
    """A server that is only looked at. It may open 64 files, and as many as the system allows if it asks."""
    with Server("--model", str(folder), before="ulimit -Sn 64") as server:
        yield server


class OpenRequest:
    """A stream that has begun. It lasts for 30,000 tokens, which are many seconds: something must end it."""

    def __init__(self, server: Server) -> None:
        self.lines: list[str] = []
        self._url = f"{server.url}/v1/completions"
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._started.wait(PATIENCE)

    def _read(self) -> None:
        body = {"prompt": "abc", "max_tokens": 30000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self._url, json=body, headers={"x-request-id": "open"}, timeout=300) as response:
            for line in response.iter_lines():
                self.lines.append(line)
                self._started.set()

    def error(self) -> str:
        """Wait for the end; return the message of the error that it ended with."""
        self._thread.join(PATIENCE)
        events = [line for line in self.lines if line]
        assert events[-1] == "data: [DONE]", events[-2:]
        message: str = json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        return message


def changed(folder: Path, tmp_path: Path, **changes: object) -> str:
    """A copy of the model with other values in its config."""
    copy = tmp_path / "changed"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return str(copy)


def run_to_failure(*args: str) -> str:
    """Return the last line of a start that fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "--port", "0", *args],
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20, "nothing slow was done before"
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


Failing = Callable[[Path, Path], list[str]]
FAILURES: dict[str, tuple[Failing, str]] = {
    "no such model": (lambda _folder, _tmp: ["--model", "/no/such/folder"], "/no/such/folder does not exist"),
    "no such hub id": (lambda _folder, _tmp: ["--model", "nobody/nothing"], "nobody/nothing"),
    "unknown flag": (lambda folder, _tmp: ["--model", str(folder), "--pagesize", "4"], "--pagesize"),
    "value out of range": (lambda folder, _tmp: ["--model", str(folder), "--page-size", "0"], "--page-size"),
    "not a number": (lambda folder, _tmp: ["--model", str(folder), "--num-pages", "x"], "--num-pages"),
    "unknown backend": (lambda folder, _tmp: ["--model", str(folder), "--attn", "magic"], "magic"),
    "a later part": (lambda folder, _tmp: ["--model", str(folder), "--moe-backend", "x"], "--moe-backend"),
    "unsupported architecture": (
        lambda folder, tmp: ["--model", changed(folder, tmp, architectures=["BloomForCausalLM"], model_type="bloom")],
        "BloomForCausalLM",
    ),
    "unsupported feature": (
        lambda folder, tmp: ["--model", changed(folder, tmp, hidden_act="gelu")],
        "hidden_act",
    ),
    "weights that do not fit": (
        lambda folder, tmp: ["--model", changed(folder, tmp, intermediate_size=100)],
        "intermediate_size|shape",
    ),
    "too little memory": (
        lambda folder, _tmp: ["--model", str(folder), "--num-pages", "1000000000"],
        "too little memory",
    ),
    "no CUDA": (lambda folder, _tmp: ["--model", str(folder), "--device", "cuda"], "CUDA"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_start_that_fails_says_why_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    make, words = FAILURES[name]
    line = run_to_failure(*make(folder, tmp_path))
    assert any(word in line for word in words.split("|")), line


def test_a_weight_that_only_the_second_rank_reads_is_named(tmp_path: Path) -> None:
    """The other rank notices only that this one is gone, and adds nothing."""
    quantized, _ = save_quantized(tmp_path, "llama", "awq")
    save_byte_tokenizer(quantized, VOCAB)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"][0, -1] = torch.nan
    save_file(tensors, quantized / "model.safetensors")
    line = run_to_failure("--model", str(quantized), "--device", "cpu", "--tp", "2")
    assert line.endswith("up_proj.weight: scales has a value that is infinite or not a number")


def test_a_port_in_use_is_noticed_first(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run_to_failure("--model", str(folder), "--port", str(port))
    assert str(port) in line
    assert line.endswith("choose another --port")


def test_an_address_of_another_machine_is_no_matter_of_the_port(folder: Path) -> None:
    for host in ("192.0.2.1", "a..b", "x" * 64):
        assert run_to_failure("--model", str(folder), "--host", host).endswith("choose another --host")


@pytest.mark.parametrize("closed", ["0<&-", "0<&- 1>&-"])
def test_a_server_starts_without_standard_streams(closed: str, folder: Path) -> None:
    with Server("--model", str(folder), before=f"exec {closed}") as server:
        assert (
            server.client.completions.create(model=str(folder), prompt="a", max_tokens=2).choices[0].finish_reason
            == "length"
        )


def test_a_log_on_a_full_disk_ends_nothing(folder: Path) -> None:
    """Every line that is written there fails."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "minisgl", "--model", str(folder), "--port", str(port)]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stderr=full) as process:

        def is_ready() -> bool:
            assert process.poll() is None
            try:
                return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=PATIENCE).status_code == 200
            except httpx.ConnectError:
                return False

        try:
            wait_until(is_ready)
            body = {"prompt": [1, 2], "max_tokens": 2}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE)
            assert answer.status_code == 200
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0


def test_the_ready_line_of_an_ipv6_host_can_be_called(folder: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    with Server("--model", str(folder), "--host", "::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/health", trust_env=False, timeout=300).status_code == 200


@pytest.mark.parametrize("to_workers", [False, True], ids=["alone", "workers first"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_end_everything_at_once(signum: int, to_workers: bool, folder: Path) -> None:
    """Both may reach all processes, and the workers first."""
    with Server("--model", str(folder), "--shutdown-timeout", "3600") as server:
        pids = worker_pids(server.process.pid)
        assert sorted(pids) == sorted(WORKERS)
        request = OpenRequest(server)
        if to_workers:
            for pid in pids.values():
                os.kill(pid, signum)
        server.end(signum)
        assert server.process.returncode == 0
        assert not any(map(is_alive, pids.values()))
        assert request.error() == "the server is shutting down"
        assert "draining" not in "".join(server.log)


@pytest.mark.parametrize("arguments", [(), ("--tp", "2")], ids=["one rank", "two ranks"])
def test_after_sigterm_running_and_waiting_requests_finish(arguments: tuple[str, ...], folder: Path) -> None:
    """Although the whole group is signalled: the workers leave the signal to the supervisor."""
    one_at_a_time = ("--max-running-requests", "1", "--shutdown-timeout", "3600")
    with Server("--model", str(folder), *one_at_a_time, *arguments) as server:
        pids = worker_pids(server.process.pid)
        running = OpenRequest(server)
        with ThreadPoolExecutor(2) as pool:

            def ask(max_tokens: int) -> Future[httpx.Response]:
                body = {"prompt": "abc", "n": 8, "max_tokens": max_tokens, "ignore_eos": True}
                return pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=600)

            answers = {ask(length): length for length in (5, 6)}
            wait_until(lambda: server.info()["scheduler-0"]["requests_waiting"] == 2 * 8)
            for pid in (*pids.values(), server.process.pid):
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/health", timeout=300).status_code == 503)
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc"}, timeout=300)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert not any(answer.done() for answer in answers), "the running request is before them"
            seen = len(running.lines)
            wait_until(lambda: len(running.lines) > seen + 10)
            abort = httpx.post(f"{server.url}/abort", json={"request_id": "open"}, timeout=300)
            assert abort.json() == {"aborted": 1}
            assert running.error() == "the request was aborted"
            for answer, length in answers.items():
                assert answer.result().json()["usage"]["completion_tokens"] == 8 * length
        assert server.process.wait(PATIENCE) == 0
        assert not any(map(is_alive, pids.values()))


def test_the_text_of_a_workers_exception_is_in_the_log_and_not_in_the_answer(folder: Path) -> None:
    with Server("--model", str(folder)) as server:
        request = OpenRequest(server)
        (address,) = Path(server.tmp).glob("*/detokenizer.ipc")
        with zmq.Context() as context, context.socket(zmq.PUSH) as broken:
            broken.connect(f"ipc://{address}")
            broken.send(b"no message")
            assert server.wait() == 1
        assert request.error() == "the server is shutting down: the process detokenizer has failed"
        assert "DecodeError" in "".join(server.log) or "ValidationError" in "".join(server.log)


def test_a_second_sigterm_ends_at_once(folder: Path) -> None:
    with Server("--model", str(folder), "--shutdown-timeout", "3600") as server:
        request = OpenRequest(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready", timeout=300).status_code == 503)
        time.sleep(REPEAT_SECONDS)  # sooner, it is taken for the first one
        server.end(signal.SIGTERM)
        assert server.process.returncode == 0
        assert request.error() == "the server is shutting down"


def test_unfinished_requests_get_an_error_after_the_shutdown_timeout(folder: Path) -> None:
    with Server("--model", str(folder), "--shutdown-timeout", "2") as server:
        request = OpenRequest(server)
        begin = time.monotonic()
        server.end(signal.SIGTERM)
        assert time.monotonic() - begin >= 1, "half of the time is theirs"
        assert server.process.returncode == 0
        assert request.error() == "the server is shutting down"
        assert "the time to finish is up" in "".join(server.log)


def test_without_a_shutdown_timeout_sigterm_ends_at_once(folder: Path) -> None:
    with Server("--model", str(folder), "--shutdown-timeout", "0") as server:
        request = OpenRequest(server)
        server.end(signal.SIGTERM)
        assert server.process.returncode == 0
        assert request.error() == "the server is shutting down"


def test_a_request_that_came_before_the_server_could_accept_it_is_answered_when_it_ends(folder: Path) -> None:
    """It waits in the kernel's backlog, which is reset when a listening socket is closed."""
    with Server("--model", str(folder)) as server:
        api = worker_pids(server.process.pid)["minisgl.server.api.api_process"]
        os.kill(api, signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=300) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining" in "".join(server.log))
            os.kill(api, signal.SIGCONT)
            assert client.recv(4096).startswith(b"HTTP/1.1 ")
        assert server.process.wait(PATIENCE) == 0


def check_open_files(server: Server, allowed: int) -> None:
    for pid in (server.process.pid, *worker_pids(server.process.pid).values()):
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == allowed
    assert (f"a process may open {allowed} files" in "".join(server.log)) == (allowed < 8192 + 128)


def test_every_process_may_open_as_many_files_as_the_system_allows(idle: Server) -> None:
    """The usual soft limit of 1,024 cuts off the clients beyond it without a byte."""
    check_open_files(idle, min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65_535))


def test_a_low_limit_of_open_files_is_reported(folder: Path) -> None:
    with Server("--model", str(folder), before="ulimit -Sn 64 && ulimit -Hn 512") as server:
        check_open_files(server, 512)


@pytest.mark.parametrize("limit", [10, 20, 100])
def test_too_few_open_files_are_refused_in_one_line(folder: Path, limit: int) -> None:
    """Before, the first of many calls to find none left ended the server, with its traceback."""
    command = f"ulimit -n {limit} && exec {sys.executable} -m minisgl --port 0 --model {folder}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"minisgl: error: a process may open only {limit} files (RLIMIT_NOFILE)")


SIGNAL_WHILE_LOGGING = """
import logging, os, signal, sys
from minisgl.__main__ import main

class Terminal:
    def write(self, text):
        sys.__stderr__.write(text)
        if "ready after" in text:
            os.kill(os.getpid(), signal.SIGTERM)  # the handler runs here, inside the logging
    def flush(self):
        sys.__stderr__.flush()

sys.stderr = Terminal()
sys.exit(main())
"""


INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "msgspec":
            os.kill(os.getpid(), signal.SIGINT)

from minisgl.__main__ import main
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_during_the_first_imports_ends_the_server_without_a_word(ignored: bool) -> None:
    """A shell shows the status 130. A process that inherits the signal as ignored goes on."""
    signals = ["env", "--ignore-signal=INT"] if ignored else []
    command = [*signals, sys.executable, "-c", INTERRUPTED_IMPORT, "--no-such-flag"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == (2 if ignored else -signal.SIGINT)
    assert (done.stderr != "") == ignored
    assert "Traceback" not in done.stderr


def test_a_signal_that_comes_while_a_line_is_logged_ends_the_server(folder: Path) -> None:
    """Logging catches what is raised while it writes: a handler must not leave its word to an exception."""
    command = [sys.executable, "-c", SIGNAL_WHILE_LOGGING, "--port", "0", "--model", str(folder)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("ending")


def test_sockets_are_private(idle: Server) -> None:
    (run_dir,) = Path(idle.tmp).iterdir()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert {path.name for path in run_dir.iterdir()} >= {"api.ipc", "scheduler.ipc", "detokenizer.ipc"}


def test_workers_die_with_a_killed_supervisor(folder: Path) -> None:
    server = Server("--model", str(folder)).wait_ready()
    pids = worker_pids(server.process.pid)
    request = OpenRequest(server)
    server.process.kill()
    assert request.error() == "the server is shutting down: the supervisor died"
    wait_until(lambda: not any(map(is_alive, pids.values())))
    assert not list(Path(server.tmp).iterdir())  # the folder of the sockets is gone
    shutil.rmtree(server.tmp)


def test_workers_die_with_a_supervisor_killed_while_they_start(folder: Path) -> None:
    server = Server("--model", str(folder))
    wait_until(lambda: len(worker_pids(server.process.pid)) == len(WORKERS))
    pids = worker_pids(server.process.pid)
    server.process.kill()
    wait_until(lambda: not any(map(is_alive, pids.values())))  # an import of torch may have to end first
    os.rmdir(server.tmp)  # the folder of the sockets is gone, although no worker has seen its owner alive


@pytest.mark.parametrize("worker", WORKERS[:3])
def test_a_dead_worker_ends_the_server_with_an_error_to_every_request(worker: str, folder: Path) -> None:
    with Server("--model", str(folder)) as server:
        pids = worker_pids(server.process.pid)
        request = OpenRequest(server)
        os.kill(pids[worker], signal.SIGKILL)
        server.process.wait(PATIENCE)
        assert server.process.returncode == 1
        assert "died (killed by signal 9)" in request.error()
        assert not any(map(is_alive, pids.values()))


def test_a_parent_that_ignores_the_ends_of_children_changes_nothing(folder: Path) -> None:
    """Before, nobody could wait for the trial of a grammar, nor learn how a worker had died."""
    with Server("--model", str(folder), ignored="CHLD") as server:
        body = {"prompt": "abc", "max_tokens": 8, "structured_outputs": {"regex": "[ab]{2}"}}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        os.kill(worker_pids(server.process.pid)[SCHEDULER], signal.SIGKILL)
        assert server.wait() == 1
        assert server.log[-1].endswith("the process scheduler-0 died (killed by signal 9)")


def test_a_stopped_rank_ends_the_server_with_an_error_to_every_request(folder: Path) -> None:
    """A collective would wait for 300 seconds. A server that waits for requests is not taken for a hanging one."""
    with Server("--model", str(folder), "--tp", "2", "--hang-timeout", "3") as server:
        time.sleep(4.0)
        request = OpenRequest(server)
        processes = worker_processes(server.process.pid)
        _, second = [pid for pid, module in processes if module == SCHEDULER]
        os.kill(second, signal.SIGSTOP)
        assert request.error().endswith("the process scheduler-1 hangs")
        assert server.wait() == 1
        assert "scheduler-1 hangs: it has not answered for" in server.log[-1]
        assert not any(is_alive(pid) for pid, _ in processes)


def test_a_worker_that_dies_at_start_ends_the_start(folder: Path) -> None:
    server = Server("--model", str(folder))
    wait_until(lambda: SCHEDULER in worker_pids(server.process.pid))
    os.kill(worker_pids(server.process.pid)[SCHEDULER], signal.SIGKILL)
    assert server.wait() == 1
    assert "scheduler-0 died" in server.log[-1]
    os.rmdir(server.tmp)


def test_workers_load_no_more_than_they_use(idle: Server) -> None:
    """Lean processes: torch is the scheduler's alone."""
    for entry, pid in worker_pids(idle.process.pid).items():
        maps = (Path("/proc") / str(pid) / "maps").read_text()
        assert ("libtorch" in maps) == (entry == SCHEDULER), entry
    assert "libtorch" not in (Path("/proc") / str(idle.process.pid) / "maps").read_text()
