"""The packages of the lock file fit what users do with them beyond the tests."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement


def bounds_of(package: str, needed: str, extra: str) -> list[Requirement]:
    """What a package says of one that it needs for an extra."""
    said = [Requirement(line) for line in importlib.metadata.requires(package) or ()]
    return [each for each in said if each.name == needed and each.marker and each.marker.evaluate({"extra": extra})]


@pytest.mark.parametrize("extra", ["interactive", "dataframe"])
def test_the_pandas_that_is_installed_is_one_that_beam_runs_with_in_a_notebook(extra):
    bounds = bounds_of("apache-beam", "pandas", extra)
    assert bounds
    assert all(each.specifier.contains(importlib.metadata.version("pandas")) for each in bounds)
