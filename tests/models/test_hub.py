"""Models of a hub, downloaded by processes of their own from a hub that the test runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hub import Fault, Hub
from support.server import PATIENCE

# Prints where each model is, or why it is not there.
FIND = """
import gc
import sys
import time
from tqdm import tqdm
from minisgl.config import ConfigError
from minisgl.logs import set_up_logging
from minisgl.models.hub import model_folder
set_up_logging()
time.sleep = lambda seconds: None  # between tries
for word in sys.argv[1:]:
    name, _, revision = word.partition("@")
    try:
        print(model_folder(name, revision=revision or None))
    except ConfigError as error:
        print(error)
print(f"{sum(isinstance(each, tqdm) for each in gc.get_objects())} bars are open", file=sys.stderr)
"""
SMALL = {"config.json": b"{}", "model.safetensors": bytes(100_000)}
WANTED = {
    **SMALL,
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "merges.txt": b"",
    "chat_template.jinja": b"hello",
    "additional_chat_templates/tool_use.jinja": b"tools",
    "1_Pooling/config.json": b"{}",
}
UNWANTED = {
    "README.md": b"",
    "consolidated.safetensors": b"",
    "consolidated-00001-of-00002.safetensors": b"",
    "pytorch_model.bin": b"",
    "original/params.json": b"",
    "original/tokenizer.model": b"",
    "fp8/model.safetensors": b"",
    "4bit/config.json": b"",
    "checkpoint_1/config.json": b"",
    "onnx/model.onnx": b"",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def full_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model o/m."""
    cache = tmp_path_factory.mktemp("cache")
    with Hub() as hub:
        hub.push("o/m", SMALL)
        find(hub, cache, "o/m")
    return cache


