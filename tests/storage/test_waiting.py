"""Storage that does not answer: within seconds a line says what is waited for, wherever a command begins with it."""

import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import REPO, without_stamps, write_bright_image

# without credentials, for which this would wait as well
COMMAND = """
import importlib, sys
from apache_beam.internal.gcp import auth

auth._Credentials._credentials_init = True
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""
GONE = "gs://gone/place"


@pytest.fixture
def silent_storage():
    """Takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "what"),
    [
        pytest.param(["pipeline.run", "--input", GONE, "--output", "out", "--model", "digits"], "input", id="input"),
        pytest.param(["pipeline.run", "--input", "in", "--output", GONE, "--model", "digits"], "output", id="output"),
        pytest.param(["pipeline.run", "--input", "in", "--output", "out", "--model", GONE], "model", id="model"),
    ],
)
def test_storage_that_does_not_answer_is_named(silent_storage, tmp_path, command, what):
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 40, 30))
    env = {**os.environ, "STORAGE_EMULATOR_HOST": silent_storage, "PYTHONPATH": str(REPO)}
    line = [sys.executable, "-c", COMMAND, *command]
    with subprocess.Popen(line, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            said = next((line for line in job.stderr if "waiting for" in line), "nothing")
        finally:
            job.kill()
    assert without_stamps(said).startswith(f"waiting for {what} {GONE}, which has not answered for ")
