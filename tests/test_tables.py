"""Tables that commands print are aligned, and have escape sequences only on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from minisgl.tables import table

COLORED = "from minisgl.tables import colored; print(colored('x', 'red'))"


def test_the_first_columns_are_aligned_to_the_left_and_the_others_to_the_right() -> None:
    rows = [("a", "100", ""), ("long", "7", "end")]
    assert table(("name", "n", "note"), rows) == [
        "name    n  note",
        "----  ---  ----",
        "a     100",
        "long    7   end",
    ]
    assert table(("name", "n", "note"), rows, left=3)[2:] == ["a     100", "long  7    end"]
    assert table(("name",), []) == ["name", "----"]


def test_colors_are_for_terminals_that_show_them() -> None:
    def printed(**env: str) -> bytes:
        ours, theirs = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        subprocess.run([sys.executable, "-c", COLORED], stdout=theirs, check=True, env=clean | env)
        os.close(theirs)
        return os.read(ours, 100).strip()

    assert printed(TERM="xterm") == b"\x1b[31mx\x1b[0m"
    assert printed(TERM="xterm", NO_COLOR="1") == b"x"
    assert printed(TERM="dumb") == b"x"
    piped = subprocess.run([sys.executable, "-c", COLORED], capture_output=True, check=True)
    assert piped.stdout.strip() == b"x"
