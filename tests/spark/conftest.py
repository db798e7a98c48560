"""The job server that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.spark.job_server import SparkMissing, running_spark


@pytest.fixture(scope="module")
def spark(tmp_path_factory) -> Iterator[list[str]]:
    """The flags of a job on Spark."""
    try:
        with running_spark(tmp_path_factory.mktemp("spark")) as flags:
            yield flags
    except SparkMissing as err:
        pytest.skip(str(err))  # also in CI: `make test-spark` is where it is fetched
