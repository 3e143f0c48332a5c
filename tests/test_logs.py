"""Logs and progress bars: unread output blocks no process, and bars appear only on a terminal."""

from __future__ import annotations

import gc
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

import pytest
from tqdm.auto import tqdm

from minisgl import progress
from minisgl.progress import LineBar, progress_bar
from support.server import PATIENCE

WRITES = """
import logging
from minisgl.logs import configure_logging, set_up_logging
set_up_logging()
for number in range(3000):
    logging.info("line %d of many that nobody reads", number)
print("written", flush=True)
input()
logging.info("read again")
configure_logging("warning")
logging.info("not important")
logging.warning("important")
"""


def test_a_full_stderr_pipe_blocks_no_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    try:
        assert child.stdout.readline() == b"written\n"  # a pipe holds some 1,500 of the lines
        found = os.read(child.stderr.fileno(), 1 << 20)  # then it has room again
        child.stdin.write(b"\n")
        child.stdin.flush()
        found += child.stderr.read()
    finally:
        child.kill()
        child.wait()
    lines = found.decode().splitlines()
    kept = [line for line in lines if "nobody reads" in line]
    dropped = re.search(r"\((\d+) lines were dropped", found.decode())
    assert dropped
    assert len(kept) + int(dropped[1]) == 3000
    assert 0 < int(dropped[1]) < 3000
    assert [line.split()[1] for line in kept[-1:]] == ["line"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d read again", lines[-2])
    assert re.fullmatch(r"\d\d:\d\d:\d\d important", lines[-1])


LONG_LINES = """
import logging
from minisgl.logs import set_up_logging
set_up_logging()
for _ in range(3000):
    logging.info("a line that nobody reads")
print("full", flush=True)
input()
logging.info("long " + "x" * 100_000)
print("written", flush=True)
input()
logging.info("read again")
"""


def test_a_line_longer_than_the_room_in_the_pipe_blocks_no_process() -> None:
    """Such as a traceback. A pipe counts as writable as soon as a page of it is free."""
    child = subprocess.Popen(
        [sys.executable, "-c", LONG_LINES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    try:
        assert child.stdout.readline() == b"full\n"
        os.read(child.stderr.fileno(), 8192)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert select.select([child.stdout], [], [], PATIENCE)[0], "it waits for its reader"
        os.read(child.stderr.fileno(), 1 << 20)
        child.stdin.write(b"\n")
        child.stdin.flush()
        lines = child.stderr.read().decode().splitlines()
    finally:
        child.kill()
        child.wait()
    assert [line.partition(" ")[2] for line in lines] == [
        "",  # ends the long line, of which the pipe had taken the beginning
        "(1 lines were dropped because stderr was not read)",
        "read again",
    ]


LONG_TEXT = """
import logging
from minisgl import logs
logs.REST_TIMEOUT = 600.0
logs.set_up_logging()
logging.info("long " + "x" * 300_000)
"""


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_a_text_longer_than_the_room_is_written_whole_while_it_is_read(opened: Callable[[], tuple[int, int]]) -> None:
    """A traceback has its message at its end."""
    reader, writer = opened()
    with subprocess.Popen([sys.executable, "-c", LONG_TEXT], stderr=writer) as child:
        os.close(writer)
        text = b""
        with suppress(OSError):  # a terminal's end
            while data := os.read(reader, 65536):
                text += data
        assert child.wait() == 0
    os.close(reader)
    assert text.count(b"x") == 300_000
    assert text.endswith(b"\n")


def test_a_bar_is_plain_lines_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with progress_bar("Loading weights", 3_000_000, unit="B") as bar:
        assert isinstance(bar, LineBar)
        for _ in range(3):
            bar.update(1_000_000)
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert "\x1b" not in shown
    texts = [line.partition(" ")[2] for line in shown.splitlines()]
    assert texts[-3:] == [
        f"Loading weights: {number}.00M of 3.00M ({share}%)" for number, share in ((1, 33), (2, 67), (3, 100))
    ]
    with progress_bar("Loading weights", 3, leave=True) as bar:
        bar.update(3)
    assert capsys.readouterr().err.count("Loading weights: 3 of 3 (100%)") == 1
    with progress_bar("Loading weights", 3, shown=False) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""


def test_a_short_wait_writes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("Loading weights", 10) as bar:
        for number in range(10):
            bar.set_description(f"step {number}")
            bar.update(1)
    assert capsys.readouterr().err == ""
    with progress_bar("Loading weights", 10, leave=True) as bar:  # leave=True reports the finished bar
        bar.update(10)
    assert capsys.readouterr().err.partition(" ")[2] == "Loading weights: 10 of 10 (100%)\n"
    bar = progress_bar("Loading weights", 10, leave=True)
    bar.update(10)
    del bar  # by a library that does not close it
    gc.collect()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("Loading weights", 10, shown=False) as bar:
        assert isinstance(bar, tqdm)
        assert not isinstance(bar, LineBar)


WRITES_JSON = """
import logging
from minisgl.logs import configure_logging, set_up_logging
set_up_logging()
configure_logging("info", "json", "tokenizer-0")
logging.getLogger("some.module").info('a "quoted" line\\nand %s', "another", extra={"request_id": "an id"})
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("it failed")
"""


def test_lines_of_json() -> None:
    command = [sys.executable, "-c", WRITES_JSON]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = map(json.loads, done.stderr.splitlines())
    assert datetime.fromisoformat(first.pop("time")).utcoffset() == timedelta(0)
    assert first == {
        "level": "info",
        "process": "tokenizer-0",
        "logger": "some.module",
        "message": 'a "quoted" line\nand another',
        "request_id": "an id",
    }
    assert (second["level"], second["message"]) == ("error", "it failed")
    assert second["exception"].endswith("ZeroDivisionError: division by zero")
