"""Secrets among Beam's options are in nothing that is written or shown."""

import json
from pathlib import Path

import pytest

from pipeline import run
from pipeline.config import Config
from tests.conftest import write_bright_image
from tests.forked_jobs import KILLED, Moment, run_forked

SECRETS = ("hunter2-flag", "hunter2-config", "hunter2-pair", "hunter2-apart", "hunter2-list")
CONFIG = """
beam_options:
  azure_connection_string: DefaultEndpointsProtocol=https;AccountKey=hunter2-config==
  environment_config: '{"env": {"AWS_SECRET_ACCESS_KEY": "hunter2-pair"}}'
  s3_region_name: eu-central-1
  environment_options: [password=hunter2-list]
"""
FLAGS = ("--s3_session_token=hunter2-flag", "--s3_secret_access_key", "hunter2-apart")


def secrets_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.yaml").write_text(CONFIG)
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    return ["--config", tmp_path / "job.yaml", "--input", tmp_path / "in", "--output", tmp_path / "out", *FLAGS]


def written_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file()}


def test_no_file_and_no_line_of_a_job_has_a_secret(job, tmp_path, bright_model):
    """Neither the state of one that was killed, nor what the next one leaves; other options are there to read."""
    log = tmp_path / "log"
    killed = Moment("pipeline.launch.batch:read_written")
    assert run_forked([*job, "--model", bright_model], log, killed) == KILLED
    state = written_in(tmp_path / "out")
    assert "eu-central-1" in state["run.json"] and "--s3_session_token=***" in state["run.json"]
    assert {name: secrets_in(text) for name, text in state.items() if secrets_in(text)} == {}
    assert run_forked([*job, "--model", bright_model], log) == 0
    written = written_in(tmp_path / "out")
    assert {name: secrets_in(text) for name, text in written.items() if secrets_in(text)} == {}
    assert "--s3_session_token=***" in written["report.html"] and "eu-central-1" in written["report.html"]
    options = json.loads(written["summary.json"])["config"]["beam_options"]
    assert options["azure_connection_string"] == "***"
    assert run_forked([*job, "--model", bright_model, "--dry-run", "--verbose"], log) == 0
    assert secrets_in(log.read_text()) == []


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        pytest.param("{password: {a: hunter2-config}}", [], id="wrong value"),
        pytest.param("{}", ["password=hunter2-config"], id="stray argument"),
        pytest.param("{}", ["--allow_unsafe_triggers=secret_key=hunter2-config"], id="value for a switch"),
        pytest.param("{no_such_token: hunter2-config}", [], id="unknown option"),
    ],
)
def test_no_error_has_a_secret(config, flags, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(f"beam_options: {config}")
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    command = ["--config", tmp_path / "job.yaml", "--input", tmp_path / "in", "--output", tmp_path / "out", *flags]
    assert run.main([*map(str, command)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and secrets_in(said) == []


def test_the_option_itself_reaches_beam():
    from pipeline.launch.options import beam_options

    config = Config(beam_options={"s3_session_token": "hunter2-config"})
    assert beam_options(config, []).get_all_options()["s3_session_token"] == "hunter2-config"
