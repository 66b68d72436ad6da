"""A real browser for the pages: the machine's own Chromium, or the one that playwright has installed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

from lab_server import LabServer
from voila_server import DASHBOARDS, VoilaServer

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def _executable() -> str | None:
    named = os.environ.get("LABKIT_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the session: while playwright is open, its event loop runs, and no other test could have one."""
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=_executable(), args=FLAGS)
        except Error as error:
            pytest.skip(f"no Chromium on this machine (install it, or set LABKIT_CHROMIUM): {error.message[:120]}")
        yield started
        started.close()


class Visitor:
    """A browser page that remembers what went wrong on it, and what it asked of strangers."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._note)
        self.page.route(lambda url: not _is_local(url), lambda _: None)  # never answered: the worst network

    def _note(self, request) -> None:
        if not _is_local(request.url):
            self.strangers.append(request.url)


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "about:"))


def _visits(browser: Browser) -> Iterator:
    """visit(width=1440, …) → a `Visitor` in a context of its own."""
    contexts: list[BrowserContext] = []

    def make(width: int = 1440, height: int = 1000, **settings) -> Visitor:
        context = browser.new_context(viewport={"width": width, "height": height}, locale="en-US", **settings)
        context.set_default_timeout(30_000)
        contexts.append(context)
        return Visitor(context)

    yield make
    for context in contexts:
        context.close()


visit = pytest.fixture(_visits, name="visit")
lasting_visit = pytest.fixture(_visits, name="lasting_visit", scope="module")
"""For pages that the tests of a module share."""


# ---- one lab server and one Voila for all tests of whole pages


@pytest.fixture(scope="package")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime folder and a home of these tests' own."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "runtime").mkdir(mode=0o700)
    before = {name: os.environ.get(name) for name in ("LABKIT_RUNTIME", "LABKIT_HOME")}
    os.environ.update(LABKIT_RUNTIME=str(folder / "runtime"), LABKIT_HOME=str(folder))
    yield folder
    for name, value in before.items():
        os.environ.update({name: value}) if value else os.environ.pop(name, None)


@pytest.fixture(scope="package")
def lab(places: Path) -> Iterator[LabServer]:
    """Not started: without a server a page has something to say, too."""
    server = LabServer(places / "serve.log")
    yield server
    server.stop()


@pytest.fixture(scope="package")
def voila(places: Path) -> Iterator[VoilaServer]:
    """All dashboards, as `labkit lab` serves them."""
    server = VoilaServer(DASHBOARDS, places / "voila.log")
    yield server
    server.stop()
