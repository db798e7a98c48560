"""A run: its name, its folder of unfinished files, and its state, which changes by compare-and-swap.

    .staging-<run>/run.json    the state, with the run's settings and what it commits

    running  --> committed --> done        `detached`: running without its launcher
    detached --> stopped

The state decides. A run that is `stopped` never commits; a run that is `committed` is finished by the first
process that finds it: a worker, the launcher after a signal, the next run in this folder, or a run that takes over. To finish is

    1. each file gets its name: rows first, then their indexes
    2. the files that they replace are deleted, unless they were overwritten since; the summary last
    3. the state becomes `done`

Each step may be repeated, also by several processes at once. Earlier results stay until the new ones are there, and a reader
finds a mixture only while these steps run. Files are synced before the state names them, so a power cut changes
nothing. The first of several attempts to commit decides which files, and which files they replace.

A run that was killed, stopped or failed before it committed leaves its resume points for a week (see `resume_points`).
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.errors import OutputError
from pipeline.records import row_bytes
from pipeline.results.cancellation import begin_commit, confirm_commit
from pipeline.results.layout import ARCHIVE, INDEX, STAGING, SUMMARY, StagedFile, read_summary
from pipeline.results.lease import alive
from pipeline.results.reports import replaced_files
from pipeline.results.resume_points import rows_in
from pipeline.results.run_state import (
    COMMITTED,
    DETACHED,
    DONE,
    RUN,
    RUNNING,
    STOPPED,
    Commit,
    DetachedJob,
    State,
    read_run,
)
from pipeline.storage.files import (
    delete_files,
    delete_if_generation_match,
    exists,
    folders_of,
    list_files,
    make_folder,
    move_files,
    sync,
    write_if_unchanged,
)
from pipeline.storage.globs import escape_glob
from pipeline.storage.listing_backends import generation_of
from pipeline.storage.locks import one_at_a_time


class Run(NamedTuple):
    """One execution of a job, as the results folder knows it.

    Attributes:
      output: The results folder, local or on object storage.
      name: The run's name.
    """

    output: str
    name: str

    @staticmethod
    def new(output: str) -> Run:
        """A run with a name of its own, of which nothing is written yet."""
        return Run(output, uuid.uuid4().hex[:12])

    @staticmethod
    def of_folder(folder: str) -> Run:
        """The run whose folder of unfinished files this is."""
        output, _, name = folder.rpartition("/")
        return Run(output, name.removeprefix(STAGING))

    @property
    def folder(self) -> str:
        """The folder of the run's unfinished files, which no reader looks at."""
        return f"{self.output}/{STAGING}{self.name}"

    def state(self) -> State:
        """The run's state; empty where it has none, or none that can be read."""
        return read_run(self.folder)

    def has_state(self) -> bool:
        """Whether the run has a state; without one it can commit nothing."""
        return exists(f"{self.folder}/{RUN}")

    def is_detached(self) -> bool:
        """Whether the run goes on without its launcher."""
        return "detached" in self.state()

    def is_resumable(self) -> bool:
        """Whether the run's command can resume from what the run left, once the run has ended."""
        return self.state().get("state", DONE) not in (COMMITTED, DONE)

    def rows_kept(self) -> int:
        """How many rows the resume points of an ended run have."""
        return rows_in(self.folder) if self.is_resumable() else 0

    def begin(self, about: Mapping[str, Any]) -> None:
        """Writes the first state of a run; `about` is what other runs must know of it."""
        make_folder(self.folder)
        state = DETACHED if "detached" in about else RUNNING
        self._change(lambda _: State(state=state, **about))  # type: ignore[typeddict-item]

    def detach(self, settings: Mapping[str, Any], job: DetachedJob) -> None:
        """Lets the run go on without its launcher; the folder stays for a launcher that attaches."""
        self.begin({"settings": settings, "detached": job})

    @contextlib.contextmanager
    def held(self, about: Mapping[str, Any]) -> Iterator[None]:
        """Makes the run's folder and holds it as alive; removes it at the end, unless another run needs it.

        The folder stays as long as the run is detached, or has resume points for its command, or has committed rows without a
        summary: then it is the only record of the run's settings, and the next run removes it.
        """
        with alive(self.folder):
            self.begin(about)
            cut_short = True
            try:
                yield
                cut_short = False
            finally:
                with contextlib.suppress(Exception):  # the first error counts; the next run tidies up
                    if self.has_state() and (self._has_summary() or not self._is_needed(cut_short)):
                        self.remove()

    def _has_summary(self) -> bool:
        return bool(read_summary(self.output).get("run") == self.name)

    def _is_needed(self, cut_short: bool) -> bool:
        return self.is_detached() or self.stop() or (cut_short and self.rows_kept() > 0)

    def commit(self, files: Sequence[StagedFile], *, unlaunched: Mapping[str, Any] | None = None) -> None:
        """Renames the run's files to their final names and deletes the files that they replace; may be repeated.

        Args:
          files: All files of the run.
          unlaunched: What other runs must know of a job without a launcher, as of a template. Such jobs follow each other in one
            folder, so a finished commit of other files is no attempt at this one.

        Raises:
          OutputError: The run was stopped.
          TakenOverError: Another run took over the images.
          KeyboardInterrupt: This process was stopped (see `cancellation`).
        """
        confirm_commit()
        begin_commit()
        names = [(file.staged.removeprefix(f"{self.output}/"), file.final) for file in files]
        settings = (self.state() or unlaunched or {}).get("settings", {})
        commit = Commit(names, replaced_files(self.output, self.name, [final for _, final in names], settings))
        staged = [file.staged for file in files]
        sync([*staged, *folders_of(staged)])

        def decide(state: State) -> State:
            before = state["commit"].names if state.get("state") in (COMMITTED, DONE) else ()
            is_of_another_job = unlaunched and state.get("state") == DONE and not {*before} & {*names}
            if before and not is_of_another_job:
                return state
            if state["state"] == STOPPED if state else unlaunched is None:
                raise OutputError(f"output {self.output}: this run was stopped before its results were complete")
            return State(**{**state, **(unlaunched or {}), "state": COMMITTED, "commit": commit})  # type: ignore[typeddict-item]

        self._change(decide)
        if not self.finish():
            raise OutputError(f"output {self.output}: the state of this run was lost during its commit; run the command again")

    def stop(self) -> bool:
        """Keeps the run from committing from here on; finishes what it has committed before, and returns whether it had."""
        self._change(lambda state: {**state, "state": STOPPED} if state.get("state") in (RUNNING, DETACHED) else state)
        return self.finish()

    def finish(self) -> bool:
        """Finishes what the run has committed; returns whether it has. May be called by several processes at once."""
        with one_at_a_time(self.output):
            state = self.state()
            if state.get("state") != COMMITTED:
                return state.get("state") == DONE
            commit = state["commit"]
            for is_index in (False, True):
                of_kind = [(staged, final) for staged, final in commit.names if final.startswith(f"{INDEX}/") is is_index]
                move_files({f"{self.output}/{staged}": f"{self.output}/{final}" for staged, final in of_kind})
            for is_summary in (False, True):
                gone = {name: generation for name, generation in commit.gone.items() if (name == SUMMARY) is is_summary}
                delete_if_generation_match({f"{self.output}/{name}": generation for name, generation in gone.items()})
            self._change(lambda now: {**now, "state": DONE} if now.get("state") == COMMITTED and now["commit"] == commit else now)
            return True

    def remove(self) -> None:
        """Removes the run's folder, unless it holds rows on their way to a stream's archive: their messages are acknowledged."""
        if list_files(f"{escape_glob(self.folder)}/{ARCHIVE}/*.rows"):
            return
        if "://" not in self.folder:
            with self._locked():
                delete_files([f"{self.folder}/{RUN}"])  # first: what a kill leaves is then no run without its lock
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        paths = list_files(f"{escape_glob(self.folder)}/**")
        delete_files(path for path in paths if path != f"{self.folder}/{RUN}")
        delete_files([f"{self.folder}/{RUN}"])  # last: what a kill leaves is still known as a dead run

    def _change(self, change: Callable[[State], State]) -> None:
        """Swaps the state for what `change` makes of it; calls `change` again if another process was faster.

        A lost answer does no harm: `change` returns what is already so as it is, and then nothing is written.
        """
        path = f"{self.folder}/{RUN}"
        with self._locked():
            while True:
                generation = generation_of(path)  # before the content, so that this is never older
                state = self.state()
                changed = change(state)
                if changed == state or write_if_unchanged(path, row_bytes(changed), generation):
                    return

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other processes from changing the state in a local folder, if there is one and its disk has locks for folders."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(one_at_a_time(self.folder))
            yield


def fence(folder: str) -> None:
    """Keeps the run with this folder from committing, whichever of its processes tries; finishes what it has committed."""
    Run.of_folder(folder).stop()
