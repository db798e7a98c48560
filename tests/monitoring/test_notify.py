"""A job's end is told to a webhook, in three tries, whatever the end is."""

import http.server
import json
import os
import signal
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline import run
from pipeline.log_lines import log_lines
from pipeline.monitoring import notify as notifying
from pipeline.monitoring.notify import notify
from tests.forked_jobs import Moment, run_forked
from tests.launch.jobs import paused_with_lock, write_images
from tests.processes import served, wait_until


class Webhook(http.server.ThreadingHTTPServer):
    """Answers with these statuses in turn; None: not at all until its end."""

    daemon_threads = True

    def __init__(self, *statuses):
        self.statuses, self.got, self.over = list(statuses), [], threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://user:hunter2@127.0.0.1:{self.server_port}/hooks/hunter2?token=hunter2"

    def __enter__(self):
        self._serving = served(self)
        self._serving.__enter__()
        return self

    def __exit__(self, *error):
        self.over.set()
        self._serving.__exit__(*error)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status = self.server.statuses.pop(0)
        if status is None:
            self.server.over.wait()
            return
        self.send_response(status)
        self.send_header("Location", "file:///etc/passwd")
        self.end_headers()

    def log_message(self, *_args):
        pass


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(notifying, "_WAITS_S", (0.0, 0.01, 0.01))
    monkeypatch.setattr(notifying, "_TRY_SECONDS", 60.0)  # a busy machine is no webhook that hangs


@pytest.mark.parametrize(
    ("statuses", "tries", "warns"),
    [
        pytest.param([204], 1, "", id="taken"),
        pytest.param([500, 503, 200], 3, "", id="fails twice"),
        pytest.param([500, 500, 500], 3, "it answered with status 500", id="refuses"),
        pytest.param([302, 307, 308], 3, "it answered with status 308", id="redirects are not followed"),
        pytest.param([None, None, None], 3, "ReadTimeout", id="hangs"),
    ],
)
@log_lines()
def test_a_webhook_gets_three_tries_and_its_failure_is_one_warning(statuses, tries, warns, at_once, capsys, monkeypatch):
    if None in statuses:
        monkeypatch.setattr(notifying, "_TRY_SECONDS", 0.5)
    with Webhook(*statuses) as webhook:
        notify(webhook.url, {"exit_code": 0})
        wait_until(lambda: len(webhook.got) >= tries)  # the client may give up before the server has read
        assert webhook.got == [{"exit_code": 0}] * tries
    err = capsys.readouterr().err
    assert "hunter2" not in err and err.count("\n") == bool(warns)
    assert not warns or err == f"warning: notification failed: {warns}\n"


def test_a_job_that_is_refused_is_told_too_and_its_exit_code_stays(tmp_path, at_once, capsys):
    refused = ["--output", str(tmp_path), "--iou-threshold", "7", "--notify"]
    with Webhook(200) as webhook:
        assert run.main([*refused, webhook.url]) == 2
        (told,) = webhook.got
    assert told["exit_code"] == 2 and "--iou-threshold" in told["error"]
    assert run.main([*refused, "http://127.0.0.1:1/x"]) == 2
    assert "warning: notification failed: ConnectionError" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "having"),
    [
        pytest.param("importlib:import_module", "monitoring.notify", id="while it imports"),
        pytest.param("pipeline.launch.batch:prepare", "", id="before it checks its input"),
        pytest.param("pipeline.launch.batch:model_known", "", id="before it looks for the model"),
    ],
)
def test_a_job_that_sigterm_stops_while_it_prepares_is_told(place, having, arguments, out, tmp_path):
    write_images(tmp_path / "in", "a.png")
    at = Moment(place, having=having, sent=signal.SIGTERM)
    with Webhook(200) as webhook:
        assert run_forked([*arguments, "--notify", webhook.url], tmp_path / "printed", at) == 130
        (told,) = webhook.got
    assert told["exit_code"] == 130 and told["images"]["read"] == 0
    assert not (out / "detections").exists()


def test_prometheus_finds_the_last_run_its_last_success_and_its_dead_share(arguments, out, tmp_path, run_job):
    """A run that fails, or is skipped, keeps the time of the last success, of which an alert asks."""
    write_images(tmp_path / "in", "a.png", "b.png", "c.png")
    (tmp_path / "in" / "d.png").touch()
    path = tmp_path / "metrics" / "nightly.prom"

    def last_run(code: int, *flags: object) -> dict[str, float]:
        assert run_job(*arguments, "--metrics-file", path, *flags)[0] == code
        found = {each.name: each for each in text_string_to_metric_families(path.read_text())}
        assert all(each.documentation and each.type == "gauge" for each in found.values())
        assert {sample.labels["schedule"] for each in found.values() for sample in each.samples} == {"nightly"}
        return {name.removeprefix("detection_last_"): each.samples[0].value for name, each in found.items()}

    began = time.time()
    first = last_run(0)
    assert began < first["success_timestamp_seconds"] == first["run_timestamp_seconds"] < time.time()
    assert (first["exit_code"], first["dead_share"]) == (0, 0.25) and 0 < first["duration_seconds"] < time.time() - began
    dead = last_run(4, "--max-dead-share", 0.1)
    assert (dead["exit_code"], dead["dead_share"]) == (4, 0.25), "as a repeat has it"
    assert dead["success_timestamp_seconds"] == first["success_timestamp_seconds"] < dead["run_timestamp_seconds"]
    with paused_with_lock([*arguments, "--score-threshold", 0.9], tmp_path / "log"):
        skipped = last_run(0, "--score-threshold", 0.9, "--when-busy", "skip")
    assert skipped["success_timestamp_seconds"] == first["success_timestamp_seconds"] < skipped["run_timestamp_seconds"]


def test_a_file_of_metrics_that_is_none_is_refused_and_stays(tmp_path, capsys):
    """It was replaced by a file without a word, also where it was a device."""
    os.mkfifo(tmp_path / "job.prom")
    command = ["--input", "in", "--output", f"{tmp_path}/out", "--model", "digits", "--metrics-file"]
    for target in (tmp_path / "job.prom", tmp_path):
        assert run.main([*command, f"{target}"]) == 2
        expected = "expected a file or a free name, found something else there; choose another name"
        assert capsys.readouterr().err == f"error: --metrics-file {target}: {expected}\n"
    assert [each.is_fifo() for each in tmp_path.iterdir()] == [True]


def test_a_file_of_metrics_may_be_a_link(tmp_path, capsys):
    (tmp_path / "job.prom").symlink_to("target.prom")
    assert run.main(["--input", "no/such", "--output", f"{tmp_path}/out", "--metrics-file", f"{tmp_path}/job.prom"]) == 2
    assert (tmp_path / "job.prom").is_symlink() and "detection_last_exit_code" in (tmp_path / "target.prom").read_text()
