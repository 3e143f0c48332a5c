"""Compiles C++ of csrc/ with the machine's compiler, in about a second, and keeps it in the user's cache folder.

A machine need not have a C++ compiler, so the kernels compiled here are optional: if they cannot be compiled, torch's
products are used instead, and the log says so.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import minisgl

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")  # OpenMP's library is the one that torch has loaded
_SECONDS = 120


class CompilationError(Exception):
    """Raised if there is no compiler, or if the compiler or the library fails; the message says which."""


def load_library(file: str, *flags: str, environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """Return the library of a file of csrc/, compiled with `flags` by $CXX or g++ unless the cache already has it.

    Raises CompilationError if it cannot be compiled or loaded.
    """
    compiler = shlex.split(environ.get("CXX") or "g++")
    if shutil.which(compiler[0], path=environ.get("PATH")) is None:
        raise CompilationError(f"there is no C++ compiler {compiler[0]}")
    source = Path(minisgl.__file__).parent / "csrc" / file
    command = [*compiler, *_FLAGS, *flags]
    key = sha256(repr(command).encode() + source.read_bytes()).hexdigest()[:32]
    try:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl" / "cpu"
        library = cache / f"{source.stem}-{key}.so"
        with suppress(OSError):  # there is none, or a broken one
            return ctypes.CDLL(str(library))
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # another process may be doing the same
            made = Path(folder) / library.name
            _compile([*command, "-o", str(made), str(source)])
            with made.open("rb") as written:
                os.fsync(written.fileno())  # or a loss of power may leave a part of it, and to load that is a SIGBUS
            made.replace(library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:  # RuntimeError: who runs this has no home folder
        raise CompilationError(f"csrc/{file} cannot be compiled or loaded: {error}") from error


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompilationError(f"{command[0]} takes more than {_SECONDS} seconds") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise CompilationError(f"{command[0]} fails with {done.returncode}: {lines[0]}")
