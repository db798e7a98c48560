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
import threading

import pytest

from pipeline.config import load_config
from pipeline.launch.loading import load_detector
from pipeline.stats import metrics, progress
from pipeline.stats.job_stats import JobStats
from pipeline.stats.process import PROCESS
from tests.conftest import REPO
from tests.stats.test_metrics import DEAD, DETECTED


class Terminal(io.StringIO):
    """Standard error that may be a terminal; tells when it shows what it should."""

    def __init__(self, is_terminal, line):
        super().__init__()
        self.is_terminal, self.line = is_terminal, line
        self.shown = threading.Event()

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        written = super().write(text)
        if re.search(self.line, self.getvalue(), re.MULTILINE):
            self.shown.set()
        return written


@contextlib.contextmanager
def displayed():
    """Shows what is counted in the block."""
    with PROCESS.counting() as stats, progress.progress_shown(functools.partial(PROCESS.stats_of, stats)):
        yield


@pytest.mark.parametrize(
    ("is_terminal", "line"),
    [(True, r"9/10 .*2 failed"), (False, r"^ *\d+ s  9 of 10 images, \d+\.\d images/s, 2 failed, 1 skipped$")],
    ids=["bar", "lines"],
)
def test_counts_since_it_began_are_shown(monkeypatch, is_terminal, line):
    terminal = Terminal(is_terminal, line)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
    metrics.count_read(100)  # of an earlier job in this process
    with displayed():
        metrics.count_read(11)
        metrics.count_skipped()
        for number in range(9):
            metrics.count_results(DEAD if number < 2 else DETECTED)
        assert terminal.shown.wait(300)


@pytest.mark.parametrize(
    ("is_terminal", "line"),
    [(True, r"loading the model: .*0/7 "), (False, r"^ *\d+ s  loading the model; 7 images found$")],
    ids=["bar", "lines"],
)
def test_what_a_job_waits_for_is_said_until_an_image_is_done(monkeypatch, is_terminal, line):
    waiting, working = (
        Terminal(is_terminal, line),
        Terminal(is_terminal, r"1/7 .*0 failed|1 of 7 images, \d+\.\d images/s, 0 failed"),
    )
    monkeypatch.setattr("sys.stderr", waiting)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
    monkeypatch.setattr(PROCESS, "waiting_for", "loading the model")
    monkeypatch.setattr(PROCESS, "model", None)
    with displayed():
        metrics.count_read(7)
        assert waiting.shown.wait(300)
        if not is_terminal:
            monkeypatch.setattr("sys.stderr", working)
        metrics.count_results(DETECTED)
        assert (waiting if is_terminal else working).shown.wait(300)


def test_a_stream_has_lines_also_on_a_terminal(monkeypatch):
    terminal = Terminal(True, r"^ *\d+ s  0 of 7 images, 0.0 images/s, 0 failed$")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
    monkeypatch.setattr(PROCESS, "waiting_for", "")
    with progress.progress_shown(lambda: JobStats(read=7), as_bar=False):
        assert terminal.shown.wait(300)


def test_a_job_says_that_its_model_is_loading(monkeypatch, bright_model):
    terminal = Terminal(False, r"^ *\d+ s  loading the model$")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
    monkeypatch.setattr(PROCESS, "model", None)
    config = load_config([], {"model.path": bright_model, "detect.batch_sizes": [3]})
    with displayed():
        load_detector(config)
        assert terminal.shown.is_set()  # tens of lines in the time that a model takes
    assert PROCESS.waiting_for == "the model is loaded"


BAR = """
import sys
from models.quiet import quiet_stderr
from pipeline.stats import metrics, progress
from pipeline.stats.process import PROCESS

PROCESS.waiting_for = "waiting for workers: 3 of 8 are loading the model"
with PROCESS.counting() as stats, progress.progress_shown(lambda: stats), quiet_stderr():
    metrics.count_read(200)
    sys.stdin.read(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm-256color", "screen", "tmux-256color"])
def test_a_terminal_shows_the_bar_with_its_whole_note_also_while_a_model_is_loaded(term):
    """On a terminal of 80 columns, as tmux has it; what TensorFlow's libraries print is dropped meanwhile."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": term}
    with subprocess.Popen([sys.executable, "-c", BAR], stdin=subprocess.PIPE, stderr=theirs, env=env, cwd=REPO) as job:
        try:
            os.close(theirs)
            shown = b""
            while b"0/200" not in shown:
                shown += os.read(ours, 1 << 12)
            assert b"\n" not in shown and b"waiting for workers: 3 of 8 are loading the model: " in shown
            job.stdin.write(b"\n")
            job.stdin.flush()
        finally:
            job.kill()
    os.close(ours)
