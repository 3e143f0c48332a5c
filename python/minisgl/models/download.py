"""Downloads a model from a hub. No torch."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from minisgl.config.source import ModelSource
from minisgl.error_text import first_line, in_one_line
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.progress import line_bar

logger = logging.getLogger(__name__)

_CONFIG_AND_TOKENIZER = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_WEIGHTS = "*.safetensors"
# "*" crosses "/". Of sub-folders only templates are wanted, and sentence-transformers' steps (1_Pooling/config.json);
# others hold a model again: another format, a training's steps.
_IGNORED = [
    *(f"*/{pattern}" for pattern in (*_CONFIG_AND_TOKENIZER, _WEIGHTS) if pattern not in ("*.json", "*.jinja")),
    *("[!0-9]*/*.json", "?[!_]*/*.json"),
    "consolidated*.safetensors",
]
_PART = re.compile(r"\.[0-9a-f]{8}\.incomplete$")  # of huggingface_hub: a name that no later download continues
# Parts of errors and log lines: an address's query, which may hold a signature, and what each status code means.
_NOISE = re.compile(r"\?[^\s'\"]+| For more information check: \S+")
_RETRY_PAUSES = (1.0, 2.0, 4.0)  # seconds before another try of a download that the network or the hub broke


@contextmanager
def ended_by_signals(*files: Path) -> Iterator[None]:
    """Let a signal end the process at once while it downloads, and remove the files of which it has a part.

    It removes `files`, too: what the process has registered for its normal end does not run. KeyboardInterrupt would
    wait until threads of huggingface_hub have downloaded the files that they have begun.
    """

    def end(signum: int, _frame: object) -> None:
        for pause in (0.05, 0.0):  # for threads that have just closed a whole file and will rename it, or open another
            for descriptor in Path("/proc/self/fd").iterdir():
                with suppress(OSError):
                    file = descriptor.readlink()
                    if _PART.search(file.name):
                        file.unlink()
            time.sleep(pause)
        for file in files:
            with suppress(OSError):
                file.unlink()
        os._exit(128 + signum)  # by its default action a signal does not end the first process of a container

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number in numbers if before[number] != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def download_model(name: str, revision: str | None, hub: ModelSource, weights: bool) -> Path:
    """Return the local folder of a model of a hub, with what the cache lacked of it. Raises UnsupportedModel."""
    patterns = [*_CONFIG_AND_TOKENIZER, _WEIGHTS] if weights else _CONFIG_AND_TOKENIZER
    download = _download_from_modelscope if hub == "modelscope" else _download_from_hugging_face
    folder = download(name, revision, patterns)
    if weights and not any(folder.glob(_WEIGHTS)):
        raise UnsupportedModel(
            f"model {name} came without safetensors; weights in other formats (.bin, .gguf, Mistral's consolidated) or "
            "in sub-folders are not downloaded: convert them to safetensors beside config.json"
        )
    return folder


def _download_from_modelscope(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise UnsupportedModel(
            "--model-source modelscope needs the package modelscope: pip install 'minisgl[modelscope]'"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED))
    except Exception as error:  # from several packages, whose names change
        raise UnsupportedModel(f"model {name} could not be downloaded from ModelScope: {first_line(error)}") from error


def _download_from_hugging_face(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError

    library = logging.getLogger("huggingface_hub")
    library.handlers.clear()  # or each of its lines would be written twice: they reach the root's handlers, too
    if library.level == logging.WARNING:  # its default hides that it waits for another process's download of a file
        library.setLevel(logging.NOTSET)
    for module in ("file_download", "utils._http"):  # they log the addresses of faults
        logging.getLogger(f"huggingface_hub.{module}").addFilter(_tidy)
    snapshot = partial(snapshot_download, name, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
    commit = None
    try:
        # snapshot_download itself would wait for ever for a hub that does not answer.
        commit = HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
        logger.info("model %s: commit %s of %s", name, commit, constants.ENDPOINT)
        folder = Path(_try_repeatedly(partial(snapshot, tqdm_class=line_bar())))
    except Exception as error:  # also of hf_xet, and of httpx or httpx2, by the version of huggingface_hub
        failure = _download_failure(name, revision, error)
        try:
            folder = Path(snapshot(local_files_only=True))
        except IncompleteSnapshotError as missing:
            lacking = "" if commit else f"; {in_one_line(missing).partition(' Outgoing traffic')[0]}"
            raise UnsupportedModel(failure + lacking) from error
        except (OSError, HFValidationError):  # not there, or not readable
            raise UnsupportedModel(failure) from error
        if constants.HF_HUB_OFFLINE:
            logger.info("model %s: commit %s of %s", name, folder.name, constants.HF_HUB_CACHE)
        else:
            logger.warning("%s; the cache's commit %s is used", failure, folder.name)
    gc.collect()  # ends the bars, which the library leaves open: a terminal would show them again at the server's end
    return folder


def _try_repeatedly(download: Callable[[], str]) -> str:
    """Return what `download` returns. After a fault that may pass it is tried again; finished files are kept.

    huggingface_hub itself tries again after other faults than a reset connection or an error 5xx within a file.
    """
    for pause in (*_RETRY_PAUSES, None):
        _limit_waits()
        try:
            return download()
        except Exception as error:
            if pause is None or not _may_pass(error):
                raise
            logger.warning("the download failed and is tried again in %g s: %s", pause, _cause(error))
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _limit_waits() -> None:
    """Give a time limit to those requests of huggingface_hub that have none: its list of a model's files."""
    from huggingface_hub import constants, get_session

    def limit(request: Any) -> None:
        seconds = request.extensions["timeout"]
        for phase, given in seconds.items():
            if given is None:
                seconds[phase] = constants.HF_HUB_ETAG_TIMEOUT

    get_session().event_hooks["request"].append(limit)


def _may_pass(error: Exception) -> bool:
    """Return True for faults of the network, and for a hub or a host of files that has failed or is too busy."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)  # of httpx or httpx2


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {_quiet(error)}"


def _tidy(record: logging.LogRecord) -> bool:
    record.msg, record.args = _quiet(record.getMessage()), ()
    return True


def _quiet(text: Exception | str) -> str:
    return _NOISE.sub("", in_one_line(text))


def _download_failure(name: str, revision: str | None, error: Exception) -> str:
    """Return what prevented a download from the Hugging Face hub and, where it is known, what helps."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of the list of files
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    match error:
        case GatedRepoError():
            return f"model {name} is gated: ask for access on its hub page and {log_in}"
        case RepositoryNotFoundError():
            return (
                f"model {name} does not exist: no such folder, and the hub knows no such model (if it is private, "
                f"{log_in})"
            )
        case RevisionNotFoundError() if revision is None:
            return f"model {name} has no branch main on its hub: --revision names another"
        case RevisionNotFoundError():
            return f"model {name} has no --revision {revision} on its hub"
        case HFValidationError():
            return f"model {name} does not exist: no such folder, and not a hub id (owner/name)"
        case OfflineModeIsEnabled():
            return (
                f"model {name} is neither a folder nor complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
            )
    return (
        f"model {name} could not be downloaded from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}: {_cause(error)}"
    )
