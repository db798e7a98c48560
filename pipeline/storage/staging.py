"""A run's unfinished files, and how they get their names: all of them or none, whatever happens in between.

A run gathers its files in `<output>/.staging-<run>/`, which it holds while it lives, and touches no other run's. To publish is

    1. the files are synced, and `commit.json` is written there, once: from now on the results are complete, and will have their
       names, whatever happens, also a power cut
    2. each file gets its name
    3. what the run takes the place of goes: files of the same command that are not among the new ones, or all with `--replace`;
       none where it adds to others. What stands beside the rows makes way (see `beside`)
    4. `published.json` is written

Each step may be taken again, by a second worker at the same time, by the launcher when a signal has stopped the runner, or by the
next run in this folder when this one was killed. So no earlier result goes before the new ones are there, and no reader ever
finds a mixture for longer than that.

Of several attempts the first that commits decides for all: which files, and which ones go for them, as they were then. So one
that was paused, and goes on when others have published since, moves and removes nothing that is theirs.

A run that was killed, was stopped or failed before that leaves its resume points, from which the same command goes on (see
`checkpoints`). They are kept for it, whatever else runs in the folder meanwhile, for a week.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import OutputError
from pipeline.records import row_bytes
from pipeline.storage.beside import in_the_way, make_way
from pipeline.storage.cancellation import begin_publishing, confirm_publishing
from pipeline.storage.files import (
    delete_files,
    delete_if_generation_match,
    exists,
    folders_of,
    list_files,
    move_files,
    sync,
    write_file,
    write_once,
)
from pipeline.storage.globs import escape_glob
from pipeline.storage.lease import alive
from pipeline.storage.locks import one_at_a_time
from pipeline.storage.results import INDEX, STAGING, SUMMARY, StagedFile, read_summary
from pipeline.storage.resume_points import rows_in
from pipeline.storage.run_state import DETACHED, RUN, Commit, about, read_commit

_READY, _COMMIT, _PUBLISHED, _STOPPED = "ready.json", "commit.json", "published.json", "stopped"


def new_staging(output: str) -> str:
    """Where a new run's unfinished files shall be."""
    return staging_of(output, uuid.uuid4().hex[:12])


def staging_of(output: str, run: str) -> str:
    """Where the unfinished files of a run are."""
    return f"{output}/{STAGING}{run}"


def output_of(staging: str) -> str:
    """The results folder in which a staging folder lies."""
    return staging.rpartition("/")[0]


def run_of(staging: str) -> str:
    """The name of the run whose staging folder this is."""
    return staging.rpartition(STAGING)[2]


@contextlib.contextmanager
def held(staging: str, told: Mapping[str, Any]) -> Iterator[None]:
    """Makes a run's staging folder and holds it; afterwards it goes.

    It stays where the run's rows stand without a summary, for then nothing else says whose they are; the next run removes it.
    It also stays with the resume points of a run that was cut short before it published, for its command, and of a run that goes
    on without its launcher, for the next one.

    Args:
      staging: The folder.
      told: What others must know of the run: its settings.
    """
    with alive(staging):
        introduce(staging, told)
        cut_short = True
        try:
            yield
            cut_short = False
        finally:
            with contextlib.suppress(Exception):  # what ended the run is what matters; the next one looks after the rest
                if exists(f"{staging}/{RUN}") and (_is_told_of(staging) or not _is_needed(staging, cut_short)):
                    remove(staging)


def _is_needed(staging: str, cut_short: bool) -> bool:
    """Whether a run goes on without its launcher; or has published, and then it is done with it now; or can be gone on from."""
    return is_detached(staging) or stop_publishing(staging) or (cut_short and rows_kept(staging) > 0)


def is_published(staging: str) -> bool:
    """Whether a run's files have their names, all of them."""
    return exists(f"{staging}/{_PUBLISHED}")


def is_detached(staging: str) -> bool:
    """Whether a run goes on without a launcher."""
    return any(DETACHED in said for said in about(staging))


def introduce(staging: str, told: Mapping[str, Any]) -> None:
    """Says what others must know of a run; without that nothing of it is published."""
    write_file(f"{staging}/{RUN}", row_bytes(told))


def is_introduced(staging: str) -> bool:
    """Whether a run said so much of itself that something of it could be published."""
    return exists(f"{staging}/{RUN}")


def _is_told_of(staging: str) -> bool:
    return bool(read_summary(output_of(staging)).get("run") == run_of(staging))


