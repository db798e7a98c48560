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


def memory_of(page: Any) -> dict[str, float]:
    """What a page uses after a garbage collection: nodes of the document, listeners, bytes of the script's heap."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    used = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return {"nodes": used["Nodes"], "listeners": used["JSEventListeners"], "heap_bytes": used["JSHeapUsedSize"]}
