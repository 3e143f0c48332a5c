"""`python -m minisgl.shell`: chat with a running server. See `--help`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from minisgl.config import DEFAULT_PORT
from minisgl.shell.client import ChatClient, ChatError
from minisgl.shell.launch import API_KEY
from minisgl.shell.plain import PlainView
from minisgl.shell.session import COMMANDS, EXIT_TERMINATED, Session
from minisgl.shell.view import View


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for a failure, 2 for wrong arguments, 130 after an interrupt."""
    args = _parse(argv)
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
    except BrokenPipeError:  # nobody reads on: the rest, and what Python itself would still flush, is for nobody
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
    if plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
        return PlainView()
    from minisgl.shell.terminal import TerminalView, history_path  # not for pipes: it is the slow part of the start

    return TerminalView(COMMANDS, history_path())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.shell",
        description="Chat with a running OpenAI-compatible server in the terminal. "
        "Where stdin or stdout is not a terminal: one question a line in, plain text out.",
        epilog=f"A server that wants a key gets the one in the environment variable {API_KEY}.",
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
