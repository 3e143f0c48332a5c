"""`python -m minisgl.shell`: chat with a running server. See `--help`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minisgl.config import ConfigError
from minisgl.config.server import DEFAULT_PORT
from minisgl.shell.chat_client import ChatClient, ChatError
from minisgl.shell.session import COMMANDS, CONTINUES, EXIT_TERMINATED, Session, View
from minisgl.shell.shell_process import API_KEY, check_packages, on_terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the shell; return 0, 1 for a failure, 2 for wrong arguments or absent packages, 130 after an interrupt."""
    args = _parse(argv)
    if not args.plain:
        try:
            check_packages()
        except ConfigError as error:
            print(f"minisgl.shell: error: {error}", file=sys.stderr)
            return 2
    # Whoever started us may have changed these. asyncio takes SIGINT over, during an answer, only from the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        with asyncio.Runner() as runner:
            client = ChatClient(args.base_url, os.environ.get(API_KEY))
            try:
                return _run(args, client, runner)
            finally:
                runner.run(client.close())
    except ChatError as error:
        print(f"minisgl.shell: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe: drop the rest, also what Python would flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(args: argparse.Namespace, client: ChatClient, runner: asyncio.Runner) -> int:
    models = runner.run(client.models())
    if not models:
        raise ChatError(f"{args.base_url} serves no model")
    model = args.model or models[0]
    view = _make_view(plain=args.plain)
    session = Session(client, model, view, runner)
    signal.signal(signal.SIGTERM, lambda *_: session.terminate())
    session.conversation.system = args.system
    for setting in args.set:
        name, _, value = setting.partition("=")
        try:
            session.sampling.set(name, value)
        except ValueError as error:
            raise ChatError(f"--set {setting}: {error}") from None
    if view.interactive:
        view.note(f"{model} at {args.base_url}. /help lists the commands, Ctrl-D ends.")
    return session.run()


def _make_view(*, plain: bool) -> View:
    if plain or not on_terminal():
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
        return PlainView()
    from minisgl.shell.terminal import TerminalView, history_path  # pipes do not need its packages

    return TerminalView(COMMANDS, history_path())


class PlainView:
    """View of pipes and scripts: one question per line (a backslash at its end continues it), and the answers' text.

    Only the answers go to stdout; notes and errors go to stderr.
    """

    interactive = False

    def ask(self) -> str:
        lines: list[str] = []
        while line := sys.stdin.readline():
            line = line.rstrip("\r\n")
            if not line.endswith(CONTINUES):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix(CONTINUES))
        if lines:
            return "\n".join(lines)
        raise EOFError

    @contextmanager
    def answer(self) -> Iterator[PlainView]:
        try:
            yield self
        finally:
            print(flush=True)

    def add(self, text: str) -> None:
        print(text, end="", flush=True)

    def think(self, text: str) -> None:
        """Drop the reasoning, which is not the answer."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.shell",
        description="Chat with a running OpenAI-compatible server in the terminal. "
        "Where stdin or stdout is not a terminal: one question a line in, plain text out.",
        epilog=f"A server that needs a key gets the one in the environment variable {API_KEY}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--base-url", default=f"http://127.0.0.1:{DEFAULT_PORT}/v1", metavar="URL", help="default: %(default)s"
    )
    parser.add_argument("--model", default=None, metavar="NAME", help="default: the first that the server names")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a sampling field, as /set takes it"
    )
    parser.add_argument("--plain", action="store_true", help="as if stdin and stdout were no terminal")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
