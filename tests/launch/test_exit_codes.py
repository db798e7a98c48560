"""With which code a job ends: an outage may pass, a repeat says the same, and nobody waits for ever for a run that is stuck."""

import datetime
import socket

import pytest

from pipeline import run
from tests.launch.jobs import paused_with_lock, write_images
from tests.shard_rows import detected, write_rows


@pytest.fixture
def closed_port():
    """A port of this machine on which nobody listens while the test runs."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        yield taken.getsockname()[1]


def main(*arguments) -> int:
    return run.main([*map(str, arguments)])


def test_a_stream_that_starts_while_pubsub_is_away_may_be_started_again(closed_port, monkeypatch, capfd, bright_model):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", f"localhost:{closed_port}")
    places = ["--input", "projects/p12345/subscriptions/s01", "--output", "projects/p12345/topics/t01"]
    assert main("--mode", "streaming", *places, "--model", bright_model) == 1
    assert capfd.readouterr().err.startswith("error: input projects/p12345/subscriptions/s01: Pub/Sub cannot be reached: ")


def test_a_job_that_starts_while_its_bucket_is_away_may_be_started_again(closed_port, monkeypatch, capfd, out, bright_model):
    for name, value in {
        "AWS_ENDPOINT_URL_S3": f"http://localhost:{closed_port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main("--input", "s3://bucket/in/*", "--output", out, "--model", bright_model) == 1
    assert "error: input s3://bucket/in/*: cannot be listed: " in capfd.readouterr().err


def test_a_job_that_starts_while_its_job_server_is_away_may_be_started_again(closed_port, arguments, capfd):
    assert main(*arguments, "--runner", "FlinkRunner", f"--job_endpoint=localhost:{closed_port}") == 1
    assert "where a job server listens, but: " in capfd.readouterr().err


def test_a_job_whose_images_are_dead_says_so_again_when_it_is_repeated(arguments, out, tmp_path, run_job):
    """A supervisor that starts it once more must not make a success of it; fewer dead images than the bound do."""
    write_images(tmp_path / "in", "good.png")
    for number in range(3):
        (tmp_path / "in" / f"{number}.png").write_bytes((tmp_path / "in" / "good.png").read_bytes()[:40])
    (first, again) = (run_job(*arguments) for _ in range(2))
    assert (first[0], again[0]) == (4, 4)
    assert first[2].startswith("error: 3 of 4 images failed, more than max_dead_share = 0.5; 3 of them ")
    assert again[2].startswith(f"error: 3 of 4 images failed (3 of them before), more than max_dead_share = 0.5; see {out}")
    assert run_job(*arguments, "--max-dead-share", 0.8)[0] == 0


@pytest.mark.parametrize(
    ("hours", "rows", "code"),
    [
        pytest.param(7, False, 3, id="it has held its lock for long and written nothing"),
        pytest.param(5, False, 0, id="it has not held it for long"),
        pytest.param(30, True, 0, id="it has written rows a moment ago"),
    ],
)
def test_a_run_that_makes_no_progress_is_not_skipped_for_ever(arguments, out, tmp_path, capfd, hours, rows, code):
    write_images(tmp_path / "in", "a.png")
    with paused_with_lock(arguments, tmp_path / "log"):
        (lock,) = out.glob(".lock-*")
        holder, _, _ = lock.read_text().partition(", since ")
        then = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=hours)
        lock.write_text(f"{holder}, since {then:%F %T.%f} UTC")
        if rows:
            write_rows(str(out), [detected("b.png")], run=holder.partition(",")[0].removeprefix("run "))
        assert main(*arguments, "--when-busy", "skip") == code
    printed = capfd.readouterr()
    assert ("skipped: " in printed.out) == (code == 0)
    assert ("it has written no row for 6 hours" in printed.err) == (code == 3)
