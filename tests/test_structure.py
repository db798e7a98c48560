"""What the package offers, what no module of it may do, and which packages it is installed with."""

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement

import pipeline
from tests.fixtures import REPO


@pytest.mark.parametrize("name", pipeline.__all__)
def test_the_package_offers_its_transforms_and_records_by_name(name):
    assert getattr(pipeline, name).__name__ == name


def test_no_module_that_reads_from_storage_can_unpickle():
    """Ruff bans pickle and its like (TID251, S301)."""
    sources = {path: path.read_text(encoding="utf-8") for path in (REPO / "pipeline").rglob("*.py")}
    allowed = [path.name for path, text in sources.items() if re.search(r"noqa: .*(TID251|S301)|\bimport pickle", text)]
    assert allowed == []
    assert "TID251" in (REPO / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("extra", ["interactive", "dataframe"])
def test_the_pandas_that_is_installed_is_one_that_beam_runs_with_in_a_notebook(extra):
    """The lock file fits what users do with it beyond the tests."""
    needed = [Requirement(line) for line in importlib.metadata.requires("apache-beam") or ()]
    bounds = [each for each in needed if each.name == "pandas" and each.marker and each.marker.evaluate({"extra": extra})]
    assert bounds
    assert all(each.specifier.contains(importlib.metadata.version("pandas")) for each in bounds)
