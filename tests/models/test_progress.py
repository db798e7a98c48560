"""Loops that take long show how far they are; short ones show nothing."""

from models import progress


def test_a_short_loop_shows_nothing_and_gives_all(capsys):
    assert list(progress.shown(range(3), "reading", "rows")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_elsewhere_than_on_a_terminal_each_state_is_a_line_of_its_own_with_an_estimate(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    assert list(progress.shown(range(4), "reading", "rows")) == [0, 1, 2, 3]
    lines = capsys.readouterr().err.splitlines()
    assert [line[:18] for line in lines if "/4" in line][-1] == "reading: 100% 4/4 " and "<" in lines[0]
    assert not [line for line in lines if "\r" in line or not line.strip()]


def test_elsewhere_than_on_a_terminal_the_first_line_comes_after_the_delay(capsys, monkeypatch):
    """A command of several loops, each shorter than the time between two lines, shows each of them."""
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 1e-9)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 3600)
    assert list(progress.shown(range(4), "reading", "rows")) == [0, 1, 2, 3]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("reading:") and "/4 [00:00<" in line
