"""The display: a bar on a terminal, plain lines elsewhere, counting only what came since it began."""

import contextlib
import fcntl
import functools
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from pipeline.config import load_config
from pipeline.launch.loading import load_detector
from pipeline.log_lines import log_lines
from pipeline.process import PROCESS
from pipeline.stats import beam_metrics, progress
from pipeline.stats.counted import COUNTED
from pipeline.stats.job_stats import JobStats
from tests.clock import Clock
from tests.conftest import REPO
from tests.processes import wait_until
from tests.stats.test_beam_metrics import DEAD, DETECTED


class Display(io.StringIO):
    """Standard error, which may be a terminal; lines come a hundred times a second, and there is no model yet."""

    def __init__(self, is_terminal, monkeypatch):
        super().__init__()
        self.is_terminal = is_terminal
        monkeypatch.setattr("sys.stderr", self)
        monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
        monkeypatch.setattr(PROCESS, "waiting_for", "")
        monkeypatch.setattr(COUNTED, "model_stats", JobStats)

    def isatty(self):
        return self.is_terminal

    def shows(self, line):
        return re.search(line, self.getvalue(), re.MULTILINE)

    def wait_for(self, line):
        wait_until(lambda: self.shows(line), self.getvalue)


@contextlib.contextmanager
def displayed():
    """Shows what is counted in the block."""
    with log_lines(), COUNTED.counting() as stats, progress.progress_shown(functools.partial(COUNTED.stats_of, stats)):
        yield


@pytest.mark.parametrize(
    ("is_terminal", "waiting", "working"),
    [
        pytest.param(True, r"loading the model: .*0/10 ", r"9/10 .*2 failed", id="a bar on a terminal"),
        pytest.param(
            False,
            r"^ *\d+ s  loading the model; 10 images found$",
            r"^ *\d+ s  9 of 10 images, \d+\.\d images/s, 2 failed, 1 skipped$",
            id="lines elsewhere",
        ),
    ],
)
def test_what_a_job_waits_for_is_shown_until_an_image_is_done_then_the_counts(monkeypatch, is_terminal, waiting, working):
    display = Display(is_terminal, monkeypatch)
    PROCESS.waiting_for = "loading the model"
    beam_metrics.count_read(100)  # of an earlier job in this process
    with displayed():
        beam_metrics.count_read(11)
        beam_metrics.count_skipped()
        display.wait_for(waiting)
        beam_metrics.count_results(*[DEAD] * 2, *[DETECTED] * 7)
        display.wait_for(working)


def test_the_rate_of_a_line_is_of_the_time_since_the_line_before(monkeypatch):
    """The reports of many workers may take longer to read than the lines are apart."""
    display, clock, stats = Display(False, monkeypatch), Clock(), JobStats(read=1000)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))

    def read_slowly():
        clock.now += 20.0
        stats.latencies.add([1.0] * 40)
        return stats.copy()

    with log_lines(), progress.progress_shown(read_slowly):
        display.wait_for(r"^ +60 s  120 of 1000 images, 2\.0 images/s, 0 failed$")


def test_a_stream_has_lines_also_on_a_terminal(monkeypatch):
    display = Display(True, monkeypatch)
    with log_lines(), progress.progress_shown(lambda: JobStats(read=7), as_bar=False):
        display.wait_for(r"^ *\d+ s  0 of 7 images, 0.0 images/s, 0 failed$")


@pytest.mark.slow
def test_a_job_says_that_its_model_is_loading(monkeypatch, bright_model):
    display = Display(False, monkeypatch)
    config = load_config([], {"model.path": bright_model, "detect.batch_sizes": [3]})
    with displayed():
        load_detector(config)
        assert display.shows(r"^ *\d+ s  loading the model$")  # tens of lines in the time that a model takes
    assert PROCESS.waiting_for == "the model is loaded"


BAR = """
import sys
from models.base.quiet import quiet_stderr
from pipeline.process import PROCESS
from pipeline.stats import beam_metrics, progress
from pipeline.stats.counted import COUNTED

PROCESS.waiting_for = "waiting for workers: 3 of 8 are loading the model"
with COUNTED.counting() as stats, progress.progress_shown(lambda: stats), quiet_stderr():
    beam_metrics.count_read(200)
    sys.stdin.read(1)
"""


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_the_bar_with_its_whole_note_also_while_a_model_is_loaded():
    """What TensorFlow's libraries print is dropped meanwhile."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen([sys.executable, "-c", BAR], stdin=subprocess.PIPE, stderr=theirs, cwd=REPO) as job:
        try:
            os.close(theirs)
            shown = b""
            while b"0/200" not in shown:
                shown += os.read(ours, 1 << 12)
            assert b"\n" not in shown and b"waiting for workers: 3 of 8 are loading the model: " in shown
        finally:
            job.kill()
    os.close(ours)
