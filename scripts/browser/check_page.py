"""Drives the page at / as people do: with a key, a mouse, a keyboard, on a phone, in the dark. `run` starts it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

DESKTOP = {"viewport": {"width": 1400, "height": 1000}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
PATIENCE = 60_000  # milliseconds


class Visit:
    """A page in a context of its own, in which nothing may go wrong and nothing comes from elsewhere."""

    def __init__(self, browser: Browser, url: str, key: str, options: dict[str, Any]) -> None:
        self.page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(PATIENCE)
        self.problems: list[str] = []
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._check_origin(request.url, url))
        self.page.goto(url)
        expect(self.page.get_by_label("API key", exact=True)).to_be_visible()
        for sent in ("a-wrong-key", key):
            self.page.get_by_label("API key", exact=True).fill(sent)
            self.page.keyboard.press("Enter")
            if sent != key:
                expect(self.page.locator("#key-note")).to_have_text("The server refused this key.")
        expect(self.page.locator("#status")).to_have_text("live")

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "401" not in text:  # before the key is given
            self.problems.append(text)

    def _check_origin(self, asked: str, url: str) -> None:
        if not asked.startswith((url, "data:", "blob:")):
            self.problems.append(f"asked for {asked}")

    def close(self) -> None:
        overflow = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{overflow} pixels wider than the screen"
        assert not self.problems, self.problems
        self.page.context.close()


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def wait_for(page: Page, condition: str) -> None:
    """Wait for an expression of the page. Playwright's own way to wait needs eval, which the page's policy forbids."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never true: {condition}"
        page.wait_for_timeout(100)


def wait_idle(page: Page) -> None:
    """Wait until what was asked for is done; a request just sent needs a moment to be seen."""
    page.wait_for_timeout(1000)
    wait_for(page, "state.load.running + state.load.waiting + state.engine.sequences.length === 0")


def check_chat(page: Page) -> None:
    question = page.get_by_label("Message")
    for _ in range(2):
        question.fill("What is Minisgl?")
        question.press("Enter")
        expect(page.locator("#send")).to_have_text("Send")
    facts = page.locator(".message:not(.user) small")
    assert "Minisgl is" in page.locator(".message").nth(1).inner_text()
    expect(facts).to_have_count(2)
    expect(facts.last).to_contain_text("prompt tokens cached")
    cached = numbers(facts.last.inner_text())[-2]
    assert cached > 0, "the second question finds the first"


def check_tree(page: Page, picture: Path) -> None:
    """Shared prefixes are hit, and unrelated prompts evict them."""
    counts = page.locator("#tree-counts")
    page.click("#shared")
    wait_for(page, "state.engine.nodes.some(node => node.locks >= 4)")
    page.wait_for_timeout(1500)
    page.screenshot(path=picture, full_page=True)
    wait_idle(page)
    assert numbers(counts.inner_text())[4] > 1000, "tokens hit"
    while numbers(counts.inner_text())[3] == 0:
        page.click("#unrelated")
        wait_idle(page)
    page.locator("#tree").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tree-readout")).to_contain_text("tokens 0–")


def check_steps(page: Page) -> None:
    page.locator("#steps").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step-readout")).to_contain_text("decode rows")
    page.keyboard.press("Escape")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export trace").click()
    trace = json.loads(Path(download.value.path()).read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"process_name", "prefill", "decode", "KV pages", "requests"} <= names
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in trace["traceEvents"] if "ts" in event)


def check_numbers(page: Page, url: str, key: str) -> None:
    """The page says what /metrics says."""
    wait_idle(page)
    request = urllib.request.Request(f"{url}/metrics", headers={"authorization": f"Bearer {key}"})
    metrics = urllib.request.urlopen(request).read().decode()
    values = {name: float(value) for name, value in re.findall(r"^minisgl:(\w+){[^}]*} (\S+)$", metrics, re.MULTILINE)}
    figures = page.locator("#figures div").all_inner_texts()
    assert numbers(figures[0])[0] == values["num_requests_running"]
    assert numbers(figures[2])[-1] == values["generation_tokens_total"]
    assert numbers(figures[6])[1:] == [values["prefix_cache_hits_total"], values["prefix_cache_queries_total"]]
    assert numbers(page.locator("#tree-counts").inner_text())[3] == values["evicted_pages_total"]


def main(url: str, key: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"] or None, args=["--no-sandbox"])
        visit = Visit(browser, url, key, DESKTOP)
        check_chat(visit.page)
        check_tree(visit.page, folder / "desktop.png")
        check_steps(visit.page)
        check_numbers(visit.page, url, key)
        paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        visit.close()

        for name, options in {"dark": {**DESKTOP, "color_scheme": "dark"}, "phone": PHONE}.items():
            visit = Visit(browser, url, key, options)
            visit.page.click("#shared")
            visit.page.wait_for_timeout(2500)
            visit.page.click("#unrelated")
            visit.page.wait_for_timeout(3500)
            visit.page.screenshot(path=folder / f"{name}.png", full_page=True)
            is_dark = visit.page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
            assert is_dark == (name == "dark")
            visit.close()
        browser.close()
    print(f"the page works; pictures are in {folder}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