def publish(staging: str, files: Sequence[StagedFile], *, again: bool = False) -> None:
    """Gives a run's files their names, and removes what an earlier run left; those of the first attempt that came so far.

    Args:
      staging: The run's folder.
      files: All of its files.
      again: Whether jobs follow each other in this folder, as those of one template do: what an earlier one has published there
        is then no attempt at the same.

    Raises:
      OutputError: The run was stopped.
      TakenOverError: Another run took over what this one works at.
      KeyboardInterrupt: It was stopped, and in this process (see `stopping`).
    """
    confirm_publishing()
    begin_publishing()
    output = output_of(staging)
    names = [(file.staged.removeprefix(f"{output}/"), file.final) for file in files]
    before = _committed(staging)
    if again and exists(f"{staging}/{_PUBLISHED}") and not (before and {*before.names} & {*names}):
        _delete_in_order([f"{staging}/{_COMMIT}", f"{staging}/{_PUBLISHED}"])
    commit = Commit(names, _gone(staging, [final for _, final in names]), bool(_settings(staging).get("only_new")))
    told = row_bytes(commit._asdict())
    if exists(f"{staging}/{_PUBLISHED}"):
        return  # another attempt has published, and what was found to go may have come after that
    staged = [file.staged for file in files]
    sync([*staged, *folders_of(staged)])
    write_file(f"{staging}/{_READY}", told)
    # Who stops a run writes `stopped` and then looks for ready.json; here it is the other way round. So at least one of the two
    # sees the other, whatever their order, and a run is never half stopped and half published.
    if exists(f"{staging}/{_STOPPED}") or not exists(f"{staging}/{RUN}"):
        raise OutputError(f"output {output}: this run was stopped before its results were complete")
    _commit(staging, told)
    if not finish_publishing(staging):
        raise OutputError(f"output {output}: expected {staging}/{_COMMIT} to be what this run wrote; nothing was published")


def stop_publishing(staging: str) -> bool:
    """Keeps a run from publishing from here on; True where it was ready to, and then it is done with it now."""
    stopped_before = exists(f"{staging}/{_STOPPED}")
    write_file(f"{staging}/{_STOPPED}", b"")
    ready = None if stopped_before else read_commit(staging, _READY)
    if ready and not exists(f"{staging}/{_PUBLISHED}"):
        _commit(staging, row_bytes(ready._asdict()))
    return finish_publishing(staging)


def fence(staging: str) -> None:
    """Keeps another run from publishing, whatever process of it is at that; before it is introduced none can be.

    It may end meanwhile, and remove its folder. That takes `run.json` first and `stopped` after it, so what is written here goes
    with the rest, or it is seen here that the run has ended.
    """
    if is_introduced(staging):
        stop_publishing(staging)
        if not is_introduced(staging):
            remove(staging)


def finish_publishing(staging: str) -> bool:
    """Does what is left of a publishing that was begun; False where none was, and nothing has happened.

    May be called by several at once.
    """
    output = output_of(staging)
    with one_at_a_time(output):
        if exists(f"{staging}/{_PUBLISHED}"):
            return True
        commit = _committed(staging)
        if commit is None:
            return False
        if _adds(staging, commit):
            make_way(output, run_of(staging))  # first, for COCO files have the same names
        for is_index in (False, True):  # one that gets its name has its rows beside it
            of_kind = [(staged, final) for staged, final in commit.names if final.startswith(f"{INDEX}/") is is_index]
            move_files({f"{output}/{staged}": f"{output}/{final}" for staged, final in of_kind})
        for is_summary in (False, True):  # it says of its run what else is to go
            gone = {name: generation for name, generation in commit.gone.items() if (name == SUMMARY) is is_summary}
            delete_if_generation_match({f"{output}/{name}": generation for name, generation in gone.items()})
        write_file(f"{staging}/{_PUBLISHED}", b"")
        return True


def _commit(staging: str, told: bytes) -> None:
    """Says what is published and what goes for it, unless that was said."""
    with one_at_a_time(output_of(staging)):
        write_once(f"{staging}/{_COMMIT}", told)


def _committed(staging: str) -> Commit | None:
    """What `_commit` wrote; None where that is not there, or cannot be known.

    Where `commit.json` is there and cannot be read, `ready.json` says it: some attempt has committed, and the latest one has all
    rows under the same names.
    """
    if not exists(f"{staging}/{_COMMIT}"):
        return None
    return read_commit(staging, _COMMIT) or read_commit(staging, _READY)


def _adds(staging: str, commit: Commit) -> bool:
    """Whether a run adds to what is there; one that has ended meanwhile, and whose folder went, moves nothing any more."""
    if any(about(staging)):
        return bool(_settings(staging).get("only_new"))
    return is_introduced(staging) and commit.adds


def rows_kept(staging: str) -> int:
    """How many rows a run that has ended has left for its command to go on from."""
    return rows_in(staging) if goes_on(staging) else 0


def goes_on(staging: str) -> bool:
    """Whether a run that has ended had not come as far as to publish, so that its command can go on from its resume points."""
    return any(about(staging)) and _committed(staging) is None and not exists(f"{staging}/{_PUBLISHED}")


def remove(staging: str) -> None:
    """Removes a staging folder."""
    if "://" not in staging:
        delete_files([f"{staging}/{RUN}"])  # killed within, it leaves nothing behind that looks like a run without its lock
        shutil.rmtree(staging, ignore_errors=True)
        return
    last = [f"{staging}/{RUN}", f"{staging}/{_STOPPED}"]  # killed within, it is still known as dead; and never does it publish
    delete_files(path for path in list_files(f"{escape_glob(staging)}/**") if path not in last)
    _delete_in_order(last)  # `stopped` may have come since; see `fence`


def _delete_in_order(paths: Sequence[str]) -> None:
    for path in paths:
        delete_files([path])


def _gone(staging: str, new: Collection[str]) -> dict[str, str]:
    """The files that go for a run's, with their generations."""
    settings = _settings(staging)
    if settings.get("only_new"):
        return {}
    return in_the_way(output_of(staging), run_of(staging), new, replace=bool(settings.get("write", {}).get("replace")))


def _settings(staging: str) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = next(about(staging), {}).get("settings", {})
    return settings
