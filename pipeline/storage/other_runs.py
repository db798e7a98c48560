"""The other runs of an output, by their staging folders: who is at work, who was killed, who goes on without a launcher.

What killed runs had begun to publish is finished, what they leave is taken over or removed. A run that was left to itself keeps
its folder, since its workers tell their figures there; it goes when nothing in it has changed for a week.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.storage.files import list_files
from pipeline.storage.globs import escape_glob
from pipeline.storage.lease import age_s, if_dead
from pipeline.storage.results import STAGING
from pipeline.storage.resume_points import take_over
from pipeline.storage.run_state import DETACHED, DetachedJob, about, is_own_staging
from pipeline.storage.staging import (
    finish_publishing,
    goes_on,
    introduce,
    is_detached,
    is_introduced,
    is_published,
    output_of,
    remove,
    rows_kept,
    run_of,
)

_KEPT_SECONDS = 7 * 86_400.0


def finish_dead(output: str) -> None:
    """Finishes what killed runs had begun to publish; what they say of themselves stays, for `settings_published`."""
    for staging in others(output):
        with if_dead(staging) as dead:
            if dead and is_introduced(staging) and is_own_staging(staging):
                try:
                    finish_publishing(staging)
                except FileNotFoundError:  # somebody tidied up there, so that it can never be finished
                    remove(staging)


def remove_dead(output: str, but: str, mode: str = "") -> None:
    """Removes the staging folders of killed runs, all or those of a mode; checkpoints and runs that were left have a week.

    Only once this run's own summary stands there does nobody need those of jobs.
    """
    for staging in others(output, but):
        with if_dead(staging) as dead:
            wanted = dead and (not mode or any(mode_of(said) == mode for said in about(staging)))
            if (
                wanted
                and is_own_staging(staging)
                and not ((is_detached(staging) or rows_kept(staging)) and age_s(staging) < _KEPT_SECONDS)
            ):
                remove(staging)


def take_over_killed(staging: str, same: str) -> None:
    """Takes over the checkpoints of killed runs of the same command; of a run that published, nothing is left to be done.

    Args:
      staging: A folder that the run holds that takes over; on object storage it has the lease, too.
      same: What runs of one command say of themselves as `same`.
    """
    with contextlib.ExitStack() as stack:
        dead = [other for other in others(output_of(staging), but=staging) if stack.enter_context(if_dead(other))]
        killed = [other for other in dead if goes_on(other) and any(said.get("same") == same for said in about(other))]
        take_over(killed, staging)
        for other in killed:
            remove(other)


def leave(staging: str, settings: Mapping[str, Any], left: DetachedJob) -> None:
    """Leaves a run to itself; its folder is kept for whoever comes back to it."""
    introduce(staging, {"settings": settings, DETACHED: left})


def attached_run(output: str, job: str) -> tuple[str, DetachedJob] | None:
    """The staging folder of a job that was left, and what is known of it; None where nobody has left such a job here."""
    for staging in others(output) if job else ():
        for said in about(staging):
            left: DetachedJob | None = said.get(DETACHED)
            if left and left.job == job:
                return staging, left
    return None


def others(output: str, but: str = "") -> list[str]:
    """The staging folders that lie in an output."""
    if "://" not in output:
        return sorted(
            path
            for path in glob.glob(f"{glob.escape(output)}/{STAGING}*")
            if os.path.isdir(path) and path != but and not os.path.islink(path)
        )
    paths = list_files(f"{escape_glob(output)}/{STAGING}**")
    folders = {"/".join(path.split("/")[: output.count("/") + 2]) for path in paths}
    return sorted(folders - {but, *paths})


def mode_of(about: Mapping[str, Any]) -> str:
    """The mode of a run by what it says of itself; empty where it does not."""
    return str(about.get("settings", {}).get("mode", ""))


def settings_at_work(output: str) -> Iterator[dict[str, Any]]:
    """What the runs say of themselves that are at work in an output now."""
    yield from runs_at_work(output).values()


def runs_at_work(output: str, but: str = "") -> dict[str, dict[str, Any]]:
    """The names of the runs that are at work in an output now, and what they say of themselves."""
    runs = {}
    for staging in others(output, but):
        with if_dead(staging) as dead:
            if not dead:
                runs.update({run_of(staging): said for said in about(staging)})
    return runs


def settings_published(output: str) -> Iterator[dict[str, Any]]:
    """What runs say of themselves that published their rows in an output, but were killed before their summary was there."""
    for staging in others(output):
        if is_published(staging):
            yield from about(staging)
