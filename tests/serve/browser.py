"""A headless Chromium for tests of the page, and what it asked for while they ran."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request, ViewportSize, expect, sync_playwright

from tests.serve.conftest import Served

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("--disable-background-networking", "--disable-component-update", "--no-first-run")
HANG_S = 90
"""after so long what is waited for does not come, however busy the machine is"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium that the system has; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("browser tests need Chromium: apt install chromium")
    expect.set_options(timeout=HANG_S * 1000)
    arguments = [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class Visitor:
    """Somebody with the page open, until the block of a `with` ends. Notes everything that must not happen."""

    def __init__(
        self, browser: Browser, served: Served, *, width: int = 1100, height: int = 760, dark: bool = False,
        home: str = "/",
    ):  # fmt: skip
        self.served = served
        self.context = browser.new_context(
            viewport=ViewportSize(width=width, height=height), color_scheme="dark" if dark else "light", locale="en",
            reduced_motion="reduce",
        )  # fmt: skip
        self.context.set_default_timeout(HANG_S * 1000)
        self.page: Page = self.context.new_page()
        self.foreign: list[str] = []
        """addresses that were asked for and are not the server's"""
        self.faults: list[str] = []
        """dialogs, errors of scripts, and what the policy refused"""
        self.context.on("request", self._note_request)
        self.page.on("dialog", self._note_dialog)
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.on("console", self._note_console)
        token = getattr(served, "token", "")  # of a dashboard
        self.page.goto(served.url + (home.replace("/", f"/?token={token}", 1) if token else home))

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.check()
        self.context.close()

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.served.url}/", f"blob:{self.served.url}/")):
            self.foreign.append(request.url)

    def _note_dialog(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note_console(self, message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text or "Trusted" in message.text:
            self.faults.append(message.text)

    def ask(self, text: str = "How many apples are there in the basket?") -> None:
        """Type a question and send it. Enter sends nothing before the last response has ended: that is waited for."""
        self.wait_for_end()
        self.page.get_by_label("Your question").fill(text)
        self.page.keyboard.press("Enter")

    def wait_for_end(self) -> None:
        """Until the response has come to its end."""
        self.page.locator("#send").wait_for(state="visible")

    def check(self) -> None:
        """Nothing foreign was asked for, and nothing ran that should not."""
        assert self.foreign == [] and self.faults == []
        assert self.page.evaluate("window.pwned") is None