def find(hub: Hub, cache: Path, *words: str, **environment: str) -> tuple[list[str], str]:
    """Return what FIND prints, a line for each model, and its log."""
    done = hub.run(FIND, cache, *words, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines(), done.stderr


def files_of(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_branch_is_downloaded_with_what_is_needed_and_followed(hub: Hub, tmp_path: Path) -> None:
    first = hub.push("o/m", WANTED | UNWANTED)
    hub.push("o/m", SMALL, branch="other")
    (folder, other), log = find(hub, tmp_path, "o/m", "o/m@other", HF_TOKEN="hf_mine")
    assert files_of(folder) == WANTED
    assert files_of(other) == SMALL
    assert f"model o/m: commit {first} of {hub.url}" in log
    assert "secret" not in log, "the signature of an address"
    assert "\n0 bars are open" in log, "a terminal would show them again"
    sent = {(request.is_cdn, request.authorization) for request in hub.requests if "/o/m" in request.path}
    assert sent == {(False, "Bearer hf_mine"), (True, None)}, "the token goes to the hub alone"

    hub.requests.clear()
    moved = WANTED | {"config.json": b'{"moved": true}'}
    second = hub.push("o/m", moved)
    (folder,), log = find(hub, tmp_path, "o/m")
    assert files_of(folder) == moved
    assert f"commit {second} of" in log
    assert [request.path for request in hub.requests if request.method == "GET" and "/resolve/" in request.path] == [
        f"/o/m/resolve/{second}/config.json"
    ]


def test_each_failure_is_one_line_with_its_cause(hub: Hub, tmp_path: Path) -> None:
    reasons = {
        "o/none": "does not exist: .* the hub knows no such model .*HF_TOKEN",
        "o/dev": "has no branch main on its hub: --revision names another",
        "o/m@v9": "has no --revision v9 on its hub",
        "o/gated": "is gated: ask for access .* or set HF_TOKEN",
        "o/bin": r"came without safetensors; .*\.bin, ",
        "o/limited": f"could not be downloaded from {hub.url} to {tmp_path}/hub: HfHubHTTPError: 429 Too Many Requests",
        "o/lost": r"could not be downloaded .*: 404 .*/model\.safetensors\.$",
        "o/refused": r"could not be downloaded .*: 403 .*/model\.safetensors ",
        "o/portal": r"could not be downloaded .*: JSONDecodeError: ",
        "o/list": r"could not be downloaded .*/hub: HfHubHTTPError: 403 Forbidden: .*permissions\.$",
        "o/reset": r"could not be downloaded .*: \[Errno 104\] Connection reset by peer$",
    }
    for model in ("o/m", "o/gated", "o/limited", "o/lost", "o/refused", "o/portal", "o/list", "o/reset"):
        hub.push(model, SMALL)
    hub.push("o/dev", SMALL, branch="dev")
    hub.push("o/bin", {"pytorch_model.bin": b""})
    hub.faults |= {
        "HEAD /o/gated": Fault(403, {"X-Error-Code": "GatedRepo"}),
        "GET /api/models/o/limited": Fault(429, {"Retry-After": "1"}),
        "GET /api/models/o/portal": Fault(203),  # a login page, say
        "GET /api/models/o/list/tree/": Fault(403),
        "HEAD /o/lost/.*safetensors": Fault(404, {"X-Error-Code": "EntryNotFound"}),
        "GET /o/refused/.*safetensors": Fault(403),
        "GET /o/reset/.*safetensors": Fault(end="reset", after=50_000),
    }
    lines, log = find(hub, tmp_path, *reasons)
    assert len(lines) == len(reasons)
    for line, (model, reason) in zip(lines, reasons.items(), strict=True):
        assert line.startswith(f"model {model.partition('@')[0]} ")
        assert re.search(reason, line), line
    assert "secret" not in "".join([*lines, log])
    assert log.count("No files matched") <= 1, "the library writes its lines, if any, once"


@pytest.mark.parametrize("fault", [Fault(end="reset", after=50_000), Fault(503), Fault(end="close", after=50_000)])
def test_a_fault_within_a_file_is_tried_again(fault: Fault, hub: Hub, tmp_path: Path) -> None:
    hub.push("o/m", SMALL)
    hub.faults["GET /o/m/.*safetensors"] = fault._replace(times=3)
    (folder,), log = find(hub, tmp_path, "o/m")
    assert files_of(folder) == SMALL
    assert hub.faults["GET /o/m/.*safetensors"].times == 0
    assert "secret" not in log


DOWN = {
    "refused": Fault(),
    "an error": Fault(500),
    "branch is gone": Fault(404, {"X-Error-Code": "RevisionNotFound"}),
    "reset": Fault(end="reset"),
    "no answer": Fault(end="stall"),
    "offline": Fault(),
}


@pytest.mark.parametrize("how", DOWN)
def test_a_hub_that_is_down_leaves_a_complete_cache(how: str, hub: Hub, full_cache: Path) -> None:
    commit = hub.push("o/m", SMALL)
    hub.push("o/never", SMALL)
    hub.faults["GET /api/"] = DOWN[how]
    environment = {
        "refused": {"HF_ENDPOINT": "http://127.0.0.1:9"},
        "offline": {"HF_HUB_OFFLINE": "1"},
        "no answer": {"HF_HUB_ETAG_TIMEOUT": "1"},
    }.get(how, {})
    (folder, never), log = find(hub, full_cache, "o/m", "o/never", **environment)
    assert files_of(folder) == SMALL
    assert never.startswith("model o/never ")
    if how == "offline":
        assert f"commit {commit} of {full_cache}/hub" in log
        assert never.endswith("HF_HUB_OFFLINE is set")
    else:
        assert f"; the cache's commit {commit} is used" in log
        assert re.search(f"has no branch main|could not be downloaded .* to {full_cache}/hub: ", never)


def test_a_hub_that_stalls_at_its_list_of_files_is_not_waited_for(hub: Hub, full_cache: Path) -> None:
    before = hub.push("o/m", SMALL)
    hub.push("o/m", SMALL | {"config.json": b'{"moved": true}'})
    hub.faults["GET /api/models/o/m/tree/"] = Fault(end="stall")
    (folder,), log = find(hub, full_cache, "o/m", HF_HUB_ETAG_TIMEOUT="1")
    assert files_of(folder) == SMALL
    assert re.search(rf"could not be downloaded .*/hub: ReadTimeout: .*; the cache's commit {before} is used", log)


def test_a_part_of_a_model_is_never_taken_for_the_whole(hub: Hub, tmp_path: Path) -> None:
    hub.push("o/m", SMALL)
    hub.faults["HEAD /o/m/.*safetensors"] = Fault(404, {"X-Error-Code": "EntryNotFound"})
    find(hub, tmp_path, "o/m")
    (line,), _ = find(hub, tmp_path, "o/m", HF_ENDPOINT="http://127.0.0.1:9")
    assert line.endswith("is incomplete: 1 file(s) are missing (model.safetensors).")


INTERRUPTED = """
import signal
import minisgl
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which child processes inherit
try:
    minisgl.LLM("o/m")
except KeyboardInterrupt:
    print("interrupted")
try:
    minisgl.LLM("o/none")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_an_llm_ends_its_download_at_once(number: signal.Signals, hub: Hub, tmp_path: Path) -> None:
    """Ctrl-C is an exception of the user's process, and SIGKILL does not leave a process that downloads."""
    hub.push("o/m", SMALL)
    hub.faults["GET /o/m/.*safetensors"] = Fault(end="stall", after=50_000)
    command, pipe = [sys.executable, "-c", INTERRUPTED], subprocess.PIPE
    process = subprocess.Popen(command, env=hub.environment(tmp_path), stdout=pipe, stderr=pipe, text=True)
    assert hub.stalled.wait(PATIENCE)
    process.send_signal(number)
    out, log = process.communicate(timeout=PATIENCE)  # also the end of the child, which has the same stderr
    if number == signal.SIGINT:
        first, second = out.splitlines()
        assert first == "interrupted", log
        assert second.startswith("model o/none does not exist: no such folder, and the hub knows no such model")
    assert "Traceback" not in log
    assert not list(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once(number: signal.Signals, hub: Hub, tmp_path: Path) -> None:
    """The rest of the file would come only after the end of this test."""
    hub.push("o/m", SMALL)
    hub.faults["GET /o/m/.*safetensors"] = Fault(end="stall", after=50_000)
    command = [sys.executable, "-m", "minisgl", "--model", "o/m", "--uds", str(tmp_path / "socket")]
    process = subprocess.Popen(command, env=hub.environment(tmp_path), stderr=subprocess.PIPE, text=True)
    assert hub.stalled.wait(PATIENCE)
    process.send_signal(number)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, log
    assert "Traceback" not in log
    assert not list(tmp_path.rglob("*.incomplete"))
    assert not (tmp_path / "socket").exists()

    hub.faults.clear()
    (folder,), _ = find(hub, tmp_path, "o/m")
    assert files_of(folder) == SMALL
