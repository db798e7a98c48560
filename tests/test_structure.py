"""What the package offers, and what no module of it may do."""

import re

import pytest

import pipeline
from tests.fixtures import REPO


@pytest.mark.parametrize("name", pipeline.__all__)
def test_the_package_offers_its_transforms_and_records_by_name(name):
    assert getattr(pipeline, name).__name__ == name


def test_the_package_offers_nothing_else():
    with pytest.raises(AttributeError, match="no attribute 'Detector'"):
        _ = pipeline.Detector


def test_no_module_that_reads_from_storage_can_unpickle():
    """Ruff bans pickle and its like (TID251, S301)."""
    sources = {path: path.read_text(encoding="utf-8") for path in (REPO / "pipeline").rglob("*.py")}
    allowed = [path.name for path, text in sources.items() if re.search(r"noqa: .*(TID251|S301)|\bimport pickle", text)]
    assert allowed == []
    assert "TID251" in (REPO / "pyproject.toml").read_text(encoding="utf-8")
