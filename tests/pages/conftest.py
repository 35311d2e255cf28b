"""A headless Chromium from the packages of the system. Without it, tests of pages are skipped."""

from __future__ import annotations

import shutil

import pytest
from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page in a new tab, and its console messages."""

    def __init__(self, browser, path, width=1280, height=900, dark=False):
        size, scheme = {"width": width, "height": height}, "dark" if dark else "light"
        self.context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(300_000)
        self.said = []
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.goto(path.as_uri())

    def scrolls_sideways(self):
        return self.tab.evaluate("document.documentElement.scrollWidth > innerWidth")

    def frames(self):
        """Wait until drawings of the next frame are finished."""
        self.tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def open_page(browser):
    opened = []

    def open_page(path, **options):
        opened.append(Opened(browser, path, **options))
        return opened[-1]

    yield open_page
    for page in opened:
        page.context.close()
        assert page.said == []
