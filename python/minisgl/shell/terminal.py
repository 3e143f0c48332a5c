"""View on a terminal: a line editor with history (prompt_toolkit), and answers drawn as Markdown (rich).

Enter sends, Alt-Enter or a backslash at the end of the line begins a new line, pasted text may have many lines.
"""

from __future__ import annotations

import os
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from minisgl.shell.session import CONTINUES

FRAME_SECONDS = 1 / 12
REASONING = "dim italic"
_PROMPT = ANSI("\x1b[1;32m>\x1b[0m ")

_parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class TerminalView:
    """View of a person at a terminal."""

    interactive = True

    def __init__(self, commands: Sequence[str], history: Path) -> None:
        self._console = Console(highlight=False)
        self._session: PromptSession[str] = PromptSession(
            history=self._open_history(history),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation="  ",
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            enable_history_search=True,
        )

    def _open_history(self, path: Path) -> History:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        except OSError as error:
            self.note(f"what you type is not kept: {path}: {error.strerror}")
            return InMemoryHistory()
        return FileHistory(str(path))

    def ask(self) -> str:
        text = self._session.prompt(_PROMPT)
        return text.encode(errors="replace").decode()  # half a character typed

    @contextmanager
    def answer(self) -> Iterator[_MarkdownAnswer]:
        with _no_echo(), _MarkdownAnswer(self._console) as view:
            yield view
        self._console.print()

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def error(self, text: str) -> None:
        self._console.print(Text(text, style="red"))


def history_path() -> Path:
    """Return the file of the input history, in the state folder of the XDG base directories."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "minisgl" / "shell_history"


def _keys() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith(CONTINUES):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep input typed during an answer for the next prompt, so that it does not appear between the answer's lines."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


class _MarkdownAnswer:
    """Prints each block of Markdown once the next one has begun, and redraws the last block as it grows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting = Spinner("dots", style="dim")
        self._pending = ""  # Markdown that is not printed yet
        self._reasoning = ""
        self._printed = False
        self._next_cut = 0.0
        self._live = Live(
            get_renderable=self._draw, console=console, transient=True, refresh_per_second=1 / FRAME_SECONDS
        )

    def __enter__(self) -> _MarkdownAnswer:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()  # erases what it drew
        self._print_reasoning()
        if self._pending.strip():
            self._print(self._pending)

    def add(self, text: str) -> None:
        self._print_reasoning()
        self._pending += text
        if time.monotonic() < self._next_cut:
            return
        cut = last_block(self._pending)
        if cut:
            done, self._pending = self._pending[:cut], self._pending[cut:]
            self._print(done)
        self._next_cut = time.monotonic() + FRAME_SECONDS

    def think(self, text: str) -> None:
        self._reasoning += text

    def _draw(self) -> RenderableType:
        """Return one frame; called by Live's thread."""
        if pending := self._pending:
            return _Bottom(_markdown(pending))
        return _Bottom(Text(self._reasoning, style=REASONING)) if self._reasoning else self._waiting

    def _print_reasoning(self) -> None:
        if self._reasoning:
            self._console.print(Text(self._reasoning.strip(), style=REASONING))
            self._reasoning, self._printed = "", True

    def _print(self, source: str) -> None:
        if self._printed:
            self._console.print()
        self._console.print(_markdown(source))
        self._printed = True


def _markdown(source: str) -> Markdown:
    """Return Markdown that shows HTML tags as text: rich would drop them and their content."""
    markdown = Markdown(source)
    markdown.parsed = _parser.parse(source)
    return markdown


def last_block(source: str) -> int:
    """Return the place where the last block of this Markdown begins: text before it cannot change.

    Only whole lines count, because half a line may still become another kind of block.
    """
    whole = source[: source.rfind("\n") + 1]
    begins = [token.map[0] for token in _parser.parse(whole) if token.level == 0 and token.map and token.nesting >= 0]
    return sum(len(line) + 1 for line in whole.split("\n")[: begins[-1]]) if begins else 0


class _Bottom:
    """The last lines of a renderable, as many as the screen has."""

    def __init__(self, content: Markdown | Text) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for line in lines[-max(console.height - 1, 1) :]:
            yield from line
            yield Segment.line()
