"""What happens to a job at a chosen system call: a signal comes, or storage fails."""

import os

import pytest

# Python imports a module of this name at its start; the hook is called before a file is opened or renamed, a module imported, …
HOOK = """
import os, signal, sys

event, place = os.environ["HOOKED_AT"].split(":")
happened = []

def happen(name, args):
    again = os.environ["HOOKED_DOES"] == "fail"  # a signal comes once; storage that is gone stays away
    if name == event and (again or not happened) and any(isinstance(arg, str) and place in arg for arg in args):
        happened.append(name)
        if os.environ["HOOKED_DOES"] == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise OSError("storage is gone")

sys.addaudithook(happen)
"""


@pytest.fixture
def hooked(tmp_path):
    """The environment of a process to which something happens once: `signal` or `fail`, at `<event>:<part of an argument>`."""

    def environment(place: str, does: str = "signal") -> dict[str, str]:
        (tmp_path / "hook").mkdir()
        (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
        return {**os.environ, "PYTHONPATH": str(tmp_path / "hook"), "HOOKED_AT": place, "HOOKED_DOES": does}

    return environment
