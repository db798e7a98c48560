"""Progress: a bar on a terminal, plain lines elsewhere, counting only what came since it began."""

import io
import re
import threading

import pytest

from pipeline.figures import progress


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


@pytest.mark.parametrize(
    ("is_terminal", "line"),
    [(True, r"9/10 .*2 failed"), (False, r"^ *\d+ s  9 of 10 images, \d+\.\d images/s, 2 failed$")],
    ids=["bar", "lines"],
)
def test_counts_since_it_began_are_shown(monkeypatch, is_terminal, line):
    terminal = Terminal(is_terminal, line)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
    progress.count("listed", 100)  # of an earlier job in this process
    with progress.ProgressDisplay():
        progress.count("listed", 10)
        progress.count("dead", 2)
        progress.count("detected", 7)
        assert terminal.shown.wait(30)


def test_counts_of_many_threads_add_up():
    before = progress.snapshot()
    threads = [threading.Thread(target=lambda: [progress.count("detected") for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (progress.snapshot() - before)["detected"] == 4000
