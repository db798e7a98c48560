"""The cluster that the tests of a module share."""

import os
from collections.abc import Iterator

import pytest

from tests.flink.cluster import FlinkCluster, FlinkMissing, running_flink


@pytest.fixture(scope="module")
def flink_settings() -> dict[str, str]:
    """What a module's cluster has in its configuration beside `deploy/flink/flink-conf.yaml`."""
    return {}


@pytest.fixture(scope="module")
def flink(tmp_path_factory, flink_settings) -> Iterator[FlinkCluster]:
    try:
        with running_flink(tmp_path_factory.mktemp("flink"), **flink_settings) as cluster:
            yield cluster
    except FlinkMissing as err:
        (pytest.fail if os.environ.get("CI_REQUIRE_EMULATORS") == "1" else pytest.skip)(str(err))
