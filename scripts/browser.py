"""A headless Chromium: the system's, else playwright's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable", "microsoft-edge"),
)


class NoBrowserError(RuntimeError):
    """Playwright or Chromium is missing; the message names what to install."""


@contextmanager
def headless_browser() -> Iterator[Any]:
    """Yield playwright's browser, closed at the end.

    Raises:
        NoBrowserError: playwright or a Chromium is missing.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowserError("playwright is not installed: pip install playwright") from error
    with sync_playwright() as playwright:
        found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
        program = found or playwright.chromium.executable_path
        if not Path(program).exists():
            raise NoBrowserError(
                "no Chromium found: apt-get install chromium, or "
                "python -m playwright install chromium-headless-shell"
            )
        browser = playwright.chromium.launch(executable_path=program)
        try:
            yield browser
        finally:
            browser.close()
