"""Lines on standard error: JSON for machines, time stamps for people, repeats as counts."""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings

import pytest

from pipeline import run
from pipeline.errors import run_command
from pipeline.log_lines import bind_run_id, console, log_lines, write_unlocked
from tests.conftest import write_bright_image

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        pytest.param(
            "warning", rf"{STAMP}Z one\n{STAMP}Z warning: t\\x1bwo\n{STAMP}Z WARNING pipeline.x: e\nerror: th\\nree\n", id="text"
        ),
        pytest.param("error", r"error: th\\nree\n", id="quiet"),
    ],
)
def test_lines_of_text_have_time_stamps_but_the_last_error_and_steer_no_terminal(level, shown, capfd):
    with log_lines(log_level=level, stamped=True) as log:
        console.info("one")
        console.warning("t\x1bwo")
        logging.getLogger("pipeline.x").warning("e")
        logging.getLogger("apache_beam").error("of a library")
        console.error("%s", "th\nree")
    assert re.fullmatch(shown, capfd.readouterr().err) and log.last_error == r"th\nree"


def test_a_command_within_a_command_writes_each_line_once(capfd):
    with log_lines(log_format="json"):
        assert run_command(lambda: console.warning("a line") or 0, "failed") == 0
    assert [each["message"] for each in objects(capfd.readouterr().err)] == ["a line"]


def test_all_that_is_logged_is_one_json_object_a_line(capfd):
    """Also tracebacks, warnings, lines of many threads, and one from a signal handler."""
    with log_lines(log_format="json", log_level="info"):
        bind_run_id("r1")
        logging.getLogger("absl").warning("from\nabsl")
        logging.getLogger("apache_beam.typehints.x").warning("noise")
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("pipeline.x").info("failed", exc_info=True, extra={"image": "a.jpg", "reason": "r", "request": ""})
        warnings.warn_explicit("of https://me:secret@host/", UserWarning, __file__, 1, registry={})  # as often as this test runs
        threads = [threading.Thread(target=lambda: [console.info("in parts") for _ in range(50)]) for _ in range(4)]
        threads.append(threading.Thread(target=int, args=("x",), name="of a library"))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        write_unlocked("stopping")
        console.error("last")
    said = objects(capfd.readouterr().err)
    assert all(each["run"] == "r1" and re.fullmatch(rf"{STAMP}\.\d{{6}}Z", each["time"]) for each in said)
    warned, ended = ([each for each in said if each.get("logger") == name] for name in ("py.warnings", "threading"))
    assert any("of https://host/" in each["message"] for each in warned), "libraries may warn, too"
    assert any(each["message"].startswith("exception in of a library\nTraceback") for each in ended)
    absl, failed, *parts, stopping, last = (each for each in said if each not in warned + ended)
    assert (absl["severity"], absl["message"], absl["logger"]) == ("WARNING", "from\nabsl", "absl")
    assert failed["message"].endswith("ValueError: why") and (failed["image"], failed["reason"]) == ("a.jpg", "r")
    assert "request" not in failed and {each["message"] for each in parts} == {"in parts"} and len(parts) == 200
    assert (stopping["message"], last["severity"], last["message"]) == ("stopping", "ERROR", "last")


BEAM = """from apache_beam.runners.worker.log_handler import FnApiLogRecordHandler as Handler
handler = Handler.__new__(Handler)
logging.Handler.__init__(handler)
Handler.emit = lambda *_: None
logging.getLogger().addHandler(handler)"""


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        pytest.param("", "a line", id="no log"),
        pytest.param(BEAM, "a line", id="a worker of Beam, whose launcher may not listen", marks=pytest.mark.slow),
        pytest.param("logging.basicConfig()", "INFO:detect-objects:a line", id="a log of its own"),
    ],
)
def test_a_line_for_a_person_is_seen_outside_of_a_command_once(capfd, setup, shown):
    code = f"import logging\n{setup}\nfrom pipeline.log_lines import console\nconsole.info('a line')"
    subprocess.run([sys.executable, "-W", "ignore::FutureWarning", "-c", code], check=True)  # Google warns of Python 3.10
    assert capfd.readouterr().err.splitlines() == [shown]


def test_an_error_is_seen_where_a_library_has_disabled_all_loggers(capfd):
    def fails():
        console.disabled = True  # as `logging.config.dictConfig` does by default
        raise OSError("a disk")

    assert run_command(fails, "failed") == 1
    assert capfd.readouterr().err == "error: failed: a disk\n"


def test_a_mistake_in_the_config_is_json_too(tmp_path, capfd):
    """The format is known although the job is refused, from the file or from a flag."""
    (tmp_path / "job.yaml").write_text("no_such_key: 1\nmonitoring: {log_format: json}\n")
    for argv in (
        ["--config", str(tmp_path / "job.yaml")],
        ["--log-format", "json", "--no-such-flag", "--input", "a", "--output", "b"],
    ):
        assert run.main(argv) == 2
        (said,) = objects(capfd.readouterr().err)
        assert said["severity"] == "ERROR" and re.search("unknown .*no.such", said["message"]) and said["time"]


@pytest.mark.slow
def test_each_line_of_a_job_is_an_object_and_a_dead_letter_names_its_image(tmp_path, run_job, bright_model):
    write_bright_image(tmp_path / "in" / "a.png", (64, 48), (10, 10, 30, 30))
    (tmp_path / "in" / "broken.png").write_bytes(b"junk")
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--model", bright_model, "--log-format", "json"]
    code, _, err = run_job(*arguments, "--verbose")
    said = objects(err)
    assert code == 0
    (dead,) = (each for each in said if each.get("reason"))
    assert dead["image"].endswith("broken.png") and dead["run"] and len(said) < 100


@pytest.mark.parametrize("why", ["full", "closed"])
def test_lines_that_nobody_can_take_stop_no_job(why, monkeypatch):
    """A full disk of logs, or a pipe whose reader has left, as in `2>&1 | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if why == "full" else writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with log_lines(log_level="info"):
            console.info("one")
            logging.getLogger("pipeline.x").error("a record of the log")
        with contextlib.suppress(OSError):
            stream.close()
    if why == "full":
        os.close(writer)


def test_an_outcome_that_nobody_can_take_is_one_warning(tmp_path):
    """A full disk of logs makes a job that has ended well no failed one; its exit code is the outcome's."""
    (tmp_path / "log").touch()
    program = "from pipeline.log_lines import log_lines, say\nwith log_lines(): say(['one', 'two'])"
    with (tmp_path / "log").open("rb") as cannot_be_written:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=cannot_be_written, stderr=subprocess.PIPE, text=True, check=False
        )
    why = "standard output cannot be written (Bad file descriptor); its lines from here on are lost"
    assert (done.returncode, done.stderr) == (0, f"warning: {why}\n")


def test_a_job_leaves_the_levels_of_loggers_as_they_were():
    loggers = [logging.getLogger(), logging.getLogger("pipeline"), logging.getLogger("apache_beam.typehints")]
    before = [logger.level for logger in loggers]
    with log_lines(log_format="text", log_level="error"):
        assert not logging.getLogger("pipeline").isEnabledFor(logging.WARNING)
    assert [logger.level for logger in loggers] == before
