"""The cluster that the tests of a module share."""

import os
from collections.abc import Iterator

import pytest

from tests.flink.cluster import FlinkCluster, RunnerMissing, running_flink


@pytest.fixture(scope="module")
def flink(tmp_path_factory) -> Iterator[FlinkCluster]:
    try:
        with running_flink(tmp_path_factory.mktemp("flink")) as cluster:
            yield cluster
    except RunnerMissing as err:
        (pytest.fail if os.environ.get("CI_REQUIRE_EMULATORS") == "1" else pytest.skip)(str(err))
