"""The shell as people use it: on a terminal, against the real server on the demo model."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shell.terminal import ALT_ENTER, CTRL_C, CTRL_D, Terminal
from support.server import PATIENCE, Server
from support.small_models import save_long_demo

SHELL = ("-m", "minisgl.shell")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_long_demo(tmp_path_factory.mktemp("models") / "demo")
    with Server("--model", str(folder), "--device", "cpu", "--num-pages", "512") as server:
        yield server
        server.wait_idle()


@pytest.fixture
def shell(server: Server, tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(*SHELL, "--base-url", f"{server.url}/v1", "--set", "temperature=0", home=tmp_path) as terminal:
        terminal.prompt()
        yield terminal


def run_plain(server: Server, lines: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *SHELL, "--base-url", f"{server.url}/v1", "--set", "temperature=0", *args],
        input=lines,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_conversation_with_commands(shell: Terminal, tmp_path: Path) -> None:
    # A long answer: the few tokens of a short one may all be there at once on a busy machine, and have no rate then.
    # The text continues after the sum, so a space after the 7 is shown only by a frame drawn at that moment.
    shell.ask("/set ignore_eos true")
    shell.prompt()
    shell.ask("/set max_tokens 400")
    shell.prompt()
    shell.ask("What is 3 + 4?")
    shell.expect(r"3 \+ 4 = 7\b.*\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s")
    shell.prompt()
    for line in ("/set ignore_eos default", "/set max_tokens default", "/reset"):
        shell.ask(line)
        shell.prompt()
    shell.ask("What is 3 + 4?")
    shell.expect(r"3 \+ 4 = 7 .*\d+ tokens, .*first after [\d.]+ s")
    shell.prompt()
    shell.ask("/system You are brief.")
    shell.expect("system: You are brief.")
    shell.prompt()
    shell.ask("/set max_tokens 3")
    shell.expect("max_tokens = 3")
    shell.prompt()
    shell.ask("Spell the word cat.")
    shell.expect("3 tokens,.*cut at the token limit")
    shell.prompt()
    shell.ask("/set temprature 1")
    shell.expect("temprature is not a sampling field; known are temperature,")
    shell.prompt()
    shell.ask("/nonsense")
    shell.expect("there is no command /nonsense; /help lists them")
    shell.prompt()
    saved = tmp_path / "talk.json"
    shell.ask(f"/save {saved}")
    shell.expect("saved 5 messages")
    body = json.loads(saved.read_text())
    assert [message["role"] for message in body["messages"]] == ["system", *["user", "assistant"] * 2]
    assert body["messages"][2]["content"] == "3 + 4 = 7"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("demo", 0.0, 3)
    shell.prompt()
    shell.ask("/reset")
    shell.expect("a new conversation")
    shell.prompt()
    shell.ask(f"/save {tmp_path / 'talk.md'}")
    shell.expect("saved 1 messages")
    assert "## System\n\nYou are brief." in (tmp_path / "talk.md").read_text()
    shell.prompt()
    shell.ask("/exit")
    assert shell.wait() == 0
    history = tmp_path / "minisgl" / "shell_history"
    assert "+What is 3 + 4?" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_stops_the_answer_at_the_server_and_not_the_program(server: Server, shell: Terminal) -> None:
    shell.ask("/set ignore_eos true")
    shell.prompt()
    shell.ask("Count from 1 to 9.")  # the model counts until the context is full
    shell.expect("1, 2, 3, 4")
    assert server.info()["scheduler-0"]["requests_running"] == 1
    assert not shell.echoes
    shell.type(CTRL_C)
    shell.expect("stopped: about")
    server.wait_idle()
    shell.prompt()
    shell.type("this is taken back" + CTRL_C)
    shell.prompt()
    for line in ("/set ignore_eos default", "/reset"):  # what was counted may be longer than the model can follow
        shell.ask(line)
        shell.prompt()
    shell.ask("What is 2 + 2?")
    shell.expect(r"2 \+ 2 = 4")
    shell.prompt()
    shell.type(CTRL_D)
    assert shell.wait() == 0
    assert shell.echoes


def test_lines_join_by_alt_enter_a_backslash_and_pasting(shell: Terminal, tmp_path: Path) -> None:
    shell.type("first" + ALT_ENTER + "second\\")
    shell.ask("")
    shell.type("\x1b[200~third\nfourth\x1b[201~")
    shell.ask("")
    shell.expect("tokens")
    shell.prompt()
    saved = tmp_path / "talk.json"
    shell.ask(f"/save {saved}")
    shell.expect("saved 2 messages")
    assert json.loads(saved.read_text())["messages"][0]["content"] == "first\nsecond\nthird\nfourth"


def test_a_signal_leaves_the_terminal_as_it_was(shell: Terminal) -> None:
    assert not shell.echoes  # the line editor has it
    shell.process.send_signal(signal.SIGTERM)
    assert shell.wait() == 128 + signal.SIGTERM
    assert shell.echoes


LAUNCHER = """
import signal, sys
from minisgl.shell.shell_process import ShellProcess
signal.signal(signal.SIGINT, lambda *_: None)
shell = ShellProcess("127.0.0.1", int(sys.argv[1]), "demo")
shell.process.wait()
sys.exit(shell.end() + 7)
"""


def test_a_parent_lends_its_terminal(server: Server, tmp_path: Path) -> None:
    with Terminal("-c", LAUNCHER, server.url.rpartition(":")[2], home=tmp_path) as terminal:
        terminal.prompt()
        terminal.ask("/set ignore_eos true")
        terminal.prompt()
        terminal.ask("Count from 1 to 9.")
        terminal.expect("1, 2, 3")
        terminal.type(CTRL_C)  # reaches both
        terminal.expect("stopped")
        terminal.prompt()
        terminal.type(CTRL_D)
        assert terminal.wait() == 7
        assert terminal.echoes


SERVE = ("-m", "minisgl", "--shell", "--port", "0", "--num-pages", "512", "--shutdown-timeout", "3600")


def test_after_sigterm_an_answer_in_the_shell_is_finished(tmp_path: Path) -> None:
    with Terminal(*SERVE, home=tmp_path) as terminal:
        terminal.prompt()
        for setting in ("/set ignore_eos true", "/set max_tokens 300"):
            terminal.ask(setting)
            terminal.prompt()
        terminal.ask("Count from 1 to 9.")
        terminal.expect("1, 2, 3")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.expect("300 tokens")
        assert terminal.wait() == 0
        assert terminal.echoes


def test_after_a_sigterm_to_all_of_a_group_the_shell_ends_and_other_clients_are_answered(tmp_path: Path) -> None:
    with Terminal(*SERVE, home=tmp_path) as terminal:
        url = terminal.expect(r"ready after .* on (http://[\d.:]+)")[1]
        terminal.prompt()
        body = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            os.killpg(terminal.process.pid, signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert terminal.wait() == 0
        assert terminal.echoes


WITHOUT_PACKAGES = """
import runpy, sys
for name in ("prompt_toolkit", "rich", "markdown_it"):
    sys.modules[name] = None  # makes the import fail as without the package
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize("start", [("minisgl", "--shell", "--port", "0"), ("minisgl.shell",)])
def test_without_its_packages_the_shell_names_the_extra_before_anything_starts(
    tmp_path: Path, start: tuple[str, ...]
) -> None:
    with Terminal("-c", WITHOUT_PACKAGES, *start, home=tmp_path) as terminal:
        terminal.expect(
            rf"{start[0]}: error: the shell needs the packages prompt-toolkit, rich, markdown-it-py: "
            r"pip install 'minisgl\[shell\]'\n"
        )
        assert terminal.wait() == 2
        assert "ready" not in terminal.text
        assert "Traceback" not in terminal.text


