"""The filters and the enlarged pictures of the report, in a real browser."""

import numpy as np
import pytest

from pipeline.report.page import render_report
from tests.monitoring.browser import PATIENCE_MS, needs_chromium, running_chromium
from tests.report.test_page import sample

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
def test_filters_hide_pictures_and_go_together(tmp_path, browser, scheme, width):
    (tmp_path / "report.html").write_text(render_report({}, SAMPLES, []))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"file://{tmp_path}/report.html")

    def shown() -> list[str]:
        return page.eval_on_selector_all(
            ".gallery figure .name", "names => names.filter(n => n.offsetParent).map(n => n.textContent)"
        )

    assert shown() == ["both.jpg", "cat.jpg", "many.jpg", "nothing.jpg"]
    page.get_by_label("dog", exact=True).check()
    assert shown() == ["both.jpg", "many.jpg"]
    page.get_by_label("cat", exact=True).check()
    page.get_by_label("90 % and more").check()
    confident = [image.ref.uri for _, image in SAMPLES[:2] if np.any(image.detections.confidences >= 0.9)]
    assert shown() == confident
    page.get_by_label("all", exact=True).first.check()
    page.get_by_label("all", exact=True).last.check()
    assert len(shown()) == 4
    page.locator(".gallery button.picture").first.click()
    page.get_by_role("button", name="Next").locator("visible=true").click()
    assert page.locator("[popover]:popover-open p.code").text_content() == "cat.jpg"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
