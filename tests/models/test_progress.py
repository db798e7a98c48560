"""Loops that take long show how far they are; short ones show nothing."""

from models.base import progress


def test_a_short_loop_shows_nothing_and_gives_all(capsys):
    assert list(progress.shown(range(3), "reading", "rows")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_elsewhere_than_on_a_terminal_each_state_is_a_line_of_its_own_with_an_estimate(capsys, monkeypatch):
    """The first line comes after the delay: of several loops, each shorter than the time between two lines, each is shown."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 1e-9)
    for line_seconds, lines in ((3600, 1), (0, 4)):
        monkeypatch.setattr(progress, "_LINE_SECONDS", line_seconds)
        assert list(progress.shown(range(4), "reading", "rows")) == [0, 1, 2, 3]
        shown = capsys.readouterr().err.splitlines()
        assert len(shown) == lines
        assert all(line.startswith("reading:") and "/4 [00:00<" in line for line in shown)
