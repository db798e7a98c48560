"""The other runs of a results folder, by their folders: which are at work, which were killed, which are detached.

Finishes what killed runs have committed, and takes over or removes what they leave. A detached run keeps its folder, to which its
workers report; it goes when nothing in it has changed for a week.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator

from pipeline.results.layout import STAGING
from pipeline.results.lease import age_s, if_dead
from pipeline.results.resume_points import take_over
from pipeline.results.run import Run
from pipeline.results.run_state import DONE, DetachedJob, State, is_own_folder
from pipeline.storage.files import list_files
from pipeline.storage.globs import escape_glob

_KEPT_SECONDS = 7 * 86_400.0


def finish_dead(output: str) -> None:
    """Finishes what killed runs have committed; their states stay, for `committed_states`."""
    for run in others(output):
        with if_dead(run.folder) as dead:
            if dead and run.has_state() and is_own_folder(run.folder):
                try:
                    run.finish()
                except FileNotFoundError:  # its files were removed, so it can never be finished
                    run.remove()


def remove_dead(output: str, but: Run | None = None, mode: str = "") -> None:
    """Removes the folders of killed runs, all or those of a mode; resume points and detached runs are kept for a week.

    To be called after this run's summary is written: before, the state of a killed job may be the only record of its settings.
    """
    for run in others(output, but):
        with if_dead(run.folder) as dead:
            wanted = dead and (not mode or mode_of(run.state()) == mode)
            if wanted and is_own_folder(run.folder) and not _is_kept(run):
                run.remove()


def _is_kept(run: Run) -> bool:
    return (run.is_detached() or run.rows_kept() > 0) and age_s(run.folder) < _KEPT_SECONDS


def take_over_killed(run: Run, same: str) -> None:
    """Takes over the resume points of killed runs of the same command; a run that committed has left nothing to do.

    Args:
      run: The run that takes over; its folder is held, and on object storage it has the lease, too.
      same: What runs of one command have as `same` in their states.
    """
    with contextlib.ExitStack() as stack:
        dead = [other for other in others(run.output, but=run) if stack.enter_context(if_dead(other.folder))]
        killed = [other for other in dead if other.is_resumable() and other.state().get("same") == same]
        take_over([other.folder for other in killed], run.folder)
        for other in killed:
            other.remove()


def attached_run(output: str, job: str) -> tuple[Run, DetachedJob] | None:
    """A detached run by its runner's name of the job, and what is known of it; None where there is no such run."""
    for run in others(output) if job else ():
        detached = run.state().get("detached")
        if detached and detached.job == job:
            return run, detached
    return None


def others(output: str, but: Run | None = None) -> list[Run]:
    """The runs that have a folder in an output."""
    if "://" not in output:
        paths = glob.glob(f"{glob.escape(output)}/{STAGING}*")
        folders = {path for path in paths if os.path.isdir(path) and not os.path.islink(path)}
    else:
        files = list_files(f"{escape_glob(output)}/{STAGING}**")
        folders = {"/".join(path.split("/")[: output.count("/") + 2]) for path in files} - {*files}
    return [run for run in map(Run.of_folder, sorted(folders)) if run != but]


def mode_of(state: State) -> str:
    """The mode of a run; empty where its state does not have it."""
    return str(state.get("settings", {}).get("mode", ""))


def runs_at_work(output: str, but: Run | None = None) -> dict[str, State]:
    """The runs that are at work in an output now, by their names, with their states."""
    runs = {}
    for run in others(output, but):
        with if_dead(run.folder) as dead:
            if not dead and (state := run.state()):
                runs[run.name] = state
    return runs


def committed_states(output: str) -> Iterator[State]:
    """The states of the runs that have committed their rows in an output, but were killed before their summary was there."""
    return (state for run in others(output) if (state := run.state()).get("state") == DONE)
