"""The enlarged pictures of the report, in a real browser."""

import pytest

from tests.monitoring.browser import PATIENCE_MS, needs_chromium, running_chromium
from tests.report.test_page import render, sample

SAMPLES = [
    sample("both.jpg", ("cat", "dog")),
    sample("cat.jpg", ("cat",)),
    sample("many.jpg", ("dog",) * 40),
    sample("nothing.jpg", ()),
]


@pytest.fixture(scope="module")
def browser():
    with running_chromium() as running:
        yield running


@needs_chromium
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_a_picture_is_enlarged_and_leads_to_the_next_and_the_page_fits(tmp_path, browser, scheme, width):
    (tmp_path / "report.html").write_text(render({}, SAMPLES))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"file://{tmp_path}/report.html")
    page.locator("a.frame").first.click()
    page.get_by_role("link", name="Next").locator("visible=true").click()
    assert page.locator("figure:target p.code").text_content() == "cat.jpg"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(252, 251, 248)", "dark": "rgb(22, 22, 20)"}[scheme]
    page.close()
