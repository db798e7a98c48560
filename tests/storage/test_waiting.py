"""Storage that does not answer: within seconds a line says what is waited for, wherever a command begins with it."""

import re
import socket

import pytest

from tests.conftest import write_bright_image
from tests.forked_jobs import ForkedJob
from tests.processes import wait_until

GONE = "gs://gone/place"


@pytest.fixture
def silent_storage():
    """Takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "what", "module"),
    [
        pytest.param(["--input", GONE, "--output", "out", "--model", "digits"], "input", "pipeline.run", id="input"),
        pytest.param(["--input", "in", "--output", GONE, "--model", "digits"], "output", "pipeline.run", id="output"),
        pytest.param(
            ["--input", "in", "--output", GONE, "--model", "digits"], "output", "pipeline.commands.reconcile", id="results"
        ),
        pytest.param(["--input", "in", "--output", "out", "--model", GONE], "model", "pipeline.run", id="model"),
    ],
)
def test_storage_that_does_not_answer_is_named(silent_storage, tmp_path, monkeypatch, command, what, module):
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 40, 30))
    monkeypatch.chdir(tmp_path)
    (log := tmp_path / "log").touch()
    with ForkedJob(command, log, module=module, environment={"STORAGE_EMULATOR_HOST": silent_storage}) as job:
        line = wait_until(lambda: re.search("waiting for .*\n", log.read_text()), log.read_text, job)
    assert line[0].startswith(f"waiting for {what} {GONE}, which has not answered for ")
