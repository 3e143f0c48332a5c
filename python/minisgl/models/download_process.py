"""Downloads a model in a process of its own, for `LLM`: `python -m minisgl.models.download_process ARGUMENTS`.

The threads of huggingface_hub cannot be interrupted: after Ctrl-C the user's process would wait until they have whole
files. It ends this process instead, which removes the files of which it has a part. ARGUMENTS are those of
`download_model` as JSON; the answer goes to stdout. The end of stdin ends the process, however its parent dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from minisgl.config.source import ModelSource
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.download import download_model, ended_by_signals
from minisgl.process.child import start_module


class _Answer(msgspec.Struct):
    folder: str = ""
    error: str = ""


def download_interruptibly(name: str, revision: str | None, hub: ModelSource, weights: bool) -> Path:
    """Do as `download_model`. An exception that comes meanwhile, as Ctrl-C raises it, ends the download at once."""
    arguments = msgspec.json.encode((name, revision, hub, weights)).decode()
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    # In a session of its own it gets no Ctrl-C, which it would answer with a traceback before its handlers are there.
    with start_module("minisgl.models.download_process", arguments, **options) as process:
        assert process.stdout is not None
        try:
            text = process.stdout.read()
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise RuntimeError(f"the process that downloaded model {name} died (exit code {process.returncode})")
    answer = msgspec.json.decode(text, type=_Answer)
    if answer.error:
        raise UnsupportedModel(answer.error)
    return Path(answer.folder)


def main(arguments: str) -> None:
    """Download, and answer."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it ends this process even if the parent ignores it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = os.dup(1)
    os.dup2(2, 1)  # packages may print to stdout
    with ended_by_signals():
        try:
            answer = _Answer(folder=str(download_model(*msgspec.json.decode(arguments))))
        except UnsupportedModel as error:
            answer = _Answer(error=str(error))
    os.write(out, msgspec.json.encode(answer))


def _end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
