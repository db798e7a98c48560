"""Where tests find real photos and weights that are not part of the project."""

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
RELEASE = REPO / "tests" / "golden" / "results_0_1_0"


def fixtures_dir() -> Path:
    """The folder of external test fixtures; skips the calling test with a reason where it is absent."""
    folder = Path(os.environ.get("PIPELINE_TEST_FIXTURES", REPO.parent / "shared" / "fixtures")).resolve()  # rows name real paths
    if not folder.is_dir():
        pytest.skip(f"external fixtures are absent ({folder}); set PIPELINE_TEST_FIXTURES to their folder")
    return folder
