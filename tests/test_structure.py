"""What the documents say of the tree is what the tree is."""

import re

import pytest

import pipeline
from tests.fixtures import REPO

FOLDERS = {path.parent.name for path in (REPO / "pipeline").glob("*/__init__.py")}


def test_the_picture_of_the_architecture_has_a_box_for_each_folder():
    picture = (REPO / "docs/design.md").read_text(encoding="utf-8").split("```mermaid")[1].split("```")[0]
    assert set(re.findall(r'\["(\w+)/<br/>', picture)) == FOLDERS


def test_the_guide_for_contributors_names_each_folder():
    guide = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {folder for folder in FOLDERS if f"{folder}/" not in guide} == set()


def test_each_folder_says_in_a_sentence_what_it_is_for():
    for folder in FOLDERS:
        text = (REPO / "pipeline" / folder / "__init__.py").read_text(encoding="utf-8")
        assert re.match(r'"""[A-Z].{20,}\.("""|\n)', text), folder


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
