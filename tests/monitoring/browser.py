"""Chromium without a window, for tests of pages with a script."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

needs_chromium = pytest.mark.skipif(not shutil.which("chromium"), reason="Chromium (Debian's package) is not installed")

PATIENCE_MS = 580_000  # no test depends on it: a page that takes as long has hung


@contextlib.contextmanager
def running_chromium() -> Iterator[Any]:
    """A browser of Playwright's, which ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=PATIENCE_MS)
        try:
            yield browser
        finally:
            browser.close()
