"""One table says what a runner can do; Beam and the docs know each of its rows."""

import pytest

from pipeline.runners.table import RUNNERS
from tests.fixtures import REPO


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.name)
def test_beam_and_the_table_of_the_docs_know_the_runner_of_each_row(runner):
    assert any(runner.name in line for line in (REPO / "docs/streaming.md").read_text().splitlines() if line.startswith("| "))
    assert type(runner.make()).__name__ == (runner.beam_name or runner.name).rpartition(".")[2]
