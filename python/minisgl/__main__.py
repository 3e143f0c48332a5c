"""`python -m minisgl`: starts the server and stays until it is ended. See `--help`.

`python -m minisgl verify MODEL` compares a model with transformers instead; `python -m minisgl doctor` (or `--check`)
reports what works on this machine.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> int:
    """Return the exit code of the command."""
    if sys.argv[1:2] == ["verify"]:
        from minisgl.verify.__main__ import main as verify

        return verify(sys.argv[2:])
    if sys.argv[1:2] in (["doctor"], ["--check"]):
        from minisgl.doctor.__main__ import main as doctor

        return doctor(sys.argv[2:])
    with _interrupts_kill():
        from minisgl.server.start import start
    return start(sys.argv[1:])


@contextmanager
def _interrupts_kill() -> Iterator[None]:
    """Let Ctrl-C kill the process, which has nothing to lose yet, for the half second that imports take.

    Python's own handler would raise an exception in the middle of them: a traceback or, in a library in C, a crash.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if the signal is inherited as ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