def test_a_pipe_needs_no_packages(server: Server) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT_PACKAGES,
            "minisgl.shell",
            "--base-url",
            f"{server.url}/v1",
            "--set=temperature=0",
        ],
        input="What is 3 + 4?\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("3 + 4 = 7\n", 0)


def test_pipes_get_the_answers_and_nothing_else(server: Server) -> None:
    done = run_plain(server, "What is 3 + 4?\n\nWhat is\\\n2 + 2?\n/set\n/help\n")
    assert done.stdout.splitlines()[0] == "3 + 4 = 7"
    assert len(done.stdout.splitlines()) == 2
    assert "temperature = 0.0" in done.stderr
    assert "/save FILE" in done.stderr
    assert done.returncode == 0


def test_a_script_learns_that_something_failed(server: Server) -> None:
    done = run_plain(server, "/nonsense\nHello\n", "--model", "other")
    assert done.returncode == 1
    assert "there is no command /nonsense" in done.stderr
    assert "the model 'other' does not exist" in done.stderr


def test_ctrl_c_ends_a_script_and_its_request(server: Server) -> None:
    process = subprocess.Popen(
        [sys.executable, *SHELL, "--base-url", f"{server.url}/v1", "--set", "ignore_eos=true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Count from 1 to 9.\n")
    process.stdin.flush()
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    process.stdin.close()
    process.stdout.close()
    server.wait_idle()


def test_without_a_server_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, *SHELL, "--base-url", "http://127.0.0.1:1/v1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot reach http://127.0.0.1:1/v1" in done.stderr
    assert "Traceback" not in done.stderr
