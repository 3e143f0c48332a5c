"""Open WebUI: one chat through its page, in Chromium (a `chromium` on PATH, as Debian has it)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

SETTINGS = {
    "OPENAI_API_BASE_URL": os.environ["OPENAI_BASE_URL"],
    "ENABLE_OLLAMA_API": "False",
    "WEBUI_AUTH": "False",
    "DATA_DIR": str(Path("data").resolve()),
    "RAG_EMBEDDING_ENGINE": "openai",  # no model is downloaded for documents
    "OFFLINE_MODE": "True",
    # Its own tools are a prompt of 26,000 bytes, which are the demo model's tokens.
    "DEFAULT_MODEL_PARAMS": '{"function_calling": "legacy"}',
    # The page asks the model for a title, tags and what to ask next; the demo model has none.
    **{f"ENABLE_{name}_GENERATION": "False" for name in ("TITLE", "TAGS", "FOLLOW_UP")},
}


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    chromium = shutil.which("chromium")
    assert chromium is not None, "there is no chromium"
    command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with open("open-webui.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | SETTINGS)
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, "Open WebUI ended: open-webui.log"
                assert time.monotonic() < deadline, "Open WebUI does not answer"
                time.sleep(1)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            try:
                chat(page, url)
            finally:
                page.screenshot(path="open-webui.png")
                browser.close()
    finally:
        process.terminate()
        process.wait()
    print("one chat through its page in Chromium")


def chat(page, url: str) -> None:  # noqa: ANN001
    page.goto(url, timeout=120_000)
    box = page.locator("#chat-input")
    box.wait_for(timeout=120_000)
    page.keyboard.press("Escape")  # what is new
    box.click()
    page.keyboard.type("What is 12 + 30?")
    page.keyboard.press("Enter")
    page.get_by_text("42").first.wait_for(timeout=120_000)


main()
